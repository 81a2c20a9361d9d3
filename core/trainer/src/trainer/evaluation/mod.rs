//! Validation, test and prediction.

pub(crate) mod evaluate;
pub(crate) mod predictions;
