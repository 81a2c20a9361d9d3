//! [`Lines`] and [`JsonLines`]: files of lines, read by position.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fulgurite_engine::data::SourceReport;
use fulgurite_error::files::open_regular;
use fulgurite_error::{Error, Result};
use serde::de::DeserializeOwned;

use crate::files::has_changed;
use crate::sniff::{BOM, Flaw, HEAD, flaw_of_text, flaw_of_utf8};
use crate::walk::{Wanted, find};

/// Bytes per read while counting lines.
const READ: usize = 1 << 20;
/// Maximum length of a line, which is kept in memory.
const MAX_LINE: u64 = 1 << 30;

/// The extensions of files of lines, and of files of JSON lines.
pub(crate) const TEXT_LINES: &[&str] = &["txt"];
pub(crate) const JSON_LINES: &[&str] = &["jsonl", "ndjson"];

/// The lines of text files, each read on demand: samples for a custom data module. Blank lines do
/// not count.
///
/// Opening reads the files once to find the lines, and keeps sixteen bytes per line.
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
    /// Opens files, and the `.txt` files in folders and their sub-folders, in order.
    ///
    /// # Errors
    /// If a path is missing or cannot be read, is not text (compressed, UTF-16), or if the files
    /// are without lines.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        Self::open_with(paths, TEXT_LINES)
    }

    fn open_with(paths: &[impl AsRef<Path>], extensions: &[&str]) -> Result<Self> {
        let key = "the given path";
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().to_owned()).collect();
        let files = find(key, &paths, Wanted::Extensions(extensions), &mut SourceReport::new(key))?;
        let files = files.into_iter().map(|found| LineFile::open(found.path));
        let files = files.collect::<Result<Vec<_>>>()?;
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

    /// Whether there are zero lines; always false, because opening an empty set is an error.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a line without its end.
    ///
    /// # Errors
    /// If the line does not exist, cannot be read, or is not UTF-8.
    pub fn get(&self, index: u64) -> Result<String> {
        let (file, (start, len)) = self.find(index)?;
        let mut bytes = vec![0; len as usize];
        file.file
            .read_exact_at(&mut bytes, start)
            .map_err(|error| has_changed(&file.path, &file.file, file.bytes, error))?;
        String::from_utf8(bytes).map_err(|error| {
            let flaw = flaw_of_utf8(error.utf8_error(), error.as_bytes(), start);
            Error::Data(format!("{} {}", file.name(start), flaw.message))
        })
    }

    fn find(&self, index: u64) -> Result<(&LineFile, (u64, u64))> {
        if index >= self.len {
            return Err(Error::Data(format!("there is no line {index} of {}", self.len)));
        }
        let which = self.firsts.partition_point(|&first| first <= index) - 1;
        let file = &self.files[which];
        Ok((file, file.lines[(index - self.firsts[which]) as usize]))
    }

    /// The name of a line in messages: its file and number.
    fn name(&self, index: u64) -> String {
        match self.find(index) {
            Ok((file, (start, _))) => file.name(start),
            Err(_) => format!("line {index}"),
        }
    }
}

impl LineFile {
    fn open(path: PathBuf) -> Result<Self> {
        let mut reader = LineReader::open(&path)?
            .map_err(|flaw| Error::Data(format!("{} {}", path.display(), flaw.message)))?;
        let mut lines = Vec::new();
        while let Some(line) = reader.next()? {
            if !line.is_blank() {
                lines.push((line.start, line.text.len() as u64));
            }
        }
        let (file, bytes) = (reader.reader.into_inner(), reader.at);
        Ok(Self { path, file, bytes, lines })
    }

    fn name(&self, start: u64) -> String {
        let file = self.path.display();
        let number = File::open(&self.path).and_then(|before| {
            let mut reader = BufReader::with_capacity(READ, before.take(start));
            let mut number = 1;
            loop {
                let bytes = reader.fill_buf()?;
                if bytes.is_empty() {
                    return Ok(number);
                }
                number += bytes.iter().filter(|&&byte| byte == b'\n').count();
                let read = bytes.len();
                reader.consume(read);
            }
        });
        match number {
            Ok(number) => format!("{file}, line {number}"),
            Err(_) => format!("{file}, byte {start}"),
        }
    }
}

/// Reads the lines of a file in order, without byte-order marks.
pub(crate) struct LineReader {
    path: PathBuf,
    reader: BufReader<File>,
    /// Bytes read so far.
    at: u64,
    /// Lines read so far.
    lines: u64,
    line: Vec<u8>,
}

/// A line of a file.
pub(crate) struct Line<'a> {
    /// The line's number, from 1.
    pub(crate) number: u64,
    /// The position of its first byte.
    pub(crate) start: u64,
    /// The bytes without the line end.
    pub(crate) text: &'a [u8],
    is_last: bool,
}

