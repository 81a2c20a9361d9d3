//! Opening files of unknown origin: only regular files, and small files only up to a size.
//!
//! ```
//! use fulgurite_error::files::read_regular;
//!
//! // An endless device is refused.
//! assert!(read_regular("/dev/zero", 1 << 20).is_err());
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use crate::{Error, Result};

/// Opens the regular file `path` for reading.
///
/// Other kinds are refused without waiting: reading a pipe without a writer, a device or a socket
/// might never end.
///
/// # Errors
/// [`Error::Io`]: of kind `NotFound` if the file is missing, `IsADirectory` for a directory,
/// `InvalidInput` for other special files.
pub fn open_regular(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    open(path).map_err(Error::io("opening", path))
}

/// Reads the whole regular file `path`, of at most `max` bytes.
///
/// # Errors
/// As [`open_regular`]; of kind `FileTooLarge` if the file is longer.
pub fn read_regular(path: impl AsRef<Path>, max: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let mut file = open_regular(path)?;
    let mut read = || {
        let len = file.metadata()?.len();
        check_len(len, max)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len as usize).map_err(|_| ErrorKind::OutOfMemory)?;
        // The file may grow meanwhile.
        file.by_ref().take(max.saturating_add(1)).read_to_end(&mut bytes)?;
        check_len(bytes.len() as u64, max)?;
        Ok(bytes)
    };
    read().map_err(Error::io("reading", path))
}

/// Reads text as [`read_regular`].
///
/// # Errors
/// As [`read_regular`]; of kind `InvalidData` if the file is not UTF-8.
pub fn read_regular_text(path: impl AsRef<Path>, max: u64) -> Result<String> {
    let path = path.as_ref();
    String::from_utf8(read_regular(path, max)?).map_err(|_| {
        let error = io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text");
        Error::io("reading", path)(error)
    })
}

/// Checks that the size `len` of a small file is at most `max`.
///
/// # Errors
/// Of kind `FileTooLarge`.
pub fn check_len(len: u64, max: u64) -> io::Result<()> {
    if len <= max {
        return Ok(());
    }
    let message = format!("it has {len} bytes; at most {max} are read of a file of this kind");
    Err(io::Error::new(ErrorKind::FileTooLarge, message))
}

/// Recognises common wrong files by their first bytes, and returns advice.
///
/// Such a file often lies in the place of another one. Returns `None` for other content.
///
/// ```
/// use fulgurite_error::files::foreign_content;
///
/// let page = foreign_content(b"<!DOCTYPE html>\n<html>");
/// assert!(page.is_some_and(|what| what.contains("a page of a web site")));
/// assert_eq!(foreign_content(b"{}"), None);
/// ```
pub fn foreign_content(start: &[u8]) -> Option<&'static str> {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let begins = |with: &str| {
        text.get(..with.len()).is_some_and(|text| text.eq_ignore_ascii_case(with.as_bytes()))
    };
    if start.is_empty() {
        Some("it is empty; was a download or a copy interrupted?")
    } else if begins("version https://git-lfs.github.com/spec/") {
        Some(
            "it is a pointer of Git LFS, which stands for the file; get the file itself with `git lfs pull`",
        )
    } else if begins("<!doctype html") || begins("<html") {
        Some(
            "it is a page of a web site, such as of a log-in or an error, and not the file; download the file \
             itself",
        )
    } else if begins("<?xml") {
        Some("it is an XML document, such as a storage server's error; download the file itself")
    } else if start.starts_with(&[0x1f, 0x8b]) {
        Some("it is compressed with gzip; unpack it")
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Some("it is compressed with zstd; unpack it")
    } else if start.len() >= 64 && start.iter().all(|&byte| byte == 0) {
        Some("it begins with zeros: space was reserved for it and never written. Get it again")
    } else {
        None
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Without NONBLOCK, opening a pipe would wait for a writer. The flag does not affect regular
    // files.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let kind = match &opened {
        Ok(file) => file.metadata()?.file_type(),
        // A socket cannot be opened at all.
        Err(error) if error.kind() != ErrorKind::NotFound => match std::fs::metadata(path) {
            Ok(metadata) if metadata.file_type().is_socket() => metadata.file_type(),
            _ => return opened,
        },
        Err(_) => return opened,
    };
    let what = match () {
        () if kind.is_file() => return opened,
        () if kind.is_dir() => {
            return Err(io::Error::new(ErrorKind::IsADirectory, "it is a directory, not a file"));
        }
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() || kind.is_block_device() => "a device",
        () => "something else",
    };
    let message = format!("it is {what}; only regular files are read");
    Err(io::Error::new(ErrorKind::InvalidInput, message))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn special_files_are_refused_without_waiting() {
        let root = std::env::temp_dir().join(format!("fulgurite-files-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let path = |name: &str| root.join(name);
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, path("pipe"), FileType::Fifo, mode, 0).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        std::fs::create_dir_all(path("directory")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zeros")).unwrap();
        std::fs::write(path("long"), [b'x'; 11]).unwrap();
        std::fs::write(path("bytes"), [0xff]).unwrap();
        let shown = ["pipe", "socket", "directory", "zeros", "long", "bytes", "none"].map(|name| {
            let error = read_regular_text(path(name), 10).unwrap_err();
            error.to_string().replace(root.to_str().unwrap(), "ROOT")
        });
        std::fs::write(path("text"), "text").unwrap();
        assert_eq!(read_regular_text(path("text"), 4).unwrap(), "text");
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            shown.join("\n"),
            "opening ROOT/pipe: it is a named pipe; only regular files are read\n\
             opening ROOT/socket: it is a socket; only regular files are read\n\
             opening ROOT/directory: it is a directory, not a file\n\
             opening ROOT/zeros: it is a device; only regular files are read\n\
             reading ROOT/long: it has 11 bytes; at most 10 are read of a file of this kind\n\
             reading ROOT/bytes: it is not UTF-8 text\n\
             opening ROOT/none: No such file or directory (os error 2)"
        );
    }
}
