//! Checks of sizes in layer constructors.

use crate::{Error, Result};
use fulgurite_engine::module::ModuleBuilder;

/// Checks that the sizes of the layer at the builder's path are at least 1. Messages use their
/// names.
pub(super) fn check_sizes(b: &ModuleBuilder, sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((name, _)) => {
            Err(Error::module(b.path(), format_args!("{name} must be at least 1, got 0")))
        }
    }
}
