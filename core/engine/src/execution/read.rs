//! Values of tensors on the host.
//!
//! Who asks a GPU for a value waits until all that was asked of it before is computed, so a step reads few, and
//! each read says what it is for: [`counts`] tells how many there were on this thread. What is on the CPU counts
//! as well, for the same code reads it from a GPU. The numbers that ranks exchange on the host, such as votes, are
//! no such reads: [`host`] is for them, and refuses a tensor that is elsewhere.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fulgurite_core::execution::read;
//!
//! let loss = Tensor::new(2.5f32, &Device::Cpu)?;
//! assert_eq!(read::scalar::<f32>(&loss, "loss")?, 2.5);
//! assert_eq!(read::counts().get("loss"), Some(&1));
//!
//! let votes = Tensor::new(&[0u8, 1], &Device::Cpu)?;
//! assert_eq!(read::host::<u8>(&votes)?, [0, 1]);
//! assert_eq!(read::counts().len(), 1);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! The crates in `core`, the strategies and the callbacks read nothing past this module: `core/clippy.toml` forbids
//! candle's methods to them.

#![expect(clippy::disallowed_methods, reason = "the one place that reads")]

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{Tensor, WithDType};

use crate::{Error, Result};

thread_local! {
    /// Few purposes, each a name in the program: found faster than in a map.
    static COUNTS: RefCell<Vec<(&'static str, u64)>> = const { RefCell::new(Vec::new()) };
}

/// The number of a scalar, read for `what`. Waits for the tensor's device.
///
/// # Errors
/// If it is no scalar of that dtype, or its device cannot be read.
pub fn scalar<T: WithDType>(tensor: &Tensor, what: &'static str) -> Result<T> {
    count(what);
    Ok(tensor.to_scalar()?)
}

/// The numbers of scalars of f64 on one device, read at once for `what`. Waits for the device.
///
/// # Errors
/// If one is no such scalar, or their devices differ or cannot be read.
pub fn scalars(tensors: &[&Tensor], what: &'static str) -> Result<Vec<f64>> {
    count(what);
    match tensors {
        [] => Ok(Vec::new()),
        [tensor] => Ok(vec![tensor.to_scalar()?]),
        _ => Ok(Tensor::stack(tensors, 0)?.to_vec1()?),
    }
}

/// The numbers of a list (one dimension), read for `what`. Waits for the tensor's device.
///
/// # Errors
/// If it is no list of that dtype, or its device cannot be read.
pub fn vec1<T: WithDType>(tensor: &Tensor, what: &'static str) -> Result<Vec<T>> {
    count(what);
    Ok(tensor.to_vec1()?)
}

/// The numbers of lists of f64, read at once for `what`: what is on a device is joined there first. Waits for it.
///
/// # Errors
/// If one is no such list, or those that are not on the CPU are on different devices.
pub fn lists(tensors: &[&Tensor], what: &'static str) -> Result<Vec<Vec<f64>>> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    count(what);
    let elsewhere: Vec<&Tensor> =
        tensors.iter().copied().filter(|tensor| !tensor.device().is_cpu()).collect();
    let mut joined = match elsewhere.is_empty() {
        true => Vec::new(),
        false => Tensor::cat(&elsewhere, 0)?.to_vec1()?,
    }
    .into_iter();
    tensors
        .iter()
        .map(|tensor| match tensor.device().is_cpu() {
            true => Ok(tensor.to_vec1()?),
            false => Ok(joined.by_ref().take(tensor.elem_count()).collect()),
        })
        .collect()
}

/// The numbers of a list that is on the CPU wherever the model is. Nothing waits, and nothing is counted.
///
/// # Errors
/// If it is no list of that dtype, or not on the CPU.
pub fn host<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    if !tensor.device().is_cpu() {
        return Err(Error::other(format!(
            "`read::host` takes a tensor on the CPU, got one on {:?}; read it with `read::vec1`, which says \
             what for",
            tensor.device().location()
        )));
    }
    Ok(tensor.to_vec1()?)
}

/// Counts a read for `what` that is done in another way: by a kernel for the CPU in the place of which another
/// device is read.
pub(crate) fn count(what: &'static str) {
    COUNTS.with_borrow_mut(|counts| match counts.iter_mut().find(|(name, _)| *name == what) {
        Some((_, count)) => *count += 1,
        None => counts.push((what, 1)),
    });
}

/// How often this thread has read values, by what for, since it began.
pub fn counts() -> BTreeMap<&'static str, u64> {
    COUNTS.with_borrow(|counts| counts.iter().copied().collect())
}
