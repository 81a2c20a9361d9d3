//! Texts from a column of Parquet files.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;

use fulgurite_error::Result;
use fulgurite_error::files::open_regular;
use fulgurite_launch::catch_panic;
use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition};
use parquet::column::reader::{ColumnReaderImpl, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};

use crate::sniff::{Flaw, flaw_of_utf8};

/// Rows decoded at a time.
const ROWS: usize = 1024;

/// The texts in a column of a Parquet file, one per row.
pub(crate) struct Texts {
    reader: SerializedFileReader<File>,
    column: String,
    /// The index of the column.
    index: usize,
    /// The next row group.
    group: usize,
    /// The column in the current row group.
    rows: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Decoded rows; `None` for a row without text.
    decoded: VecDeque<Option<ByteArray>>,
}

impl Texts {
    /// Opens a file. A broken file or a missing column is a flaw.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(crate) fn open(path: &Path, column: &str) -> Result<Result<Self, Flaw>> {
        let file = open_regular(path)?;
        let opened = catch_panic(|| Self::of(file, column));
        Ok(opened.unwrap_or_else(|panic| Err(broken(ParquetError::General(panic)))))
    }

    fn of(file: File, column: &str) -> Result<Self, Flaw> {
        let reader = SerializedFileReader::new(file).map_err(broken)?;
        let schema = reader.metadata().file_metadata().schema();
        let Some(field) = schema.get_fields().iter().find(|field| field.name() == column) else {
            let names: Vec<&str> = schema.get_fields().iter().map(|field| field.name()).collect();
            let names = names.join(", ");
            let message = format!("has no column {column:?} (data.text_key); it has {names}");
            return Err(Flaw::new("without the column", message));
        };
        let info = field.get_basic_info();
        let is_text = info.converted_type() == ConvertedType::UTF8
            || matches!(info.logical_type_ref(), Some(LogicalType::String));
        let repeated = info.has_repetition() && info.repetition() == Repetition::REPEATED;
        if !field.is_primitive() || !is_text || repeated {
            let message = format!("has a column {column:?} (data.text_key), but not of texts");
            return Err(Flaw::new("without texts", message));
        }
        let columns = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
        for compression in columns.map(|column| column.compression()) {
            let codec = match compression {
                Compression::BROTLI(_) => "Brotli",
                Compression::LZO => "LZO",
                _ => continue,
            };
            let message = format!("is compressed with {codec}; write it again with zstd or snappy");
            return Err(Flaw::new("compressed", message));
        }
        let leaves = reader.metadata().file_metadata().schema_descr().columns();
        let index = leaves.iter().position(|leaf| leaf.path().parts() == [column]);
        let index = index.ok_or_else(|| Flaw::new("without the column", "has a broken schema"))?;
        let (column, decoded) = (column.to_owned(), VecDeque::new());
        Ok(Self { reader, column, index, group: 0, rows: None, decoded })
    }

    /// Decodes more rows; returns false at the end of the file.
    fn decode(&mut self) -> Result<bool, ParquetError> {
        while self.decoded.is_empty() {
            let rows = match &mut self.rows {
                Some(rows) => rows,
                None if self.group == self.reader.num_row_groups() => return Ok(false),
                None => {
                    let group = self.reader.get_row_group(self.group)?;
                    self.group += 1;
                    let column = group.get_column_reader(self.index)?;
                    self.rows.insert(get_typed_column_reader(column))
                }
            };
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let (count, ..) = rows.read_records(ROWS, Some(&mut levels), None, &mut values)?;
            let mut values = values.into_iter();
            // Columns without empty rows come without levels.
            let is_there = |row: usize| levels.get(row).is_none_or(|&level| level > 0);
            let texts = (0..count).map(|row| is_there(row).then(|| values.next()).flatten());
            self.decoded.extend(texts);
            if count == 0 {
                self.rows = None;
            }
        }
        Ok(true)
    }
}

impl Iterator for Texts {
    type Item = Result<String, Flaw>;

    fn next(&mut self) -> Option<Self::Item> {
        let decoded = catch_panic(|| self.decode());
        if let Err(error) = decoded.unwrap_or_else(|panic| Err(ParquetError::General(panic))) {
            // The rest of the file cannot be read either.
            (self.rows, self.group) = (None, self.reader.num_row_groups());
            return Some(Err(broken(error)));
        }
        Some(match self.decoded.pop_front()? {
            Some(text) => match str::from_utf8(text.data()) {
                Ok(text) => Ok(text.to_owned()),
                Err(error) => Err(flaw_of_utf8(error, text.data(), 0)),
            },
            None => {
                let message =
                    format!("has no text in the column {:?} (data.text_key)", self.column);
                Err(Flaw::new("without a text", message))
            }
        })
    }
}

fn broken(error: ParquetError) -> Flaw {
    Flaw::new("broken Parquet", format!("cannot be read: {error}"))
}
