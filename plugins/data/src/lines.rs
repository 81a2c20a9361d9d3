//! [`Lines`] and [`JsonLines`]: files of lines, read by position.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fulgurite_core::files::open_regular;
use fulgurite_core::{Error, Result};
use serde::de::DeserializeOwned;

use crate::files::{files_of, has_changed};

/// Bytes that are read at a time when lines are counted.
const READ: usize = 1 << 20;

/// The lines of text files, each read when it is asked for: samples for a data module of one's own. Lines
/// without anything but spaces do not count.
///
/// Opening goes through the files once, to find where lines begin, and keeps sixteen bytes a line.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("words.txt");
/// # std::fs::write(&path, "one\ntwo\n\nthree").unwrap();
/// use fulgurite_data::Lines;
///
/// let lines = Lines::open(&[path])?;
/// assert_eq!((lines.len(), lines.get(2)?), (3, "three".to_owned()));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Lines {
    files: Vec<LineFile>,
    /// The index of each file's first line.
    firsts: Vec<u64>,
    len: u64,
}

#[derive(Debug)]
struct LineFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// Where each line begins, and its length.
    lines: Vec<(u64, u64)>,
}

impl Lines {
    /// Opens files, and the `.txt` files directly in folders, in order.
    ///
    /// # Errors
    /// If one is missing or cannot be read, or there is no line at all.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        Self::open_as("the given path", paths, &["txt"])
    }

    pub(crate) fn open_as(
        key: &str,
        paths: &[impl AsRef<Path>],
        extensions: &[&str],
    ) -> Result<Self> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().to_owned()).collect();
        let files = files_of(key, &paths, extensions)?;
        let files = files.into_iter().map(LineFile::open).collect::<Result<Vec<_>>>()?;
        let (mut firsts, mut len) = (Vec::new(), 0);
        for file in &files {
            firsts.push(len);
            len += file.lines.len() as u64;
        }
        if len == 0 {
            let named: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            return Err(Error::Data(format!("{} ({key}): there are no lines", named.join(", "))));
        }
        Ok(Self { files, firsts, len })
    }

    /// Number of lines.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no lines; never, since that is an error when they are opened.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A line, without its end.
    ///
    /// # Errors
    /// If there is no such line, it cannot be read, or is not UTF-8.
    pub fn get(&self, index: u64) -> Result<String> {
        let (file, (start, len)) = self.find(index)?;
        let mut bytes = vec![0; len as usize];
        file.file
            .read_exact_at(&mut bytes, start)
            .map_err(|error| has_changed(&file.path, &file.file, file.bytes, error))?;
        String::from_utf8(bytes)
            .map_err(|_| Error::Data(format!("{} is not UTF-8 text", file.name(start))))
    }

    fn find(&self, index: u64) -> Result<(&LineFile, (u64, u64))> {
        if index >= self.len {
            return Err(Error::Data(format!("there is no line {index} of {}", self.len)));
        }
        let which = self.firsts.partition_point(|&first| first <= index) - 1;
        let file = &self.files[which];
        Ok((file, file.lines[(index - self.firsts[which]) as usize]))
    }

    /// What a message calls a line: its file and number there.
    fn name(&self, index: u64) -> String {
        match self.find(index) {
            Ok((file, (start, _))) => file.name(start),
            Err(_) => format!("line {index}"),
        }
    }
}

impl LineFile {
    fn open(path: PathBuf) -> Result<Self> {
        let file = open_regular(&path)?;
        let mut reader = BufReader::with_capacity(READ, &file);
        let (mut lines, mut at, mut line) = (Vec::new(), 0, Vec::new());
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line).map_err(Error::io("reading", &path))?;
            if read == 0 {
                break;
            }
            let text = match line.strip_suffix(b"\n") {
                Some(text) => text.strip_suffix(b"\r").unwrap_or(text),
                None => &line,
            };
            if !text.trim_ascii().is_empty() {
                lines.push((at, text.len() as u64));
            }
            at += read as u64;
        }
        Ok(Self { path, file, bytes: at, lines })
    }

    fn name(&self, start: u64) -> String {
        let file = self.path.display();
        let number = File::open(&self.path).and_then(|before| {
            let mut reader = BufReader::new(before.take(start));
            let mut count = 1;
            while reader.skip_until(b'\n')? > 0 {
                count += 1;
            }
            Ok(count)
        });
        match number {
            Ok(number) => format!("{file}, line {number}"),
            Err(_) => format!("{file}, byte {start}"),
        }
    }
}

/// JSON values, one a line, each read and parsed when it is asked for.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("reviews.jsonl");
/// # std::fs::write(&path, "{\"text\": \"good\", \"stars\": 5}\n{\"text\": \"bad\", \"stars\": 1}\n").unwrap();
/// use fulgurite_data::JsonLines;
///
/// #[derive(serde::Deserialize)]
/// struct Review { text: String, stars: u32 }
///
/// let reviews = JsonLines::open(&[path])?;
/// let review: Review = reviews.get(1)?;
/// assert_eq!((review.text.as_str(), review.stars), ("bad", 1));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug)]
pub struct JsonLines(Lines);

impl JsonLines {
    /// Opens files, and the `.jsonl` and `.ndjson` files directly in folders, in order.
    ///
    /// # Errors
    /// As [`Lines::open`].
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        Self::open_as("the given path", paths)
    }

    pub(crate) fn open_as(key: &str, paths: &[impl AsRef<Path>]) -> Result<Self> {
        Lines::open_as(key, paths, &["jsonl", "ndjson"]).map(Self)
    }

    /// Number of values.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether there are no values; never, since that is an error when they are opened.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A value.
    ///
    /// # Errors
    /// If there is no such line, it cannot be read, or is no JSON of this type; the message names file and line.
    pub fn get<T: DeserializeOwned>(&self, index: u64) -> Result<T> {
        let line = self.0.get(index)?;
        serde_json::from_str(&line)
            .map_err(|error| Error::Data(format!("{}: {error}", self.0.name(index))))
    }

    /// The text under a key of a value.
    ///
    /// # Errors
    /// As [`get`](Self::get), and if there is no text under the key.
    pub(crate) fn text(&self, index: u64, key: &str) -> Result<String> {
        let mut value: serde_json::Map<String, serde_json::Value> = self.get(index)?;
        match value.remove(key) {
            Some(serde_json::Value::String(text)) => Ok(text),
            found => {
                let what = match found {
                    None => {
                        let keys: Vec<&str> = value.keys().map(String::as_str).collect();
                        format!("no key {key:?}; it has {}", keys.join(", "))
                    }
                    Some(other) => format!("no text under {key:?}, but {other}"),
                };
                let name = self.0.name(index);
                Err(Error::Data(format!("{name}: the value has {what} (data.text_key)")))
            }
        }
    }
}
