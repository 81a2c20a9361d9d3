//! What the trainer saves and keeps, and how it goes on from it.

mod averages;
mod going_on;
pub(crate) mod harness;
mod kept;
mod places;
