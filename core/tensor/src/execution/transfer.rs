//! Copies between the host's memory and a device's.
//!
//! Values kept on the host between steps, such as shards and optimizer state under `cpu_offload`,
//! go to the device for computation and come back. All such copies of a step go through this
//! module, and each states its purpose. [`counts`] returns the bytes moved each way in this
//! thread's execution context for each purpose. If the device is the CPU nothing is copied. The
//! bytes still count, because the same code copies them on other devices.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fulgurite_core::execution::transfer;
//!
//! let shard = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
//! let on_device = transfer::to_device(&shard, &Device::Cpu, "parameters")?;
//! transfer::to_host(&on_device.narrow(0, 2, 4)?, "gradients")?;
//! assert_eq!(transfer::counts()["parameters"].to_device, 32);
//! assert_eq!(transfer::counts()["gradients"].to_host, 16); // the view's bytes only
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use candle_core::{CpuStorage, Device, DeviceLocation, Storage, Tensor};

use super::dry_copies::DryCopies;
use super::dry_run;
pub use super::sent::SentTensors;
use crate::Result;
use crate::memory::{self, Place, PlaceGuard};

/// Bytes moved each way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transferred {
    /// From the host to the device.
    pub to_device: u64,
    /// From the device to the host.
    pub to_host: u64,
}

