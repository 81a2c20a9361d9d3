//! Saving, retention and resuming with the trainer.

mod averages;
mod failing;
mod going_on;
pub(crate) mod harness;
mod kept;
mod places;
