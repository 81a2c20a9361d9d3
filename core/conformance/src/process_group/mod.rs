//! Tests of the contract of [`ProcessGroup`].

mod behind;
mod data_movement;
mod faults;
mod misuse;
mod reductions;
mod split;
mod suite;
mod value;

pub use faults::{process_group_abort, process_group_timeout};
pub use suite::{process_group, process_group_on};