/// The bytes moved in an execution context, by purpose.
#[derive(Default)]
struct Counts(Mutex<BTreeMap<&'static str, Transferred>>);

impl Counts {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Transferred>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A faster path between host and device memory than candle's. candle copies from pageable memory,
/// and so waits. Tensors are contiguous and not empty.
pub trait HostCopies: Send + Sync {
    /// Copies a host tensor to new memory on the device. The host need not wait.
    ///
    /// # Errors
    /// If the device has no memory for the copy.
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Copies a device tensor to new memory on the host.
    ///
    /// # Errors
    /// If the device cannot be read.
    fn to_host(&self, tensor: &Tensor) -> Result<Tensor>;

    /// Begins to copy a few f64 values to the host, in the order of the device's work, for
    /// [`read::later`]. `None`, the default, if there is no such path.
    ///
    /// [`read::later`]: crate::execution::read::later
    ///
    /// # Errors
    /// If the device cannot be read.
    fn begin_few_to_host(&self, numbers: &Tensor) -> Result<Option<Box<dyn Arriving>>> {
        let _ = numbers;
        Ok(None)
    }

    /// Begins [`to_host`](Self::to_host) of the values that the tensor will have when the work
    /// queued so far is done. Later work may run beside the copy, but must not write the tensor
    /// until the copy has been waited for. The default waits for the device.
    ///
    /// # Errors
    /// If the device cannot be read.
    fn begin_to_host(&self, tensor: &Tensor) -> Result<HostCopy> {
        self.to_host(tensor).map(HostCopy::done)
    }
}

/// A copy to the host in progress. If dropped, it ends on its own.
#[must_use = "the values are there once the copy was waited for"]
pub struct HostCopy(Progress);

enum Progress {
    Done(Tensor),
    Begun(Box<dyn FnOnce() -> Result<Tensor> + Send>),
}

impl HostCopy {
    /// A copy that is completed by `wait`, which returns the host tensor.
    pub fn new(wait: impl FnOnce() -> Result<Tensor> + Send + 'static) -> Self {
        Self(Progress::Begun(Box::new(wait)))
    }

    /// A finished copy.
    pub fn done(tensor: Tensor) -> Self {
        Self(Progress::Done(tensor))
    }

    /// Waits for the copy and returns the tensor in host memory.
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

/// A few values on their way to the host.
pub trait Arriving: Send + Sync {
    /// The values. Waits for the device's work queued before the copy.
    ///
    /// # Errors
    /// If the device has failed.
    fn numbers(&self) -> Result<Vec<f64>>;
}

/// A short list, by device. Process-wide like the devices: a thread that holds a tensor of a
/// device, such as one that saves a checkpoint, may share nothing else with the thread that opened
/// it.
static COPIES: RwLock<Vec<(DeviceLocation, Arc<dyn HostCopies>)>> = RwLock::new(Vec::new());

/// Makes `copies` move all tensors to and from `device` from now on. Called by the code that opens
/// devices.
pub fn set_host_copies(device: &Device, copies: Arc<dyn HostCopies>) {
    let mut all = COPIES.write().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(location, _)| *location != device.location());
    all.push((device.location(), copies));
}

pub(super) fn copies(device: &Device, tensor: &Tensor) -> Option<Arc<dyn HostCopies>> {
    if tensor.elem_count() == 0 {
        return None;
    }
    if let Some(dry) = DryCopies::current() {
        return Some(Arc::new(dry));
    }
    let all = COPIES.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|(location, _)| *location == device.location()).map(|(_, own)| own.clone())
}

/// Copies a host tensor to `device` for `what`, into new memory. If the device is the CPU, returns
/// the same tensor.
///
/// This thread's execution context remembers the last few integer tensors in [`sent`], so that
/// layers need not [read](crate::execution::read) ids and targets from the device. The tensors must
/// not be changed in place afterwards.
///
/// # Errors
/// If the device has no memory for the copy.
pub fn to_device(tensor: &Tensor, device: &Device, what: &'static str) -> Result<Tensor> {
    count(what, |bytes| &mut bytes.to_device, tensor);
    let on_device = match copies(device, tensor) {
        Some(copies) => copies.to_device(&tensor.contiguous()?)?,
        None if device.is_cpu() => tensor.clone(),
        None => tensor.force_contiguous()?.to_device(device)?,
    };
    super::shared::<SentTensors>().remember(&on_device, tensor);
    Ok(on_device)
}

/// The host tensor from which [`to_device`] made this tensor, if it holds integers and this
/// thread's context remembers it. Views of such a tensor are not recognised.
pub fn sent(tensor: &Tensor) -> Option<Tensor> {
    super::shared::<SentTensors>().get(tensor)
}

/// Copies a device tensor to new host memory for `what`. A tensor on the CPU is returned as it is.
/// Of a view, only its own elements are copied. Waits for the device.
///
/// # Errors
/// If the device cannot be read.
pub fn to_host(tensor: &Tensor, what: &'static str) -> Result<Tensor> {
    count(what, |bytes| &mut bytes.to_host, tensor);
    match copies(tensor.device(), tensor) {
        Some(copies) => copies.to_host(&tensor.contiguous()?),
        None if tensor.device().is_cpu() => Ok(tensor.clone()),
        // candle's `to_device` of a view copies the whole tensor behind it.
        None => Ok(tensor.force_contiguous()?.to_device(&Device::Cpu)?),
    }
}

/// Begins [`to_host`] without waiting for the device, if the device's [`HostCopies`] can. The
/// tensor must not be written until the copy has been waited for.
///
/// # Errors
/// As [`to_host`].
pub fn begin_to_host(tensor: &Tensor, what: &'static str) -> Result<HostCopy> {
    // In tests, the CPU has such copies too.
    match copies(tensor.device(), tensor) {
        Some(copies) => {
            count(what, |bytes| &mut bytes.to_host, tensor);
            copies.begin_to_host(&tensor.contiguous()?)
        }
        None => to_host(tensor, what).map(HostCopy::done),
    }
}

/// Whether a device has memory of its own. In a dry run the CPU may stand for one that has.
pub fn has_own_memory(device: &Device) -> bool {
    !device.is_cpu() || dry_run::has_host()
}

/// Whether a tensor is in the host's memory. Always so on the CPU, unless that stands for a device
/// with memory of its own.
pub fn is_on_host(tensor: &Tensor) -> bool {
    let is_marked = || memory::place_of(address(tensor)) == Place::Host;
    tensor.device().is_cpu() && (!dry_run::has_host() || is_marked())
}

/// What this thread allocates and computes is beside `values`, on the host or the device, until the
/// guard is dropped. Only plans ask for it: elsewhere a tensor's device says where it is.
pub fn beside(values: &Tensor) -> PlaceGuard {
    memory::at(if is_on_host(values) { Place::Host } else { Place::Device })
}

/// The address of a host tensor's storage; 0 elsewhere.
fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return 0 };
    match storage {
        CpuStorage::U8(values) => values.as_ptr().addr(),
        CpuStorage::U32(values) => values.as_ptr().addr(),
        CpuStorage::I64(values) => values.as_ptr().addr(),
        CpuStorage::BF16(values) => values.as_ptr().addr(),
        CpuStorage::F16(values) => values.as_ptr().addr(),
        CpuStorage::F32(values) => values.as_ptr().addr(),
        CpuStorage::F64(values) => values.as_ptr().addr(),
        _ => 0,
    }
}

fn count(what: &'static str, way: impl FnOnce(&mut Transferred) -> &mut u64, tensor: &Tensor) {
    let bytes = tensor.elem_count() as u64 * tensor.dtype().size_in_bytes() as u64;
    *way(super::shared::<Counts>().lock().entry(what).or_default()) += bytes;
}

/// Bytes moved in this thread's execution context so far, by purpose.
pub fn counts() -> BTreeMap<&'static str, Transferred> {
    super::shared::<Counts>().lock().clone()
}
