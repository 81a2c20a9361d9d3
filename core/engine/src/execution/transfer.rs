//! Values that go between the host's memory and that of a device.
//!
//! What stays in the host's memory between steps, as shards and optimizer state do under `cpu_offload`, goes to the
//! device to be computed with, and comes back. All such copies of a step go through this module, and each says what it
//! is for: [`counts`] tells how many bytes went each way on this thread. Where the device is the CPU nothing is copied, and the bytes count
//! as well, for the same code copies them elsewhere.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::execution::transfer;
//!
//! let shard = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
//! let on_device = transfer::to_device(&shard, &Device::Cpu, "parameters")?;
//! transfer::to_host(&on_device.narrow(0, 2, 4)?, "gradients")?;
//! assert_eq!(transfer::counts()["parameters"].to_device, 32);
//! assert_eq!(transfer::counts()["gradients"].to_host, 16); // the view, and not the memory that it is of
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{Device, DeviceLocation, Tensor};

use crate::Result;

/// Bytes that went each way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transferred {
    /// From the host to the device.
    pub to_device: u64,
    /// From the device to the host.
    pub to_host: u64,
}

thread_local! {
    static COUNTS: RefCell<BTreeMap<&'static str, Transferred>> = const { RefCell::new(BTreeMap::new()) };
}

/// A way between the host's memory and a device's that is faster than candle's, which copies from memory that may be
/// paged out, and so waits. Tensors are contiguous, and not empty.
pub trait HostCopies: Send + Sync {
    /// The values of a tensor of the host on the device, in new memory. The host need not wait.
    ///
    /// # Errors
    /// If the device has no memory for them.
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor>;

    /// The values of a tensor of the device on the host, in new memory.
    ///
    /// # Errors
    /// If the device cannot be read.
    fn to_host(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Begins to copy a few numbers of f64 to the host, in the order of the device's work, for [`read::later`]; `None` if
    /// there is no such way, as by default.
    ///
    /// [`read::later`]: crate::execution::read::later
    ///
    /// # Errors
    /// If the device cannot be read.
    fn begin_few_to_host(&self, numbers: &Tensor) -> Result<Option<Box<dyn Arriving>>> {
        let _ = numbers;
        Ok(None)
    }

    /// Begins [`to_host`](Self::to_host) of the values that the tensor has once the work that was given to the device
    /// so far is done. Work that is given to it later may go on beside the copy, but must not write the tensor until
    /// that was waited for. By default waits for the device.
    ///
    /// # Errors
    /// If the device cannot be read.
    fn begin_to_host(&self, tensor: &Tensor) -> Result<HostCopy> {
        self.to_host(tensor).map(HostCopy::done)
    }
}

/// A copy to the host that was begun. One that is dropped ends on its own.
#[must_use = "the values are there once the copy was waited for"]
pub struct HostCopy(Progress);

enum Progress {
    Done(Tensor),
    Begun(Box<dyn FnOnce() -> Result<Tensor> + Send>),
}

impl HostCopy {
    /// A copy that `wait` waits for, and gives the values of.
    pub fn new(wait: impl FnOnce() -> Result<Tensor> + Send + 'static) -> Self {
        Self(Progress::Begun(Box::new(wait)))
    }

    /// A copy that is done.
    pub fn done(tensor: Tensor) -> Self {
        Self(Progress::Done(tensor))
    }

    /// Waits for the copy: the values, in the host's memory.
    ///
    /// # Errors
    /// If the device could not be read.
    pub fn wait(self) -> Result<Tensor> {
        match self.0 {
            Progress::Done(tensor) => Ok(tensor),
            Progress::Begun(wait) => wait(),
        }
    }
}

impl std::fmt::Debug for HostCopy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostCopy").finish_non_exhaustive()
    }
}

/// Numbers on their way to the host.
pub trait Arriving: Send + Sync {
    /// The numbers. Waits until the device has done what was asked of it before they were.
    ///
    /// # Errors
    /// If the device has failed.
    fn numbers(&self) -> Result<Vec<f64>>;
}

