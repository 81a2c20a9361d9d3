//! Validation, test and prediction.

pub(crate) mod evaluate;
#[cfg(feature = "parquet")]
mod prediction_columns;
mod prediction_lines;
pub(crate) mod predictions;
