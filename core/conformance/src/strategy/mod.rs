//! Tests of the contract of [`Strategy`](fulgurite_engine::strategy::Strategy).

mod checks;
mod model;
mod reference;
mod suite;
#[cfg(test)]
mod tests;

pub use suite::{Equivalence, strategy};
