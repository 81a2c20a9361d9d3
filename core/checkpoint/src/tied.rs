//! Tensors under several names that are one weight in a model.

use candle_core::Device;

use super::TensorSource;
use super::chunks::blocks;
use super::stored::loadable_dtype;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::shard::Region;

/// Whether two tensors of a source have the same shape, dtype and bits.
///
/// Reads both, a few megabytes at a time, up to the first difference.
///
/// # Errors
/// If a name is unknown, or values cannot be read.
pub fn same_values(source: &dyn TensorSource, a: &str, b: &str) -> Result<bool> {
    let info = |name: &str| {
        source.info(name).ok_or_else(|| {
            let message = format!("tensor `{name}`: there is none of this name");
            Error::checkpoint(source.location(), message)
        })
    };
    let (of_a, of_b) = (info(a)?, info(b)?);
    if of_a != of_b {
        return Ok(false);
    }
    for region in blocks(&of_a.shape, of_a.dtype.bitsize().div_ceil(8)) {
        if !same_region(source, a, b, &region)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a region has the same bits in two tensors of one dtype.
pub(super) fn same_region(
    source: &dyn TensorSource,
    a: &str,
    b: &str,
    region: &Region,
) -> Result<bool> {
    let read = |name: &str| {
        let dtype = source.info(name).and_then(|info| loadable_dtype(info.dtype));
        let dtype = dtype.ok_or_else(|| {
            let message = format!("tensor `{name}`: values of this dtype cannot be loaded");
            Error::checkpoint(source.location(), message)
        })?;
        source.read(name, region, dtype, &Device::Cpu)
    };
    let (a, b) = (read(a)?, read(b)?);
    storage::with_bytes(&a, |a| storage::with_bytes(&b, |b| a == b))?
}

/// Returns the error about two different tensors of a source that are one weight in the model.
pub(super) fn differ(source: &dyn TensorSource, a: &str, b: &str) -> Error {
    let message = format!(
        "has `{a}` and `{b}`, which differ, and are one weight in the model. Build the model with two weights \
         (`tie_word_embeddings = false` in a config.json), or leave one of them out with `checkpoint.load.exclude`"
    );
    Error::checkpoint(source.location(), message)
}
