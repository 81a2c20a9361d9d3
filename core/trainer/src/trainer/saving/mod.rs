//! Saving a run, and resuming from a checkpoint.

pub(crate) mod failed;
pub(crate) mod resume;
pub(crate) mod save;
