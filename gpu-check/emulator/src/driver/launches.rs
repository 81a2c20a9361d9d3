//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::{Status, devices};
use crate::compile::{self, Dim, Grid};
use crate::machine::{self, Function, Machine};
use crate::ptx;
use crate::streams::Handle;

/// Bytes of shared memory that a launch gets by default, and the most that it may request.
const SHARED_BYTES: u32 = 48 << 10;
const MOST_SHARED_BYTES: u32 = 227 << 10;

/// Loads a module; the image must be PTX.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(to: *mut usize, image: *const c_char) -> Status {
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy().into_owned();
    if !text.contains(".version") {
        crate::refuse(
            "a module that is not PTX. Was this program built with the stand-in for nvcc, or is FULGURITE_KERNELS=ptx not \
             set?",
        );
    }
    let module = Arc::new(ptx::parse(&text));
    machine::with(|machine| {
        machine.modules.push(module);
        // SAFETY: the caller's.
        unsafe { *to = machine.modules.len() };
    });
    Status::SUCCESS
}

/// Does nothing: functions of the module stay usable.
#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(_module: usize) -> Status {
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    to: *mut usize,
    module: usize,
    name: *const c_char,
) -> Status {
    // SAFETY: the caller's.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    machine::with(|machine| {
        let module = module.checked_sub(1).and_then(|index| machine.modules.get(index)).cloned();
        let Some(module) = module else { return Status::INVALID_HANDLE };
        if !module.functions.iter().any(|function| function.is_entry && function.name == name) {
            return Status::NOT_FOUND;
        }
        machine.functions.push(Function {
            module,
            name,
            kernel: None,
            most_shared_bytes: SHARED_BYTES,
        });
        // SAFETY: the caller's.
        unsafe { *to = machine.functions.len() };
        Status::SUCCESS
    })
}

/// Unused attributes are 0.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(
    to: *mut c_int,
    attribute: c_int,
    _function: usize,
) -> Status {
    let value = match attribute {
        0 => 1024, // threads of a block
        4 => 32,   // registers
        5 | 6 => 90,
        _ => 0,
    };
    // SAFETY: the caller's.
    unsafe { *to = value };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: usize, attribute: c_int, value: c_int) -> Status {
    machine::with(|machine| {
        let function = function.checked_sub(1).and_then(|index| machine.functions.get_mut(index));
        let Some(function) = function else { return Status::INVALID_HANDLE };
        if attribute == 8 {
            match u32::try_from(value) {
                Ok(bytes) if bytes <= MOST_SHARED_BYTES => function.most_shared_bytes = bytes,
                _ => return Status::INVALID_VALUE,
            }
        }
        Status::SUCCESS
    })
}

/// The kernel, compiled at its first use.
fn kernel(machine: &mut Machine, index: usize) -> Option<Arc<compile::Kernel>> {
    let function = machine.functions.get_mut(index)?;
    if function.kernel.is_none() {
        match compile::kernel(&function.module, &function.name) {
            Ok(kernel) => function.kernel = Some(Arc::new(kernel)),
            Err(why) => crate::refuse(&why),
        }
    }
    function.kernel.clone()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *const *const c_void,
    _extra: *const *const c_void,
) -> Status {
    machine::with(|machine| {
        let Some(index) = function.checked_sub(1).filter(|&index| index < machine.functions.len())
        else {
            return Status::INVALID_HANDLE;
        };
        let name = machine.functions[index].name.clone();
        let Some(stream) = machine.stream(stream, &format!("kernel {name}")) else {
            return Status::INVALID_HANDLE;
        };
        let device = machine.device_of.get(&stream).copied().or_else(devices::current);
        let Some(device) = device else { return Status::INVALID_CONTEXT };
        let grid = Dim { x: grid_x, y: grid_y, z: grid_z };
        let block = Dim { x: block_x, y: block_y, z: block_z };
        let fits = (1..=1024).contains(&block.count())
            && block.z <= 64
            && grid.count() > 0
            && grid.x <= i32::MAX as u32
            && grid.y.max(grid.z) <= 0xffff;
        if !fits || shared_bytes > machine.functions[index].most_shared_bytes {
            return Status::INVALID_VALUE;
        }
        let Some(kernel) = kernel(machine, index) else { return Status::INVALID_HANDLE };
        if kernel.shared_bytes + shared_bytes as usize > MOST_SHARED_BYTES as usize {
            return Status::INVALID_VALUE;
        }
        let length = kernel.parameters.last().map_or(0, |(start, bytes)| start + bytes);
        let mut arguments = vec![0_u8; length];
        for (index, &(start, bytes)) in kernel.parameters.iter().enumerate() {
            // SAFETY: the caller passes one argument for each parameter.
            unsafe {
                let argument = (*parameters.add(index)).cast::<u8>();
                arguments[start..start + bytes]
                    .copy_from_slice(std::slice::from_raw_parts(argument, bytes));
            }
        }
        machine.launches += 1;
        machine.state.calls.count("launch", 0);
        machine.state.calls.count_at_its_place(&format!("kernel {name}"), 0);
        let addresses = machine.state.memory[device].addresses();
        let seed = machine.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ machine.launches;
        let launch = Grid { grid, block, shared_bytes, seed, addresses };
        let work = move |_: &mut machine::State| kernel.run(&launch, &arguments);
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        Status::SUCCESS
    })
}
