//! The locks of the queue: those of the standard library or, with the feature `interleavings`, those of loom,
//! whose tests go through the orders in which threads can take them.

#[cfg(not(feature = "interleavings"))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "interleavings")]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
