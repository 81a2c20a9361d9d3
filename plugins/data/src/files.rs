//! Reading documents: whole files, lines, texts of JSON lines or of Parquet files.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use fulgurite_engine::data::SourceReport;
use fulgurite_error::files::{check_len, open_regular};
use fulgurite_error::{Error, Result};

use crate::config::{DataKind, OnError, TextDataConfig};
use crate::lines::{JSON_LINES, LineReader, TEXT_LINES, text_of_json};
use crate::sniff::{BOM, Flaw, HEAD, flaw_of_nul, flaw_of_text, flaw_of_utf8};
use crate::walk::{Found, Wanted, find, nothing_in};

/// Maximum length of a text file, which is kept in memory. Token files may be longer.
const MAX_TEXT: u64 = 16 << 30;

/// A source of documents, and the report that counts them.
pub(crate) struct Documents<'a> {
    pub(crate) config: &'a TextDataConfig,
    /// The key of the configuration, for messages.
    pub(crate) key: &'a str,
    pub(crate) paths: &'a [PathBuf],
    /// Bytes of text after which no more is read.
    pub(crate) enough: usize,
    pub(crate) report: &'a mut SourceReport,
    /// Bytes of all files that were not left out, set by [`read`](Self::read). After
    /// a partial read, the rest counts if it begins as text.
    pub(crate) file_bytes: u64,
    /// Bytes of the files that were read; of the last one only its text so far.
    pub(crate) seen_bytes: u64,
}

/// Whether a source was read to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadTo {
    /// All documents were read.
    End,
    /// Enough text was read.
    Enough,
}

/// Receives a document.
pub(crate) type Push<'a> = dyn FnMut(String) -> Result<()> + 'a;

impl<'a> Documents<'a> {
    pub(crate) fn new(
        config: &'a TextDataConfig,
        key: &'a str,
        paths: &'a [PathBuf],
        enough: usize,
        report: &'a mut SourceReport,
    ) -> Self {
        Self { config, key, paths, enough, report, file_bytes: 0, seen_bytes: 0 }
    }

