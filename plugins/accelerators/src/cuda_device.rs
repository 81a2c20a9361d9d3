//! Finds and opens GPUs through the CUDA driver.
#![allow(unsafe_code)] // Calls of the driver, and candle's switch of event tracking.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Device;
use candle_core::cuda::set_gemm_reduced_precision_f32;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result, sys};
use fulgurite_engine::accelerator::{Accelerator, CudaTimeStamp, DeviceMemory, TimeStamp};
use fulgurite_engine::execution::transfer;
use fulgurite_error::{Error, Result};
use fulgurite_kernels::cuda::{check_attention_kernels, check_versions};

use crate::cuda::Cuda;
use crate::out_of_memory::says_out_of_memory;
use crate::pinned::Pinned;

/// Returns the UUIDs of the GPUs visible to this process, in CUDA's order. Opens none.
pub(crate) fn visible() -> Result<Vec<String>> {
    let count = match CudaContext::device_count() {
        Ok(count) => count,
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => 0,
        Err(error) => return Err(failed("asking the driver for GPUs", &error)),
    };
    let uuid = |ordinal| {
        let (device, mut uuid) = (result::device::get(ordinal)?, MaybeUninit::uninit());
        // `cuDeviceGetUuid` (v1), which cudarc calls before CUDA 13, returns the GPU's own UUID for
        // all its MIG slices.
        // SAFETY: `device` is the device of this ordinal, and the pointer is valid for writing a
        // UUID.
        unsafe { sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device) }.result()?;
        // SAFETY: the call above succeeded, so the UUID is written.
        Ok::<_, DriverError>(unsafe { uuid.assume_init() })
    };
    (0..count)
        .map(|ordinal| {
            let uuid = uuid(ordinal).map_err(|e| failed("asking the driver for a GPU", &e))?;
            // `c_char` is signed or unsigned, depending on the host.
            let hex = |byte: &std::ffi::c_char| format!("{:02x}", byte.to_ne_bytes()[0]);
            Ok(format!("GPU-{}", uuid.bytes.iter().map(hex).collect::<String>()))
        })
        .collect()
}

fn failed(what: &str, error: &DriverError) -> Error {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES")
        .map_or_else(|_| String::new(), |value| format!(" (CUDA_VISIBLE_DEVICES is `{value}`)"));
    Error::Config(format!("`trainer.accelerator` = \"cuda\": {what}{visible}: {error}"))
}

/// The GPUs that this process has opened, by index. candle treats a second opening of a GPU as a
/// different device.
static OPENED: Mutex<BTreeMap<usize, Gpu>> = Mutex::new(BTreeMap::new());

/// Opens a GPU, or returns the one that is already open.
pub(crate) fn open(ordinal: usize, options: &Cuda) -> Result<Box<dyn Accelerator>> {
    // The setting is global to the process in candle.
    set_gemm_reduced_precision_f32(options.tf32);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let gpu = match opened.get(&ordinal) {
        Some(gpu) => gpu.clone(),
        None => {
            opened.entry(ordinal).or_insert(open_anew(ordinal, options.event_tracking)?).clone()
        }
    };
    Ok(Box::new(gpu))
}

/// Opens a GPU with its own stream and makes its memory pool keep freed memory.
fn open_anew(ordinal: usize, event_tracking: bool) -> Result<Gpu> {
    check_versions()?;
    check_attention_kernels()?;
    let device = Device::new_cuda_with_stream(ordinal)?;
    let Device::Cuda(cuda) = &device else {
        return Err(Error::Config(format!("GPU {ordinal} was opened as another kind of device")));
    };
    if !event_tracking {
        // SAFETY: a rank has one stream, which orders all its work; nothing has been allocated yet.
        unsafe { cuda.disable_event_tracking() };
    }
    let context = cuda.cuda_stream().context().clone();
    let gpu = Gpu { device: device.clone(), context };
    if gpu.context.has_async_alloc() {
        // By default the pool returns its memory at every synchronisation.
        gpu.set_release_threshold(u64::MAX).map_err(|e| failed("keeping freed memory", &e))?;
    }
    transfer::set_host_copies(&device, Arc::new(Pinned::new(cuda)));
    Ok(gpu)
}

/// An opened GPU.
#[derive(Clone)]
struct Gpu {
    device: Device,
    context: Arc<CudaContext>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.context.ordinal())
    }
}

impl Gpu {
    fn pool(&self) -> std::result::Result<sys::CUmemoryPool, DriverError> {
        // SAFETY: `self.context` keeps the device's context alive.
        unsafe { result::device::get_default_mem_pool(self.context.cu_device()) }
    }

    fn set_release_threshold(&self, bytes: u64) -> std::result::Result<(), DriverError> {
        let mut bytes = bytes;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the pool is the device's own; the value of this attribute is a u64.
        unsafe {
            result::mem_pool::set_attribute(
                self.pool()?,
                attribute,
                (&raw mut bytes).cast::<c_void>(),
            )
        }
    }

    fn pool_bytes(
        &self,
        attribute: sys::CUmemPool_attribute,
    ) -> std::result::Result<u64, DriverError> {
        let mut bytes = 0_u64;
        // SAFETY: the pool is the device's own; the requested attributes are u64.
        unsafe {
            result::mem_pool::get_attribute(
                self.pool()?,
                attribute,
                (&raw mut bytes).cast::<c_void>(),
            )?;
        }
        Ok(bytes)
    }

    fn memory(&self) -> std::result::Result<DeviceMemory, DriverError> {
        let (free, total) = self.context.mem_get_info()?;
        let (held_bytes, peak_bytes) = match self.context.has_async_alloc() {
            true => (
                self.pool_bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
                self.pool_bytes(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            ),
            // Without a pool, usage is not counted; the memory in use now is the best estimate.
            false => ((total - free) as u64, (total - free) as u64),
        };
        Ok(DeviceMemory {
            held_bytes,
            peak_bytes,
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }
}

impl Accelerator for Gpu {
    fn device(&self) -> &Device {
        &self.device
    }

    fn description(&self) -> String {
        self.context.name().unwrap_or_else(|_| "GPU".to_owned())
    }

    fn memory(&self) -> Result<Option<DeviceMemory>> {
        Gpu::memory(self).map(Some).map_err(|e| failed("asking a GPU for its memory", &e))
    }

    fn time_stamp(&self) -> Result<Option<Box<dyn TimeStamp>>> {
        let Device::Cuda(device) = &self.device else { return Ok(None) };
        Ok(Some(Box::new(CudaTimeStamp::record(&device.cuda_stream())?)))
    }

    fn is_out_of_memory(&self, error: &Error) -> bool {
        says_out_of_memory(&error.to_string())
    }
}
