//! Validation, test and prediction.

pub(crate) mod evaluate;
mod prediction_lines;
pub(crate) mod predictions;
