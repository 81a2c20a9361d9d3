//! Memory of describing, training, saving and loading, counted by an allocator.

#![allow(clippy::disallowed_methods, reason = "tests read tensors")]

mod cut_model;
mod distributed_checkpoints;
mod full_checkpoints;
mod llama_70b;
mod training;

use std::sync::{Mutex, MutexGuard, PoisonError};

use fulgurite_test_support::allocator::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs one test at a time, because the count covers the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
