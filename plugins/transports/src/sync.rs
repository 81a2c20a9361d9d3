//! The locks of the queue: the standard library's, or loom's with the feature `interleavings`.
//!
//! Loom tries the orders in which threads can take them.

#[cfg(not(feature = "interleavings"))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(feature = "interleavings")]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
