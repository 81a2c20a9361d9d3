//! Shared code for tests of several crates: models with training loops ([`training`]), a model in
//! checkpoints ([`checkpoints`]), and a counting allocator ([`allocator`]).

pub mod allocator;
pub mod checkpoints;
pub mod training;
