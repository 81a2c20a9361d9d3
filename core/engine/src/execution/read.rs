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
//! What need not be known at once is read [`later`]: the copy is a part of the device's work, and nobody waits for what was
//! asked of the device after it.
//!
//! The crates in `core`, the strategies and the callbacks read nothing past this module: `core/clippy.toml` forbids
//! candle's methods to them.

#![expect(clippy::disallowed_methods, reason = "the one place that reads")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::OnceLock;

use candle_core::{Tensor, WithDType};

use super::transfer::{self, Arriving};
use crate::{Error, Result};

thread_local! {
    /// Few purposes, each a name in the program: found faster than in a map.
    static COUNTS: RefCell<Vec<(&'static str, u64)>> = const { RefCell::new(Vec::new()) };
    /// Those that were begun by [`later`].
    static LATER: RefCell<Vec<(&'static str, u64)>> = const { RefCell::new(Vec::new()) };
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
    COUNTS.with_borrow_mut(|counts| add(counts, what));
}

fn add(counts: &mut Vec<(&'static str, u64)>, what: &'static str) {
    match counts.iter_mut().find(|(name, _)| *name == what) {
        Some((_, count)) => *count += 1,
        None => counts.push((what, 1)),
    }
}

/// How often this thread has read values, by what for, since it began.
pub fn counts() -> BTreeMap<&'static str, u64> {
    COUNTS.with_borrow(|counts| counts.iter().copied().collect())
}

/// Begins to read the numbers of a list of f64 for `what`: nothing waits, and [`later_counts`] counts it instead of
/// [`counts`]. The tensor must not be changed in place until they are there.
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
/// If it is no such list, or its device has failed.
pub fn later(numbers: &Tensor, what: &'static str) -> Result<Later> {
    LATER.with_borrow_mut(|counts| add(counts, what));
    let arriving = match transfer::copies(numbers.device(), numbers) {
        Some(copies) => copies.begin_few_to_host(&numbers.contiguous()?)?,
        None => None,
    };
    Ok(Later { what, tensor: numbers.clone(), arriving, read: OnceLock::new() })
}

/// How many reads this thread has begun by [`later`], by what for, since it began.
pub fn later_counts() -> BTreeMap<&'static str, u64> {
    LATER.with_borrow(|counts| counts.iter().copied().collect())
}

/// Numbers that are read [`later`].
pub struct Later {
    what: &'static str,
    tensor: Tensor,
    /// Where there is a copy that the device makes by itself.
    arriving: Option<Box<dyn Arriving>>,
    read: OnceLock<Vec<f64>>,
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("what", &self.what).field("read", &self.read).finish()
    }
}

impl Later {
    /// The numbers. Waits for what was asked of the device before the read was begun, or for all of it where the device
    /// makes no such copies.
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

    /// The numbers for somebody who cannot go on without them: the first time this is one of the reads that
    /// [`counts`] counts.
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
