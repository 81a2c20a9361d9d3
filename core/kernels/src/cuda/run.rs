//! Launching.
#![allow(unsafe_code)] // launches of kernels

use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr as _, LaunchConfig, PushKernelArg as _,
};
use candle_core::cuda_backend::{CudaStorageSlice as Slice, WrapErr as _};
use candle_core::{CudaDevice, Storage, Tensor};
use fulgurite_error::{Error, Result};

use super::compile::ptx;
use super::products::run_product;
use crate::{Argument, Plan, THREADS, Target, Work};

/// What a launch may ask of shared memory without saying so before.
const SHARED_BYTES: u32 = 48 << 10;

/// The address of a contiguous CUDA tensor's first element, for a plan. It is good while the tensor is not freed and
/// its storage not exchanged; work that other threads give to the device's one stream is in order with it.
///
/// # Errors
/// If the tensor is not on a GPU, is not contiguous, or of a dtype that no kernel takes.
pub fn address(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(Error::other("a kernel for GPUs was given a tensor that is not on one"));
    };
    if !layout.is_contiguous() {
        return Err(Error::other(format!("a kernel needs a contiguous tensor, got {layout:?}")));
    }
    fn start<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
        slice.device_ptr(stream).0
    }
    let stream = storage.device.cuda_stream();
    let start = match &storage.slice {
        Slice::F32(slice) => start(slice, &stream),
        Slice::F64(slice) => start(slice, &stream),
        Slice::BF16(slice) => start(slice, &stream),
        Slice::F16(slice) => start(slice, &stream),
        Slice::U32(slice) => start(slice, &stream),
        _ => return Err(Error::other(format!("no kernel takes dtype {:?}", tensor.dtype()))),
    };
    Ok(start + (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64)
}

/// Gives all launches and products of a plan to the device's stream, and returns: nothing is waited for. Tables go there in one copy.
///
/// # Safety
/// Every address in the plan is that of memory of this device of as many elements as the plan says, none of which is
/// freed before work on the stream that was there when this returns; what one launch writes, only it uses.
///
/// # Errors
/// If a kernel cannot be compiled or launched, or there is no memory left.
pub unsafe fn run(plan: &Plan, device: &CudaDevice) -> Result<()> {
    if plan.work().is_empty() {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let mut tables = Vec::new();
    let mut offsets = Vec::new();
    for table in plan.tables() {
        tables.resize(tables.len().next_multiple_of(256), 0u8);
        offsets.push(tables.len() as u64);
        tables.extend_from_slice(table.bytes());
    }
    let tables = if tables.is_empty() { None } else { Some(device.clone_htod(&tables)?) };
    let scratch = plan.scratch_bytes().iter().map(|&bytes| {
        // SAFETY: plans read what they have asked for after they have written it.
        unsafe { device.alloc::<u8>(bytes.max(1)) }
    });
    let scratch = scratch.collect::<candle_core::Result<Vec<CudaSlice<u8>>>>()?;
    let start = |slice: &CudaSlice<u8>| slice.device_ptr(&stream).0;
    let capability = stream.context().compute_capability().w()?;
    let place = |target: Target| match target {
        Target::Address(address) => address,
        Target::Table(index) => tables.as_ref().map_or(0, start) + offsets[index],
        Target::Scratch(index) => start(&scratch[index]),
    };
    for work in plan.work() {
        let call = match work {
            Work::Launch(call) => call,
            Work::Product(product) => {
                let starts = product.starts.map(|start| place(start.target) + start.offset);
                // SAFETY: the caller's promise, or memory of this plan, which is freed in the stream's order.
                unsafe { run_product(product, starts, device) }?;
                continue;
            }
        };
        let module = format!("fulgurite-{}", call.source.name());
        let ptx = ptx(call.source, capability)?;
        let function = device.get_or_load_custom_func(call.kernel, &module, &ptx)?;
        // A number of 32 bits is read from the lower half: CUDA's hosts are little-endian.
        let arguments: Vec<u64> = call
            .arguments
            .iter()
            .map(|argument| match *argument {
                Argument::Number(bits) => bits,
                Argument::Pointer(target) => place(target),
            })
            .collect();
        let mut launch = function.builder();
        for argument in &arguments {
            launch.arg(argument);
        }
        let config = LaunchConfig {
            grid_dim: (call.blocks, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: call.shared_bytes,
        };
        if call.shared_bytes > SHARED_BYTES {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, call.shared_bytes as i32).w()?;
        }
        // SAFETY: number and types of the arguments are those of the table, which tests compare with the kernels;
        // what they point to is the caller's promise, or memory of this plan, which is freed in the stream's order.
        unsafe { launch.launch(config) }.w()?;
    }
    Ok(())
}
