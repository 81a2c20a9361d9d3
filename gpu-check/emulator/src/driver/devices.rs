//! Devices and their primary contexts. A context's handle is the device's index plus one.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};

use super::Status;
use crate::machine;

type Context = usize;

thread_local! {
    static CURRENT: Cell<Context> = const { Cell::new(0) };
}

/// The device of this thread's current context.
pub(super) fn current() -> Option<usize> {
    CURRENT.get().checked_sub(1)
}

fn count() -> usize {
    machine::with(|machine| machine.state.memory.len())
}

/// Writes a result if the device exists.
unsafe fn give<T>(device: c_int, to: *mut T, value: impl FnOnce(usize) -> T) -> Status {
    match usize::try_from(device).ok().filter(|&device| device < count()) {
        Some(device) => {
            // SAFETY: the caller's.
            unsafe { *to = value(device) };
            Status::SUCCESS
        }
        None => Status::INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> Status {
    if count() == 0 { Status::NO_DEVICE } else { Status::SUCCESS }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { *version = 13000 };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(to: *mut c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { *to = count() as c_int };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(to: *mut c_int, ordinal: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { give(ordinal, to, |device| device as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, length: c_int, device: c_int) -> Status {
    let name = format!("emulated GPU {device}");
    let room = usize::try_from(length).unwrap_or(0).saturating_sub(1);
    let bytes = &name.as_bytes()[..name.len().min(room)];
    // SAFETY: the caller has `length` bytes there.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len());
        *to.add(bytes.len()) = 0;
    }
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(to: *mut [u8; 16], device: c_int) -> Status {
    let uuid = |device: usize| {
        // The UUID never depends on visibility: devices keep their index here.
        let mut uuid = *b"emulated GPU ...";
        uuid[15] = device as u8;
        uuid
    };
    // SAFETY: the caller's.
    unsafe { give(device, to, uuid) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(to: *mut usize, device: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { give(device, to, |device| machine::with(|m| m.state.memory[device].total)) }
}

/// Attributes of an H100, as far as candle and Fulgurite read them.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    to: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> Status {
    let value = match attribute {
        1 => 1024,       // threads of a block
        8 => 48 << 10,   // shared memory of a block
        10 => 32,        // lanes of a warp
        16 => 132,       // multiprocessors
        39 => 2048,      // threads of a multiprocessor
        75 => 9,         // compute capability
        76 => 0,         // the same, minor
        97 => 227 << 10, // shared memory of a block that asks for it
        41 | 115 => 1,   // unified addresses, memory pools
        _ => 0,
    };
    // SAFETY: the caller's.
    unsafe { give(device, to, |_| value) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut Context, device: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { give(device, to, |device| device + 1) }
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Status {
    Status::SUCCESS
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn cuCtxSetCurrent(context: Context) -> Status {
    if context > count() {
        return Status::INVALID_CONTEXT;
    }
    CURRENT.set(context);
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(to: *mut Context) -> Status {
    // SAFETY: the caller's.
    unsafe { *to = CURRENT.get() };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> Status {
    machine::with(|machine| machine.state.calls.count_at_its_place("wait for the device", 0));
    machine::until(|machine| machine.streams.finish_all(&mut machine.state));
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    let Some(device) = current() else { return Status::INVALID_CONTEXT };
    machine::with(|machine| {
        let memory = &machine.state.memory[device];
        // SAFETY: the caller's.
        unsafe { (*free, *total) = (memory.total - memory.used, memory.total) };
    });
    Status::SUCCESS
}
