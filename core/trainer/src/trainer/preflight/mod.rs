//! Checks before any rank starts.

pub(crate) mod checks;
pub(crate) mod memory_check;
