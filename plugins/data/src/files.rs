//! Finding data files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use fulgurite_core::files::{open_regular, read_regular};
use fulgurite_core::{Error, Result};
use ignore::WalkBuilder;

use crate::config::{DataKind, TextDataConfig};
use crate::lines::{JsonLines, Lines};

/// The longest text file that is read: it is kept in memory. Files of token ids may be of any length.
const MAX_TEXT: u64 = 16 << 30;

/// The documents that `paths` name or contain, in order, until they have `enough` bytes: whole files, lines, or
/// texts of JSON or Parquet under `text_key`. `key` is the key of the configuration, for messages.
///
/// # Errors
/// If a path is missing, or there is no text at all.
pub(crate) fn documents(
    config: &TextDataConfig,
    key: &str,
    paths: &[PathBuf],
    enough: usize,
) -> Result<Vec<String>> {
    let mut texts = Texts { texts: Vec::new(), bytes: 0, enough };
    match config.kind {
        DataKind::Lines => {
            let lines = Lines::open_as(key, paths, &["txt"])?;
            texts.push_all(lines.len(), |i| lines.get(i))?;
        }
        DataKind::Jsonl => {
            let lines = JsonLines::open_as(key, paths)?;
            texts.push_all(lines.len(), |i| lines.text(i, config.text_key()))?;
        }
        #[cfg(feature = "parquet")]
        DataKind::Parquet => {
            for path in files_of(key, paths, &["parquet"])? {
                crate::parquet_texts::read(&path, config.text_key(), &mut |text| {
                    texts.push(text);
                    !texts.are_enough()
                })?;
            }
        }
        _ => return self::texts(key, paths, enough),
    }
    Ok(texts.texts)
}

/// The texts of all files that `paths` name or contain, in order, until they have `enough` bytes. `key`
/// is the key of the configuration, for messages.
///
/// # Errors
/// If a path is missing, a file that was named is not text, or there is no text at all.
fn texts(key: &str, paths: &[PathBuf], enough: usize) -> Result<Vec<String>> {
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

    fn push_all(&mut self, len: u64, get: impl Fn(u64) -> Result<String>) -> Result<()> {
        for i in 0..len {
            if self.are_enough() {
                break;
            }
            self.push(get(i)?);
        }
        Ok(())
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

/// The extensions of token files.
pub(crate) const TOKEN_FILES: &[&str] = &["u16", "u32", "bin"];

/// The files that `paths` name, and those in the folders among them that have one of the extensions, in order.
///
/// # Errors
/// If a path is missing, or a folder has no such files.
pub(crate) fn files_of(key: &str, paths: &[PathBuf], extensions: &[&str]) -> Result<Vec<PathBuf>> {
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
            let extension = file.extension().and_then(|extension| extension.to_str());
            if extension.is_some_and(|e| extensions.contains(&e)) && file.is_file() {
                found.push(file);
            }
        }
        if found.is_empty() {
            let what = if extensions == TOKEN_FILES { "token files" } else { "files" };
            return Err(Error::Data(format!(
                "the folder {} ({key}) holds no {what} (.{})",
                path.display(),
                extensions.join(", .")
            )));
        }
        found.sort();
        files.append(&mut found);
    }
    Ok(files)
}

/// The error of a read within what had been the length of a file when it was opened.
pub(crate) fn has_changed(path: &Path, file: &File, had: u64, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::UnexpectedEof {
        return Error::io("reading", path)(error);
    }
    let has = match file.metadata() {
        Ok(now) => format!("{} bytes", now.len()),
        Err(error) => format!("an unknown length ({error})"),
    };
    Error::Data(format!(
        "{} had {had} bytes when it was opened and has {has} now; files must not change while they \
         are trained on",
        path.display()
    ))
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
