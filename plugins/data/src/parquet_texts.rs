//! Texts in a column of Parquet files.

use std::fs::File;
use std::path::Path;

use fulgurite_core::Result;
use fulgurite_core::files::open_regular;
use parquet::basic::{Compression, ConvertedType, LogicalType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::Field;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;

use crate::sniff::Flaw;

/// The texts in a column of a Parquet file, one a row.
pub(crate) struct Texts {
    rows: RowIter<'static>,
    column: String,
    /// Whether a row could not be read; later rows cannot either.
    has_ended: bool,
}

impl Texts {
    /// Opens a file. A broken file and a missing column are flaws.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn open(path: &Path, column: &str) -> Result<Result<Self, Flaw>> {
        let file = open_regular(path)?;
        Ok(Self::of(file, column))
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
        if !field.is_primitive() || !is_text {
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
        let projection = Type::group_type_builder(schema.name())
            .with_fields(vec![field.clone()])
            .build()
            .map_err(broken)?;
        let rows = RowIter::from_file_into(Box::new(reader)).project(Some(projection));
        Ok(Self { rows: rows.map_err(broken)?, column: column.to_owned(), has_ended: false })
    }
}

impl Iterator for Texts {
    type Item = Result<String, Flaw>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        Some(match self.rows.next()? {
            Ok(row) => match row.get_column_iter().next() {
                Some((_, Field::Str(text))) => Ok(text.clone()),
                _ => {
                    let message =
                        format!("has no text in the column {:?} (data.text_key)", self.column);
                    Err(Flaw::new("without a text", message))
                }
            },
            Err(error) => {
                self.has_ended = true;
                Err(broken(error))
            }
        })
    }
}

fn broken(error: ParquetError) -> Flaw {
    Flaw::new("broken Parquet", format!("cannot be read: {error}"))
}
