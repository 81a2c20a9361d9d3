//! Runs plans on a stream.
#![allow(unsafe_code)] // launches of kernels

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::CudaDevice;
use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaSlice, CudaStream, DevicePtr as _, LaunchConfig, PushKernelArg as _,
};
use fulgurite_error::{Error, Result};

use super::compile::function;
use super::products::run_product;
use super::run::asked_for;
use super::tables::{ALIGN, Tables};
use crate::{Argument, Call, Plan, Target, Work};

/// Dynamic shared memory that a launch may use without raising the kernel's limit first.
const SHARED_BYTES: u32 = 48 << 10;

/// A stream of a GPU, with the memory for the tables of plans.
pub struct Queue {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    tables: Tables,
    functions: Functions,
}

/// Kernels that were launched before, by name, so that a launch does not ask the driver again.
/// Names are unique among sources.
#[derive(Default)]
struct Functions(HashMap<&'static str, Loaded>);

/// A kernel on the device.
struct Loaded {
    function: CudaFunction,
    /// The kernel's current limit on dynamic shared memory, in bytes.
    shared_bytes: u32,
}

impl Functions {
    /// Returns the kernel of this launch. Compiles it and raises its limit on shared memory if
    /// necessary.
    fn of(&mut self, call: &Call, stream: &CudaStream) -> Result<&CudaFunction> {
        let loaded = match self.0.entry(call.kernel) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let function = function(stream.context(), call.source, call.kernel)?;
                entry.insert(Loaded { function, shared_bytes: SHARED_BYTES })
            }
        };
        if call.shared_bytes > loaded.shared_bytes {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            loaded.function.set_attribute(attribute, call.shared_bytes as i32).w()?;
            loaded.shared_bytes = call.shared_bytes;
        }
        Ok(&loaded.function)
    }
}

impl Queue {
    /// Creates a queue on a stream of this device. A stream may have several queues.
    pub fn new(device: &CudaDevice, stream: &Arc<CudaStream>) -> Self {
        let (device, stream) = (device.clone(), stream.clone());
        let tables = Tables::new(stream.clone());
        Self { device, stream, tables, functions: Functions::default() }
    }

    /// Returns the queue on the stream that computes this device's tensors.
    pub(super) fn of_tensors(device: &CudaDevice) -> Arc<Mutex<Self>> {
        /// Keyed by the address of the stream. An entry lives as long as its stream.
        static ALL: Mutex<Vec<(usize, Arc<Mutex<Queue>>)>> = Mutex::new(Vec::new());
        let stream = device.cuda_stream();
        let address = stream.cu_stream() as usize;
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, queue)) = all.iter().find(|(other, _)| *other == address) {
            return queue.clone();
        }
        let queue = Arc::new(Mutex::new(Self::new(device, &stream)));
        all.push((address, queue.clone()));
        queue
    }

    /// Queues all launches and products of a plan on the stream, and returns without waiting. All
    /// tables are copied at once.
    ///
    /// # Safety
    /// Every address in the plan must point to memory of this device with as many elements as the
    /// plan says. The memory must stay allocated until the work now queued on the stream is done.
    /// Nothing else may use the memory that a launch writes.
    ///
    /// # Errors
    /// If a kernel cannot be compiled or launched, or memory runs out. Also if the plan has
    /// products and this is not the stream of the device's tensors, where cuBLAS computes.
    pub unsafe fn run(&mut self, plan: &Plan) -> Result<()> {
        if plan.work().is_empty() {
            return Ok(());
        }
        let Self { device, stream, tables, functions } = self;
        let (bytes, offsets) = packed(plan);
        let tables = if bytes.is_empty() { 0 } else { tables.send(&bytes).w()? };
        let scratch = plan.scratch_bytes().iter().map(|&bytes| {
            // SAFETY: plans write scratch memory before they read it.
            let memory = unsafe { stream.alloc::<u8>(bytes.max(1)) }.w();
            memory.map_err(|error| asked_for(bytes, error))
        });
        let scratch = scratch.collect::<Result<Vec<CudaSlice<u8>>>>()?;
        let place = |target: Target| match target {
            Target::Address(address) => address,
            Target::Table(index) => tables + offsets[index],
            Target::Scratch(index) => scratch[index].device_ptr(stream).0,
        };
        for work in plan.work() {
            match work {
                Work::Launch(call) => {
                    let function = functions.of(call, stream)?;
                    // SAFETY: the caller's promise, or memory of this plan, which is freed in
                    // stream order.
                    unsafe { launch(stream, function, call, &place) }?;
                }
                Work::Product(product) => {
                    if stream.cu_stream() != device.cuda_stream().cu_stream() {
                        return Err(Error::other(
                            "a product was given to another stream than that of the tensors",
                        ));
                    }
                    let starts = product.starts.map(|start| place(start.target) + start.offset);
                    // SAFETY: as above.
                    unsafe { run_product(product, starts, device) }?;
                }
            }
        }
        Ok(())
    }
}

/// # Safety
/// `function` must be the kernel of the call. The caller promises that `place` gives valid
/// addresses.
unsafe fn launch(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    call: &Call,
    place: &impl Fn(Target) -> u64,
) -> Result<()> {
    // A 32-bit number is read from the lower half: CUDA's hosts are little-endian.
    let arguments: Vec<u64> = call
        .arguments
        .iter()
        .map(|argument| match *argument {
            Argument::Number(bits) => bits,
            Argument::Pointer(target) => place(target),
        })
        .collect();
    let mut launch = stream.launch_builder(function);
    for argument in &arguments {
        launch.arg(argument);
    }
    let config = LaunchConfig {
        grid_dim: (call.blocks, 1, 1),
        block_dim: (call.threads, 1, 1),
        shared_mem_bytes: call.shared_bytes,
    };
    // SAFETY: number and types of the arguments are as in the table of kernels, which tests compare
    // with the kernels. The caller promises that they point to valid memory.
    unsafe { launch.launch(config) }.w()?;
    Ok(())
}

/// Concatenates the plan's tables, and returns the offset of each.
fn packed(plan: &Plan) -> (Vec<u8>, Vec<u64>) {
    let mut tables = Vec::new();
    let mut offsets = Vec::new();
    for table in plan.tables() {
        tables.resize(tables.len().next_multiple_of(ALIGN), 0);
        offsets.push(tables.len() as u64);
        tables.extend_from_slice(table.bytes());
    }
    (tables, offsets)
}
