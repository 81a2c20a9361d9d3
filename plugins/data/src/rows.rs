//! Reading rows of named columns from JSON lines, CSV and Parquet files.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fulgurite_engine::data::SourceReport;
use fulgurite_error::files::open_regular;
use fulgurite_error::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::lines::{JSON_LINES, LineReader, flaw_of_json};
use crate::sniff::Flaw;
use crate::walk::{Wanted, find};

/// The extensions of files with a header and separated values.
const SEPARATED: &[&str] = &["csv", "tsv"];

/// A column of the rows: the key that names it in the configuration, and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) key: &'static str,
    pub(crate) name: String,
}

/// The place of a row: its file, and its line or number there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Place {
    file: Arc<Path>,
    unit: &'static str,
    number: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            "" => write!(f, "{}", self.file.display()),
            unit => write!(f, "{}, {unit} {}", self.file.display(), self.number),
        }
    }
}

impl Place {
    /// A place with a name of its own.
    pub(crate) fn named(name: &str) -> Self {
        Self { file: Path::new(name).into(), unit: "", number: 0 }
    }

    /// An error about a row.
    pub(crate) fn wrong(&self, message: impl fmt::Display) -> Error {
        Error::Data(format!("{self} {message}"))
    }
}

/// A value in a row.
pub(crate) trait RowValue: DeserializeOwned {
    /// Whether it is JSON's `null`.
    fn is_null(&self) -> bool;

    /// Makes a value of its parts.
    fn of(part: Part<'_, Self>) -> Self;
}

/// A value, or an element of it.
pub(crate) enum Part<'a, V> {
    Text(&'a str),
    #[cfg(feature = "parquet")]
    Null,
    #[cfg(feature = "parquet")]
    Bool(bool),
    #[cfg(feature = "parquet")]
    Int(i64),
    #[cfg(feature = "parquet")]
    Unsigned(u64),
    #[cfg(feature = "parquet")]
    Float(f64),
    #[cfg_attr(not(feature = "parquet"), expect(dead_code, reason = "only Parquet has lists"))]
    List(Vec<V>),
    #[cfg(feature = "parquet")]
    Table(Vec<(String, V)>),
}

impl RowValue for Value {
    fn is_null(&self) -> bool {
        Self::is_null(self)
    }

