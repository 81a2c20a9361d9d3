//! Texts in a column of Parquet files.

use std::path::Path;

use fulgurite_core::files::open_regular;
use fulgurite_core::{Error, Result};
use parquet::basic::{ConvertedType, LogicalType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

/// Calls `push` with the text of each row, until it returns false.
///
/// # Errors
/// If the file is no Parquet file, or has no column of texts of this name; if a text is missing.
pub(crate) fn read(path: &Path, column: &str, push: &mut dyn FnMut(String) -> bool) -> Result<()> {
    let wrong = |what: String| Error::Data(format!("{}: {what}", path.display()));
    let failed = |error: ParquetError| wrong(format!("{error}"));
    let reader = SerializedFileReader::new(open_regular(path)?).map_err(failed)?;
    let schema = reader.metadata().file_metadata().schema();
    let Some(field) = schema.get_fields().iter().find(|field| field.name() == column) else {
        let names: Vec<&str> = schema.get_fields().iter().map(|field| field.name()).collect();
        return Err(wrong(format!(
            "there is no column {column:?} (data.text_key); it has {}",
            names.join(", ")
        )));
    };
    let info = field.get_basic_info();
    let is_text = info.converted_type() == ConvertedType::UTF8
        || matches!(info.logical_type_ref(), Some(LogicalType::String));
    if !field.is_primitive() || !is_text {
        return Err(wrong(format!("the column {column:?} (data.text_key) has no texts")));
    }
    let projection = Type::group_type_builder(schema.name())
        .with_fields(vec![field.clone()])
        .build()
        .map_err(failed)?;
    for (number, row) in reader.get_row_iter(Some(projection)).map_err(failed)?.enumerate() {
        let row = row.map_err(failed)?;
        match row.get_column_iter().next() {
            Some((_, Field::Str(text))) => {
                if !push(text.clone()) {
                    return Ok(());
                }
            }
            _ => return Err(wrong(format!("row {number} has no text in the column {column:?}"))),
        }
    }
    Ok(())
}
