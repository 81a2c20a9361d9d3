//! Validation, test and prediction.

pub(crate) mod evaluate;
mod pipeline;
#[cfg(feature = "parquet")]
mod prediction_columns;
mod prediction_lines;
pub(crate) mod predictions;
