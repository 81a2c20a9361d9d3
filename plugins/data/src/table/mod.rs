//! Tables of numbers and names.

mod columns;
mod config;
mod data;

pub use config::{OnMissing, TableConfig, Task};
pub use data::{Table, TableBatch};
