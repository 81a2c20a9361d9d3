//! What [`Strategy`](fulgurite_engine::strategy::Strategy) promises, checked from outside.

mod checks;
mod model;
mod reference;
mod suite;
#[cfg(test)]
mod tests;

pub use suite::{Equivalence, strategy};
