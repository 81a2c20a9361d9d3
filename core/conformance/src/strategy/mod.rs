//! Tests of what [`Strategy`](fulgurite_engine::strategy::Strategy) promises.

mod checks;
mod model;
mod reference;
mod suite;
#[cfg(test)]
mod tests;

pub use suite::{Equivalence, strategy};