    /// The same documents, for another read.
    pub(crate) fn again<'b>(&self, report: &'b mut SourceReport) -> Documents<'b>
    where
        'a: 'b,
    {
        let Self { config, key, paths, enough, .. } = *self;
        Documents::new(config, key, paths, enough, report)
    }

    /// Bytes of the documents that were read.
    pub(crate) fn bytes(&self) -> u64 {
        self.report.counts.get("bytes").copied().unwrap_or(0)
    }

    /// Passes the documents to `push`, in order, one at a time.
    ///
    /// # Errors
    /// If a path or all documents are missing, or `push` fails. With `data.on_error = "error"`, if
    /// a file, line or row cannot be used.
    pub(crate) fn read(&mut self, push: &mut Push) -> Result<ReadTo> {
        let wanted = match self.config.kind {
            DataKind::Lines => Wanted::Extensions(TEXT_LINES),
            DataKind::Jsonl => Wanted::Extensions(JSON_LINES),
            DataKind::Parquet => Wanted::Extensions(&["parquet"]),
            DataKind::Text | DataKind::Tokens => Wanted::Any,
        };
        let files = find(self.key, self.paths, wanted, self.report)?;
        let len = |file: &Found| file.path.metadata().map_or(0, |about| about.len());
        (self.file_bytes, self.seen_bytes) = (files.iter().map(len).sum(), 0);
        let (mut folder, mut before) = (None, 0);
        for (i, file) in files.iter().enumerate() {
            // A folder may contain files but no text.
            if file.folder != folder {
                self.check_folder(folder.as_deref(), before)?;
                (folder, before) = (file.folder.clone(), self.documents());
            }
            let bytes_before = self.bytes();
            let read = match self.config.kind {
                DataKind::Lines | DataKind::Jsonl => self.read_lines(file, push),
                #[cfg(feature = "parquet")]
                DataKind::Parquet => self.read_rows(file, push),
                _ => self.read_text(file, push),
            };
            if read? == ReadTo::Enough {
                self.seen_bytes += self.bytes() - bytes_before;
                if self.config.kind == DataKind::Text {
                    let rest = files[i + 1..].iter().filter(|file| !begins_as_text(&file.path));
                    self.file_bytes -= rest.map(len).sum::<u64>().min(self.file_bytes);
                }
                return Ok(ReadTo::Enough);
            }
            match self.bytes() > bytes_before {
                true => self.seen_bytes += len(file),
                // It was left out.
                false => self.file_bytes -= len(file).min(self.file_bytes),
            }
        }
        self.check_folder(folder.as_deref(), before)?;
        if self.documents() == 0 {
            let named: Vec<String> =
                self.paths.iter().map(|path| path.display().to_string()).collect();
            let left_out = self.report.left_out_in_words();
            return Err(Error::Data(format!(
                "{} ({}): there is no text{left_out}",
                named.join(", "),
                self.key
            )));
        }
        Ok(ReadTo::End)
    }

    fn documents(&self) -> u64 {
        self.report.counts.get("documents").copied().unwrap_or(0)
    }

    fn check_folder(&self, folder: Option<&Path>, documents_before: u64) -> Result<()> {
        match folder {
            Some(folder) if self.documents() == documents_before => {
                Err(nothing_in(folder, self.key, "text", self.report))
            }
            _ => Ok(()),
        }
    }

    /// Number of bytes still wanted.
    fn left(&self) -> usize {
        self.enough.saturating_sub(self.bytes() as usize)
    }

    /// Passes a document to `push`, unless it is empty.
    fn document(&mut self, place: Place, text: String, push: &mut Push) -> Result<ReadTo> {
        if text.is_empty() {
            self.report.leave_out("empty", place.in_folder());
            return Ok(ReadTo::End);
        }
        self.report.count("documents", 1);
        self.report.count("bytes", text.len() as u64);
        push(text)?;
        Ok(if self.left() == 0 { ReadTo::Enough } else { ReadTo::End })
    }

    /// Counts an unusable file, line or row, or returns its error.
    fn fault(&mut self, place: Place, flaw: &Flaw) -> Result<ReadTo> {
        match self.config.on_error {
            OnError::Skip => {
                self.report.fault(flaw.reason, place.in_folder());
                Ok(ReadTo::End)
            }
            OnError::Error => Err(Error::Data(format!(
                "{place} ({}) {}; or set data.on_error = \"skip\", which leaves out what cannot be used",
                self.key, flaw.message
            ))),
        }
    }

    /// Reads a file as one document.
    fn read_text(&mut self, file: &Found, push: &mut Push) -> Result<ReadTo> {
        let place = Place::of(file);
        let text = match text_of(&file.path, self.left())? {
            Ok(text) => text,
            Err(flaw) if file.folder.is_none() => return self.fault(place, &flaw),
            // A folder may contain files of any kind.
            Err(flaw) => {
                match flaw.expected {
                    true => self.report.leave_out(flaw.reason, place.in_folder()),
                    false => self.report.fault(flaw.reason, place.in_folder()),
                }
                return Ok(ReadTo::End);
            }
        };
        self.report.count("files", u64::from(!text.is_empty()));
        self.document(place, text, push)
    }

    /// Reads a file with one document per line, plain or in JSON.
    fn read_lines(&mut self, file: &Found, push: &mut Push) -> Result<ReadTo> {
        let mut reader = match LineReader::open(&file.path)? {
            Ok(reader) => reader,
            Err(flaw) => return self.fault(Place::of(file), &flaw),
        };
        self.report.count("files", 1);
        let json = self.config.kind == DataKind::Jsonl;
        let key = self.config.text_key().to_owned();
        while let Some(line) = reader.next()? {
            let place = Place { file, at: Some(("line", line.number)) };
            if line.is_blank() {
                self.report.leave_out("blank", place.in_folder());
                continue;
            }
            let text = line.as_str().and_then(|text| match json {
                true => text_of_json(text, &key, line.number == 1),
                false => line.check_end().map(|()| text.to_owned()),
            });
            let read = match text {
                Ok(text) => self.document(place, text, push),
                Err(flaw) => self.fault(place, &flaw),
            };
            if read? == ReadTo::Enough {
                return Ok(ReadTo::Enough);
            }
        }
        Ok(ReadTo::End)
    }

    #[cfg(feature = "parquet")]
    fn read_rows(&mut self, file: &Found, push: &mut Push) -> Result<ReadTo> {
        let texts = match crate::parquet_texts::Texts::open(&file.path, self.config.text_key())? {
            Ok(texts) => texts,
            Err(flaw) => return self.fault(Place::of(file), &flaw),
        };
        self.report.count("files", 1);
        for (number, text) in texts.enumerate() {
            let place = Place { file, at: Some(("row", number as u64)) };
            let read = match text {
                Ok(text) => self.document(place, text, push),
                Err(flaw) => self.fault(place, &flaw),
            };
            if read? == ReadTo::Enough {
                return Ok(ReadTo::Enough);
            }
        }
        Ok(ReadTo::End)
    }
}

