//! Finds the files that a path of the configuration names or contains.
//!
//! One rule holds for all types of data. Folders are walked with their sub-folders, in order of the
//! paths. Links are followed, except to an ancestor folder, or to a file or folder that was already
//! taken. Hidden files and folders are left out.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fulgurite_engine::data::SourceReport;
use fulgurite_error::files::open_regular;
use fulgurite_error::{Error, Result};
use ignore::Match;
use ignore::gitignore::Gitignore;

/// Extensions of compressed files, which cannot be read.
const COMPRESSED: &[&str] = &["gz", "zst", "bz2", "xz", "lz4", "zip"];

/// The files of a folder to take.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Wanted<'a> {
    /// All files except the ones that a `.gitignore` in the folder excludes.
    Any,
    /// Files with one of these extensions, in lower or upper case.
    Extensions(&'a [&'a str]),
}

/// A file to read.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    /// The named folder; `None` if the file itself was named.
    pub(crate) folder: Option<PathBuf>,
}

/// Finds the files in `paths`, and the wanted files in the folders among them, in order. `key` is
/// the key of the configuration, for messages. The report counts skipped files.
///
/// # Errors
/// If a path is missing or cannot be read, or a folder is without such files.
pub(crate) fn find(
    key: &str,
    paths: &[PathBuf],
    wanted: Wanted,
    report: &mut SourceReport,
) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for path in paths {
        let metadata = check_kind(key, path)?;
        if !metadata.is_dir() {
            found.push(Found { path: path.clone(), folder: None });
            continue;
        }
        let files = find_in(path, path, wanted, report)?;
        if files.is_empty() {
            let what = match wanted {
                Wanted::Any => "text".to_owned(),
                Wanted::Extensions(extensions) => {
                    format!("files named .{}", extensions.join(", ."))
                }
            };
            return Err(nothing_in(path, key, &what, report));
        }
        let folder = Some(path.clone());
        found.extend(files.into_iter().map(|path| Found { path, folder: folder.clone() }));
    }
    Ok(found)
}

/// The wanted files in a folder, in order. The report counts the others, by their paths in `root`.
///
/// # Errors
/// If the folder or one in it cannot be read.
pub(crate) fn find_in(
    root: &Path,
    folder: &Path,
    wanted: Wanted,
    report: &mut SourceReport,
) -> Result<Vec<PathBuf>> {
    let metadata = fs::metadata(folder).map_err(Error::io("reading", folder))?;
    let (ignores, above, found, taken) = (Vec::new(), Vec::new(), Vec::new(), HashSet::new());
    let mut walk = Walk { root, wanted, ignores, above, taken, found, report };
    walk.folder(folder, &metadata)?;
    Ok(walk.found)
}

/// The error of a folder without `what`.
pub(crate) fn nothing_in(folder: &Path, key: &str, what: &str, report: &SourceReport) -> Error {
    let left_out = report.left_out_in_words();
    let advice = match report.left_out.iter().any(|left_out| left_out.fault) {
        true => format!("; name one of them as {key} to read its fault and the remedy"),
        false => String::new(),
    };
    let folder = folder.display();
    Error::Data(format!("the folder {folder} ({key}) holds no {what}{left_out}{advice}"))
}

struct Walk<'a> {
    root: &'a Path,
    wanted: Wanted<'a>,
    /// The `.gitignore` files of the current folder and its ancestors.
    ignores: Vec<Gitignore>,
    /// Device and inode of the current folder and its ancestors.
    above: Vec<(u64, u64)>,
    /// Device and inode of taken folders and files.
    taken: HashSet<(u64, u64)>,
    found: Vec<PathBuf>,
    report: &'a mut SourceReport,
}

impl Walk<'_> {
    fn folder(&mut self, folder: &Path, metadata: &Metadata) -> Result<()> {
        let entries = fs::read_dir(folder).map_err(Error::io("reading", folder))?;
        let paths = entries.map(|entry| Ok(entry.map_err(Error::io("reading", folder))?.path()));
        let mut paths = paths.collect::<Result<Vec<PathBuf>>>()?;
        paths.sort();
        let file = folder.join(".gitignore");
        let ignores = matches!(self.wanted, Wanted::Any) && file.is_file();
        if ignores {
            let (patterns, error) = Gitignore::new(&file);
            // Like git, which skips patterns that it cannot parse.
            if let Some(error) = error.filter(ignore::Error::is_io) {
                return Err(Error::Data(error.to_string()));
            }
            self.ignores.push(patterns);
        }
        self.above.push((metadata.dev(), metadata.ino()));
        for path in &paths {
            self.entry(path)?;
        }
        self.above.pop();
        if ignores {
            self.ignores.pop();
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path) -> Result<()> {
        let root = self.root;
        let name = || path.strip_prefix(root).unwrap_or(path).display();
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            self.report.leave_out("hidden", name());
            return Ok(());
        }
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            // Also a link to itself.
            Err(error) if path.is_symlink() && error.kind() != ErrorKind::PermissionDenied => {
                self.report.fault("linked to nothing", name());
                return Ok(());
            }
            Err(error) => return Err(Error::io("reading", path)(error)),
        };
        if self.is_ignored(path, metadata.is_dir()) {
            self.report.leave_out("excluded by .gitignore", name());
        } else if metadata.is_dir() {
            let identity = (metadata.dev(), metadata.ino());
            if self.above.contains(&identity) {
                self.report.leave_out("linked in a circle", name());
            } else if !self.taken.insert(identity) {
                self.report.leave_out("linked twice", name());
            } else {
                self.folder(path, &metadata)?;
            }
        } else if !metadata.is_file() {
            self.report.leave_out("neither file nor folder", name());
        } else {
            match self.wanted {
                Wanted::Extensions(extensions) if !has_extension(path, extensions) => {
                    let packed = has_extension(path, COMPRESSED)
                        && has_extension(&path.with_extension(""), extensions);
                    match packed {
                        true => self.report.fault("compressed", name()),
                        false => self.report.leave_out("of another type", name()),
                    }
                }
                _ if self.taken.insert((metadata.dev(), metadata.ino())) => {
                    self.found.push(path.to_owned());
                }
                _ => self.report.leave_out("linked twice", name()),
            }
        }
        Ok(())
    }

    fn is_ignored(&self, path: &Path, is_folder: bool) -> bool {
        for ignore in self.ignores.iter().rev() {
            match ignore.matched(path, is_folder) {
                Match::None => {}
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
            }
        }
        false
    }
}

/// Whether a file has one of these extensions, in lower or upper case.
pub(crate) fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|found| extensions.iter().any(|e| e.eq_ignore_ascii_case(found)))
}

/// Checks that a path is a folder or a regular file: reading a device or a pipe may never end.
fn check_kind(key: &str, path: &Path) -> Result<Metadata> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() || found.is_file() => Ok(found),
        Ok(found) => match open_regular(path) {
            Ok(_) => Ok(found),
            Err(error) => Err(Error::Data(format!("{error} ({key})"))),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => {
            Err(Error::Data(format!("there is no file or folder {} ({key})", path.display())))
        }
        Err(e) => Err(Error::Data(format!("reading {} ({key}): {e}", path.display()))),
    }
}