    fn of(part: Part<'_, Self>) -> Self {
        match part {
            Part::Text(text) => text.into(),
            Part::List(values) => Self::Array(values),
            #[cfg(feature = "parquet")]
            Part::Null => Self::Null,
            #[cfg(feature = "parquet")]
            Part::Bool(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Int(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Unsigned(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Float(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Table(pairs) => Self::Object(pairs.into_iter().collect()),
        }
    }
}

/// Keeps the order of keys.
impl RowValue for minijinja::Value {
    fn is_null(&self) -> bool {
        self.is_none()
    }

    fn of(part: Part<'_, Self>) -> Self {
        match part {
            Part::Text(text) => text.into(),
            Part::List(values) => values.into(),
            #[cfg(feature = "parquet")]
            Part::Null => ().into(),
            #[cfg(feature = "parquet")]
            Part::Bool(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Int(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Unsigned(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Float(value) => value.into(),
            #[cfg(feature = "parquet")]
            Part::Table(pairs) => Self::from_pairs(pairs),
        }
    }
}

/// A row: the values of the wanted columns, in order; `None` for missing values.
pub(crate) struct Row<V = Value> {
    pub(crate) place: Place,
    pub(crate) values: Vec<Option<V>>,
    /// Whether all values are texts that may stand for numbers, as in CSV files.
    pub(crate) is_text: bool,
}

/// Reads the rows of the files that `key` names, in order.
///
/// # Errors
/// If a path is missing or of an unknown type, a file is without rows or cannot be read, or a row
/// does not parse. If a file has no column of `required`.
pub(crate) fn read<V: RowValue>(
    key: &str,
    paths: &[PathBuf],
    columns: &[Column],
    required: usize,
    report: &mut SourceReport,
) -> Result<Vec<Row<V>>> {
    if paths.is_empty() {
        return Err(Error::Config(format!("{key} is an empty list; name a file or folder")));
    }
    let known: Vec<&str> = [JSON_LINES, SEPARATED, &["parquet"]].concat();
    let mut rows = Vec::new();
    for found in find(key, paths, Wanted::Extensions(&known), report)? {
        let before = rows.len();
        let file = File { path: found.path.as_path().into(), key, columns, required };
        let extension = found.path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        match extension.as_str() {
            "csv" => file.read_separated(b',', &mut rows)?,
            "tsv" => file.read_separated(b'\t', &mut rows)?,
            "parquet" => file.read_parquet(&mut rows)?,
            extension if JSON_LINES.contains(&extension) => file.read_json(&mut rows)?,
            _ => {
                return Err(Error::Data(format!(
                    "{} ({key}): rows are read from files named .{}",
                    found.path.display(),
                    known.join(", .")
                )));
            }
        }
        if rows.len() == before {
            return Err(Error::Data(format!("{} ({key}) has no rows", found.path.display())));
        }
        report.count("files", 1);
    }
    report.count("rows", rows.len() as u64);
    Ok(rows)
}

/// A file of rows.
struct File<'a> {
    path: Arc<Path>,
    key: &'a str,
    columns: &'a [Column],
    /// Number of columns, from the first, that a file must have.
    required: usize,
}

impl File<'_> {
    fn wrong(&self, message: impl fmt::Display) -> Error {
        Error::Data(format!("{} ({}) {message}", self.path.display(), self.key))
    }

    fn place(&self, unit: &'static str, number: u64) -> Place {
        Place { file: self.path.clone(), unit, number }
    }

    fn missing(&self, column: &Column, names: &[&str]) -> String {
        format!("has no column {:?} ({}); it has {}", column.name, column.key, names.join(", "))
    }

    fn read_json<V: RowValue>(&self, rows: &mut Vec<Row<V>>) -> Result<()> {
        let opened = LineReader::open(&self.path)?;
        let mut reader = opened.map_err(|flaw| self.wrong(flaw.message))?;
        while let Some(line) = reader.next()? {
            let place = self.place("line", line.number);
            let wrong = |flaw: Flaw| place.wrong(flaw.message);
            line.check_end().map_err(wrong)?;
            if line.is_blank() {
                continue;
            }
            let text = line.as_str().map_err(wrong)?;
            if text.trim_start().starts_with('[') {
                let advice = "convert the file with `jq -c '.[]'`";
                return Err(place.wrong(format!(
                    "begins a list of JSON, where every line should be an object; {advice}"
                )));
            }
            let mut value: BTreeMap<String, V> =
                serde_json::from_str(text).map_err(|error| wrong(flaw_of_json(&error, text)))?;
            for column in &self.columns[..self.required] {
                if !value.contains_key(&column.name) {
                    let keys: Vec<&str> = value.keys().map(String::as_str).collect();
                    return Err(place.wrong(self.missing(column, &keys)));
                }
            }
            let take =
                |column: &Column| value.remove(&column.name).filter(|value| !value.is_null());
            let values = self.columns.iter().map(take).collect();
            rows.push(Row { place, values, is_text: false });
        }
        Ok(())
    }

    fn read_separated<V: RowValue>(&self, delimiter: u8, rows: &mut Vec<Row<V>>) -> Result<()> {
        // Recognises other formats by the first bytes.
        LineReader::open(&self.path)?.map_err(|flaw| self.wrong(flaw.message))?;
        let file = open_regular(&self.path)?;
        let mut reader = csv::ReaderBuilder::new().delimiter(delimiter).from_reader(file);
        let broken = |error: csv::Error| {
            let line = error.position().map_or(1, csv::Position::line);
            let what = match error.kind() {
                csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    format!("has {len} values, and the header names {expected_len} columns")
                }
                csv::ErrorKind::Utf8 { .. } => "is not UTF-8 text".to_owned(),
                _ => format!("cannot be read: {error}"),
            };
            self.place("line", line).wrong(what)
        };
        let names: Vec<String> =
            reader.headers().map_err(broken)?.iter().map(str::to_owned).collect();
        let names: Vec<&str> =
            names.iter().map(|name| name.trim_start_matches('\u{feff}')).collect();
        let mut indices = Vec::new();
        for (i, column) in self.columns.iter().enumerate() {
            let index = names.iter().position(|name| *name == column.name);
            if index.is_none() && i < self.required {
                return Err(self.wrong(self.missing(column, &names)));
            }
            indices.push(index);
        }
        let mut record = csv::StringRecord::new();
        while reader.read_record(&mut record).map_err(broken)? {
            let place = self.place("line", record.position().map_or(0, csv::Position::line));
            let value = |index: &Option<usize>| {
                let text = record.get((*index)?)?;
                (!text.is_empty()).then(|| V::of(Part::Text(text)))
            };
            rows.push(Row { place, values: indices.iter().map(value).collect(), is_text: true });
        }
        Ok(())
    }

    #[cfg(not(feature = "parquet"))]
    fn read_parquet<V: RowValue>(&self, _: &mut Vec<Row<V>>) -> Result<()> {
        Err(self.wrong(
            "is a Parquet file, which needs Parquet to be compiled in: give the dependency `fulgurite` (or \
             `fulgurite-data`) the feature `parquet`",
        ))
    }

    #[cfg(feature = "parquet")]
    fn read_parquet<V: RowValue>(&self, rows: &mut Vec<Row<V>>) -> Result<()> {
        use fulgurite_launch::catch_panic;
        use parquet::errors::ParquetError;
        use parquet::file::reader::{FileReader as _, SerializedFileReader};

        let file = open_regular(&self.path)?;
        let broken = |error: ParquetError| self.wrong(format!("cannot be read: {error}"));
        let reader = catch_panic(|| SerializedFileReader::new(file))
            .unwrap_or_else(|panic| Err(ParquetError::General(panic)))
            .map_err(broken)?;
        let schema = reader.metadata().file_metadata().schema();
        let names: Vec<&str> = schema.get_fields().iter().map(|field| field.name()).collect();
        for column in &self.columns[..self.required] {
            if !names.contains(&column.name.as_str()) {
                return Err(self.wrong(self.missing(column, &names)));
            }
        }
        let wanted = |field: &&parquet::schema::types::TypePtr| {
            self.columns.iter().any(|column| column.name == field.name())
        };
        let fields = schema.get_fields().iter().filter(wanted).cloned().collect();
        let projection = parquet::schema::types::Type::group_type_builder(schema.name())
            .with_fields(fields)
            .build()
            .map_err(broken)?;
        let read = || -> std::result::Result<(), ParquetError> {
            for (number, row) in reader.get_row_iter(Some(projection))?.enumerate() {
                let row = row?;
                let value = |column: &Column| {
                    let (_, field) =
                        row.get_column_iter().find(|(name, _)| **name == column.name)?;
                    parquet_value(field)
                };
                let values = self.columns.iter().map(value).collect();
                let place = self.place("row", number as u64 + 1);
                rows.push(Row { place, values, is_text: false });
            }
            Ok(())
        };
        catch_panic(read).unwrap_or_else(|panic| Err(ParquetError::General(panic))).map_err(broken)
    }
}

/// The value of a field; `None` for null and for types that JSON lacks.
#[cfg(feature = "parquet")]
fn parquet_value<V: RowValue>(field: &parquet::record::Field) -> Option<V> {
    use parquet::record::Field;
    let inner = |field| parquet_value(field).unwrap_or_else(|| V::of(Part::Null));
    Some(V::of(match field {
        Field::Bool(value) => Part::Bool(*value),
        Field::Byte(value) => Part::Int((*value).into()),
        Field::Short(value) => Part::Int((*value).into()),
        Field::Int(value) => Part::Int((*value).into()),
        Field::Long(value) => Part::Int(*value),
        Field::UByte(value) => Part::Unsigned((*value).into()),
        Field::UShort(value) => Part::Unsigned((*value).into()),
        Field::UInt(value) => Part::Unsigned((*value).into()),
        Field::ULong(value) => Part::Unsigned(*value),
        Field::Float(value) => Part::Float((*value).into()),
        Field::Double(value) => Part::Float(*value),
        Field::Str(value) => Part::Text(value),
        Field::ListInternal(list) => Part::List(list.elements().iter().map(inner).collect()),
        Field::Group(row) => {
            let pairs = row.get_column_iter().map(|(name, field)| (name.clone(), inner(field)));
            Part::Table(pairs.collect())
        }
        _ => return None,
    }))
}