/// A file, line or row, for messages. As text, with the file's full path.
#[derive(Clone, Copy)]
struct Place<'a> {
    file: &'a Found,
    at: Option<(&'static str, u64)>,
}

impl<'a> Place<'a> {
    fn of(file: &'a Found) -> Self {
        Self { file, at: None }
    }

    /// The name in the folder that the configuration names.
    fn in_folder(self) -> String {
        let Found { path, folder } = self.file;
        let name = folder.as_ref().and_then(|folder| path.strip_prefix(folder).ok());
        self.name(name.unwrap_or(path), " ")
    }

    fn name(self, path: &Path, between: &str) -> String {
        match self.at {
            None => path.display().to_string(),
            Some((what, number)) => format!("{}{between}{what} {number}", path.display()),
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name(&self.file.path, ", "))
    }
}

/// Whether a file may be text, by its first bytes.
fn begins_as_text(path: &Path) -> bool {
    text_of(path, 1).is_ok_and(|text| text.is_ok())
}

/// The text of a file, or of about its first `enough` bytes, without a byte-order mark.
///
/// # Errors
/// If the file cannot be read or is too long.
fn text_of(path: &Path, enough: usize) -> Result<Result<String, Flaw>> {
    let mut file = open_regular(path)?;
    let mut bytes = Vec::new();
    let mut read = || -> io::Result<Option<Flaw>> {
        file.by_ref().take(HEAD as u64).read_to_end(&mut bytes)?;
        if let Some(flaw) = flaw_of_text(&bytes) {
            return Ok(Some(flaw));
        }
        // With room for the byte-order mark and the rest of a character.
        let wanted = file.metadata()?.len().min(enough.saturating_add(8) as u64);
        check_len(wanted, MAX_TEXT)?;
        let more = wanted.saturating_sub(bytes.len() as u64);
        bytes.try_reserve_exact(more as usize).map_err(|_| io::ErrorKind::OutOfMemory)?;
        file.by_ref().take(more).read_to_end(&mut bytes)?;
        Ok(None)
    };
    if let Some(flaw) = read().map_err(Error::io("reading", path))? {
        return Ok(Err(flaw));
    }
    let start = if bytes.starts_with(BOM) { BOM.len() } else { 0 };
    bytes.drain(..start);
    if let Some(at) = bytes.iter().position(|&byte| byte == 0) {
        return Ok(Err(flaw_of_nul(start + at)));
    }
    Ok(String::from_utf8(bytes).or_else(|error| {
        let (end, cut) =
            (error.utf8_error().valid_up_to(), error.utf8_error().error_len().is_none());
        if cut && end >= enough {
            let mut bytes = error.into_bytes();
            bytes.truncate(end);
            return Ok(String::from_utf8(bytes).unwrap_or_default());
        }
        Err(flaw_of_utf8(error.utf8_error(), error.as_bytes(), start as u64))
    }))
}

/// The error of a read that ended before the length that the file had when it was opened.
pub(crate) fn has_changed(path: &Path, file: &File, had: u64, error: io::Error) -> Error {
    if error.kind() != io::ErrorKind::UnexpectedEof {
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
