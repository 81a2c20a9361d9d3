//! Saving a run, and going on from what was saved.

pub(crate) mod resume;
pub(crate) mod save;