impl LineReader {
    /// Opens a file. A file that is not text is a flaw.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn open(path: &Path) -> Result<Result<Self, Flaw>> {
        let mut file = open_regular(path)?;
        let mut head = Vec::new();
        let mut read = || {
            file.by_ref().take(HEAD as u64).read_to_end(&mut head)?;
            file.rewind()
        };
        read().map_err(Error::io("reading", path))?;
        if let Some(flaw) = flaw_of_text(&head) {
            return Ok(Err(flaw));
        }
        let reader = BufReader::with_capacity(READ, file);
        Ok(Ok(Self { path: path.to_owned(), reader, at: 0, lines: 0, line: Vec::new() }))
    }

    /// Returns the next line; `None` at the end of the file.
    ///
    /// # Errors
    /// If the line cannot be read or is too long.
    pub(crate) fn next(&mut self) -> Result<Option<Line<'_>>> {
        self.line.clear();
        let mut limited = self.reader.by_ref().take(MAX_LINE + 1);
        let read = limited.read_until(b'\n', &mut self.line);
        let read = read.map_err(Error::io("reading", &self.path))? as u64;
        if read == 0 {
            return Ok(None);
        }
        self.lines += 1;
        if read > MAX_LINE {
            return Err(Error::Data(format!(
                "{}, line {} has more than {MAX_LINE} bytes",
                self.path.display(),
                self.lines
            )));
        }
        let start = self.at;
        self.at += read;
        let (text, is_last) = match self.line.strip_suffix(b"\n") {
            Some(text) => (text.strip_suffix(b"\r").unwrap_or(text), false),
            None => (&*self.line, true),
        };
        // Concatenated files have marks inside.
        let (text, start) = match text.strip_prefix(BOM) {
            Some(text) => (text, start + BOM.len() as u64),
            None => (text, start),
        };
        Ok(Some(Line { number: self.lines, start, text, is_last }))
    }
}

impl Line<'_> {
    /// Whether the line has only white space.
    pub(crate) fn is_blank(&self) -> bool {
        self.text.trim_ascii().is_empty()
    }

    /// The line as text.
    pub(crate) fn as_str(&self) -> Result<&str, Flaw> {
        str::from_utf8(self.text).map_err(|error| flaw_of_utf8(error, self.text, self.start))
    }

    /// Refuses a file that is a single line because of old Mac line ends.
    pub(crate) fn check_end(&self) -> Result<(), Flaw> {
        if self.number == 1 && self.is_last && self.text.trim_ascii().contains(&b'\r') {
            let message = "ends the file, whose lines end with a carriage return alone; convert it with `tr \
                           '\\r' '\\n'`";
            return Err(Flaw::new("lines without a line feed", message));
        }
        Ok(())
    }
}

/// JSON values, one per line, each read and parsed on demand.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("reviews.jsonl");
/// # let text = "{\"text\": \"good\", \"stars\": 5}\n{\"text\": \"bad\", \"stars\": 1}\n";
/// # std::fs::write(&path, text).unwrap();
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
    /// Opens files, and the `.jsonl` and `.ndjson` files in folders and their sub-folders, in
    /// order.
    ///
    /// # Errors
    /// As [`Lines::open`].
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        Lines::open_with(paths, JSON_LINES).map(Self)
    }

    /// Number of values.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether there are zero values; always false, because opening an empty set is an error.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns a value.
    ///
    /// # Errors
    /// If the line does not exist, cannot be read, or is not JSON of this type. The message names
    /// file and line.
    pub fn get<T: DeserializeOwned>(&self, index: u64) -> Result<T> {
        let line = self.0.get(index)?;
        serde_json::from_str(&line).map_err(|error| {
            let flaw = flaw_of_json(&error, &line);
            Error::Data(format!("{} {}", self.0.name(index), flaw.message))
        })
    }
}

/// The text under a key of a JSON object. `is_first` marks the first line of a file.
pub(crate) fn text_of_json(line: &str, key: &str, is_first: bool) -> Result<String, Flaw> {
    if is_first && line.trim_start().starts_with('[') {
        let message = "begins a list of JSON, where every line should be an object; convert the file with `jq -c \
                       '.[]'`";
        return Err(Flaw::new("no JSON lines", message));
    }
    let mut value: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(line).map_err(|error| flaw_of_json(&error, line))?;
    use serde_json::Value;
    let found = match value.remove(key) {
        Some(Value::String(text)) => return Ok(text),
        None => {
            let keys: Vec<&str> = value.keys().map(String::as_str).collect();
            let message = format!("has no key {key:?} (data.text_key); it has {}", keys.join(", "));
            return Err(Flaw::new("without the key", message));
        }
        Some(Value::Array(_)) => "a list".to_owned(),
        Some(Value::Object(_)) => "an object".to_owned(),
        Some(scalar) => scalar.to_string(),
    };
    let message = format!("has no text under the key {key:?} (data.text_key), but {found}");
    Err(Flaw::new("without a text", message))
}

/// The flaw of a line that does not parse.
pub(crate) fn flaw_of_json(error: &serde_json::Error, line: &str) -> Flaw {
    let (column, message) = (error.column(), error.to_string());
    let what = message.rsplit_once(" at line ").map_or(&*message, |(what, _)| what);
    let advice = match what {
        _ if error.is_eof() => {
            "; the file is cut off, or has a value on several lines, which `jq -c .` joins"
        }
        _ if what.contains("surrogate") || what.contains("hex escape") => {
            "; an escape such as \\ud800 is half of a character, and the other half is missing"
        }
        _ if names_no_number(line.get(column.saturating_sub(1)..).unwrap_or_default()) => {
            "; NaN and Infinity are no JSON, where Python writes them: write null"
        }
        _ => "",
    };
    Flaw::new("broken JSON", format!("does not parse: {what} at column {column}{advice}"))
}

/// Whether a text begins with a non-finite number in Python's notation.
fn names_no_number(text: &str) -> bool {
    ["NaN", "Infinity", "-Infinity"].iter().any(|name| text.starts_with(name))
}