/// By device: few.
static COPIES: RwLock<Vec<(DeviceLocation, Arc<dyn HostCopies>)>> = RwLock::new(Vec::new());

/// Lets `copies` move all tensors to and from `device` from now on. For whoever opens devices.
pub fn set_host_copies(device: &Device, copies: Arc<dyn HostCopies>) {
    let mut all = COPIES.write().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(location, _)| *location != device.location());
    all.push((device.location(), copies));
}

pub(super) fn copies(device: &Device, tensor: &Tensor) -> Option<Arc<dyn HostCopies>> {
    if tensor.elem_count() == 0 {
        return None;
    }
    let all = COPIES.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(location, _)| *location == device.location()).map(|(_, own)| own.clone())
}

/// The values of a tensor of the host on `device`, for `what`: in new memory, or the same tensor if the device is the CPU.
///
/// Of integers the host remembers the last few, so that layers need not [read](crate::execution::read) ids and targets from
/// the device: [`sent`]. They must not be changed in place afterwards.
///
/// # Errors
/// If the device has no memory for them.
pub fn to_device(tensor: &Tensor, device: &Device, what: &'static str) -> Result<Tensor> {
    count(what, |bytes| &mut bytes.to_device, tensor);
    let on_device = if device.is_cpu() {
        tensor.clone()
    } else {
        let tensor = tensor.contiguous()?;
        match copies(device, &tensor) {
            Some(copies) => copies.to_device(&tensor)?,
            None => tensor.force_contiguous()?.to_device(device)?,
        }
    };
    super::sent::remember(&on_device, tensor);
    Ok(on_device)
}

/// The tensor of the host whose values were sent to make this one by [`to_device`], if those are integers and the host
/// remembers them. A view of such a tensor is another one, and not known.
pub fn sent(tensor: &Tensor) -> Option<Tensor> {
    super::sent::of(tensor)
}

/// The values of a tensor of a device in the host's memory, for `what`: in new memory, or the same tensor if it is there.
/// Of a view its own values alone are copied. Waits for the device.
///
/// # Errors
/// If the device cannot be read.
pub fn to_host(tensor: &Tensor, what: &'static str) -> Result<Tensor> {
    count(what, |bytes| &mut bytes.to_host, tensor);
    if tensor.device().is_cpu() {
        return Ok(tensor.clone());
    }
    let tensor = tensor.contiguous()?;
    match copies(tensor.device(), &tensor) {
        Some(copies) => copies.to_host(&tensor),
        // candle's `to_device` of a view copies all that it is a view of.
        None => Ok(tensor.force_contiguous()?.to_device(&Device::Cpu)?),
    }
}

/// Begins [`to_host`], and does not wait for the device where its [`HostCopies`] can do without. The tensor must not be
/// written until the copy was waited for.
///
/// # Errors
/// As [`to_host`].
pub fn begin_to_host(tensor: &Tensor, what: &'static str) -> Result<HostCopy> {
    // The CPU has such copies in tests.
    match copies(tensor.device(), tensor) {
        Some(copies) => {
            count(what, |bytes| &mut bytes.to_host, tensor);
            copies.begin_to_host(&tensor.contiguous()?)
        }
        None => to_host(tensor, what).map(HostCopy::done),
    }
}

fn count(what: &'static str, way: impl FnOnce(&mut Transferred) -> &mut u64, tensor: &Tensor) {
    let bytes = tensor.elem_count() as u64 * tensor.dtype().size_in_bytes() as u64;
    COUNTS.with_borrow_mut(|counts| *way(counts.entry(what).or_default()) += bytes);
}

/// How many bytes this thread has moved, by what for, since it began.
pub fn counts() -> BTreeMap<&'static str, Transferred> {
    COUNTS.with_borrow(Clone::clone)
}
