//! A strategy at work: [`fabric`] for a loop of one's own, [`trainer`] with the loop, and what a [`run`]
//! is configured by.

pub mod fabric;
pub mod run;
mod runtime;
pub mod trainer;
pub use fulgurite_engine::{Error, Result};
