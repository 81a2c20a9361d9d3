//! Finding data files.

use std::fs;
use std::path::{Path, PathBuf};

use fulgurite_core::files::{open_regular, read_regular};
use fulgurite_core::{Error, Result};
use ignore::WalkBuilder;

/// The longest text file that is read: it is kept in memory. Files of token ids may be of any length.
const MAX_TEXT: u64 = 16 << 30;

/// The texts of all files that `paths` name or contain, in order, until they have `enough` bytes. `key`
/// is the key of the configuration, for messages.
///
/// # Errors
/// If a path is missing, a file that was named is not text, or there is no text at all.
pub(crate) fn texts(key: &str, paths: &[PathBuf], enough: usize) -> Result<Vec<String>> {
    paths.iter().try_for_each(|path| check_kind(key, path))?;
    let mut texts = Texts { texts: Vec::new(), bytes: 0, enough };
    for path in paths {
        if texts.are_enough() {
            break;
        }
        if path.is_dir() {
            let before = texts.texts.len();
            walk(path, &mut texts)?;
            if texts.texts.len() == before {
                return Err(Error::Data(format!(
                    "the folder {} ({key}) holds no text files (hidden files, what .gitignore \
                     excludes and what is not UTF-8 do not count)",
                    path.display()
                )));
            }
        } else {
            let bytes = read_regular(path, MAX_TEXT)?;
            texts.push(String::from_utf8(bytes).map_err(|_| {
                Error::Data(format!(
                    "{} ({key}) is not UTF-8 text; for files of token ids set data.type = \"tokens\"",
                    path.display()
                ))
            })?);
        }
    }
    Ok(texts.texts)
}

struct Texts {
    texts: Vec<String>,
    bytes: usize,
    enough: usize,
}

impl Texts {
    fn push(&mut self, text: String) {
        self.bytes += text.len();
        self.texts.push(text);
    }

    fn are_enough(&self) -> bool {
        self.bytes >= self.enough
    }
}

fn walk(folder: &Path, texts: &mut Texts) -> Result<()> {
    let walk = WalkBuilder::new(folder)
        .require_git(false) // the same files in a copy without its .git
        .git_global(false) // independent of the user's settings
        .git_exclude(false)
        .sort_by_file_path(Path::cmp)
        .build();
    for entry in walk {
        if texts.are_enough() {
            break;
        }
        let entry = entry.map_err(|e| Error::Data(format!("{}: {e}", folder.display())))?;
        if entry.file_type().is_some_and(|kind| kind.is_file()) {
            let bytes = read_regular(entry.path(), MAX_TEXT)?;
            if let Ok(text) = String::from_utf8(bytes)
                && !text.is_empty()
                && !text.contains('\0')
            {
                texts.push(text);
            }
        }
    }
    Ok(())
}

/// The token files that `paths` name or contain, in order.
///
/// # Errors
/// If a path is missing, or a folder has no token files.
pub(crate) fn token_files(key: &str, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        check_kind(key, path)?;
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(path).map_err(Error::io("reading", path))? {
            let file = entry.map_err(Error::io("reading", path))?.path();
            let known = file.extension().is_some_and(|e| e == "u16" || e == "u32" || e == "bin");
            if known && file.is_file() {
                found.push(file);
            }
        }
        if found.is_empty() {
            return Err(Error::Data(format!(
                "the folder {} ({key}) holds no token files (.u16, .u32, .bin)",
                path.display()
            )));
        }
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

/// Checks that a path is of a folder or a regular file: reading a device or a pipe may never end.
fn check_kind(key: &str, path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() || found.is_file() => Ok(()),
        Ok(_) => match open_regular(path) {
            Ok(_) => Ok(()),
            Err(error) => Err(Error::Data(format!("{error} ({key})"))),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(Error::Data(format!("there is no file or folder {} ({key})", path.display())))
        }
        Err(e) => Err(Error::Data(format!("reading {} ({key}): {e}", path.display()))),
    }
}
