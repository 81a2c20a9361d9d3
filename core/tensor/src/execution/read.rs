//! Reads values of tensors to the host.
//!
//! Reading a value from a GPU waits for all work queued there before. So a step reads few values,
//! and each read states its purpose. [`counts`] returns the number of reads in this thread's
//! execution context for each purpose. Reads of CPU tensors count as well, because the same code
//! would read a GPU. [`host`] is for values that ranks exchange on the host, such as votes. It
//! counts nothing and refuses tensors on other devices.
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
//! Use [`later`] for values that are not needed at once: the copy joins the device's queue, and the
//! host does not wait for work queued after it.
//!
//! The crates in `core`, the strategies and the callbacks read only through this module:
//! `core/clippy.toml` forbids them candle's own methods.

#![expect(clippy::disallowed_methods, reason = "the one place that reads")]

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::{Tensor, WithDType};

use super::transfer::{self, Arriving};
use crate::{Error, Result};

/// The reads of an execution context, by purpose. Purposes are few, each a literal in the program,
/// so searching a list is faster than a map.
#[derive(Default)]
struct Counts {
    /// Reads that waited.
    waited: Mutex<Vec<(&'static str, u64)>>,
    /// Reads begun by [`later`].
    later: Mutex<Vec<(&'static str, u64)>>,
}

fn lock<'a>(
    counts: &'a Mutex<Vec<(&'static str, u64)>>,
) -> MutexGuard<'a, Vec<(&'static str, u64)>> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a scalar for `what`. Waits for the tensor's device.
///
/// # Errors
/// If the tensor is not a scalar of that dtype, or its device cannot be read.
pub fn scalar<T: WithDType>(tensor: &Tensor, what: &'static str) -> Result<T> {
    count(what);
    Ok(tensor.to_scalar()?)
}

/// Reads f64 scalars of one device in one read for `what`. Waits for the device.
///
/// # Errors
/// If a tensor is not an f64 scalar, or their devices differ or cannot be read.
pub fn scalars(tensors: &[&Tensor], what: &'static str) -> Result<Vec<f64>> {
    count(what);
    match tensors {
        [] => Ok(Vec::new()),
        [tensor] => Ok(vec![tensor.to_scalar()?]),
        _ => Ok(Tensor::stack(tensors, 0)?.to_vec1()?),
    }
}

/// Reads a one-dimensional tensor for `what`. Waits for the tensor's device.
///
/// # Errors
/// If the tensor is not one-dimensional of that dtype, or its device cannot be read.
pub fn vec1<T: WithDType>(tensor: &Tensor, what: &'static str) -> Result<Vec<T>> {
    count(what);
    Ok(tensor.to_vec1()?)
}

/// Reads one-dimensional f64 tensors in one read for `what`. Tensors on a device are joined there
/// first. Waits for the device.
///
/// # Errors
/// If a tensor is not a list of f64, or the tensors outside the CPU are on different devices.
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

/// Reads a one-dimensional tensor that is always on the CPU. Neither waits nor counts.
///
/// # Errors
/// If the tensor is not one-dimensional of that dtype, or not on the CPU.
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

/// Counts a read for `what`.
fn count(what: &'static str) {
    add(&super::shared::<Counts>().waited, what);
}

fn add(counts: &Mutex<Vec<(&'static str, u64)>>, what: &'static str) {
    let mut counts = lock(counts);
    match counts.iter_mut().find(|(name, _)| *name == what) {
        Some((_, count)) => *count += 1,
        None => counts.push((what, 1)),
    }
}

/// Number of reads in this thread's execution context so far, by purpose.
pub fn counts() -> BTreeMap<&'static str, u64> {
    lock(&super::shared::<Counts>().waited).iter().copied().collect()
}

/// Begins to read a one-dimensional f64 tensor for `what`, without waiting. [`later_counts`] counts
/// the read instead of [`counts`]. The tensor must not be changed in place until the values have
/// arrived.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::execution::read;
///
/// let loss = read::later(&Tensor::new(&[2.5f64], &Device::Cpu)?, "loss")?;
/// // ... the work of another step is given to the device ...
/// assert_eq!(loss.numbers()?, [2.5]);
/// assert_eq!((read::counts().len(), read::later_counts()["loss"]), (0, 1));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
///
/// # Errors
/// If the tensor is not a list of f64, or its device has failed.
pub fn later(numbers: &Tensor, what: &'static str) -> Result<Later> {
    add(&super::shared::<Counts>().later, what);
    let arriving = match transfer::copies(numbers.device(), numbers) {
        Some(copies) => copies.begin_few_to_host(&numbers.contiguous()?)?,
        None => None,
    };
    Ok(Later { what, tensor: numbers.clone(), arriving, read: OnceLock::new() })
}

/// Number of reads begun by [`later`] in this thread's execution context so far, by purpose.
pub fn later_counts() -> BTreeMap<&'static str, u64> {
    lock(&super::shared::<Counts>().later).iter().copied().collect()
}

/// Values being read by [`later`].
pub struct Later {
    what: &'static str,
    tensor: Tensor,
    /// The device's asynchronous copy, if it makes one.
    arriving: Option<Box<dyn Arriving>>,
    read: OnceLock<Vec<f64>>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("what", &self.what).field("read", &self.read).finish()
    }
}

impl Later {
    /// The values. Waits for the work queued before the read began. On devices without asynchronous
    /// copies, waits for all queued work.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn numbers(&self) -> Result<&[f64]> {
        if let Some(read) = self.read.get() {
            return Ok(read);
        }
        let numbers = match &self.arriving {
            Some(arriving) => arriving.numbers()?,
            None => self.tensor.to_vec1()?,
        };
        Ok(self.read.get_or_init(|| numbers))
    }

    /// The values, for a caller that cannot go on without them. [`counts`] counts the first call as
    /// a read, unless the values were read before.
    ///
    /// # Errors
    /// As [`numbers`](Self::numbers).
    pub fn at_once(&self) -> Result<&[f64]> {
        if self.read.get().is_none() {
            count(self.what);
        }
        self.numbers()
    }
}
