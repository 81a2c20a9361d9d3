//! Device memory, pinned host memory, and copies.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_uchar, c_uint, c_void};

use super::{Status, devices};
use crate::machine::{self, State};
use crate::memory::Memory;
use crate::streams::Handle;

type Address = usize;

/// Alignment of pinned memory.
const PAGE: usize = 4096;

fn of_address(state: &mut State, address: Address) -> Result<&mut Memory, String> {
    let memory = state.memory.iter_mut().find(|memory| {
        let (start, end) = memory.addresses();
        (start..end).contains(&address)
    });
    memory.ok_or_else(|| format!("{address:#x} is no memory of a device"))
}

fn give_back(state: &mut State, address: Address) {
    if let Err(why) = of_address(state, address).and_then(|memory| memory.give_back(address)) {
        crate::refuse(&format!("freeing memory: {why}"));
    }
}

fn free(state: &mut State, address: Address) {
    if let Err(why) = of_address(state, address).and_then(|memory| memory.free(address)) {
        crate::refuse(&format!("freeing memory: {why}"));
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(to: *mut Address, bytes: usize, stream: Handle) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "an allocation") else {
            return Status::INVALID_HANDLE;
        };
        let device = machine.device_of.get(&stream).copied().or_else(devices::current);
        let Some(device) = device else { return Status::INVALID_CONTEXT };
        match machine.state.memory[device].allocate(bytes) {
            Some(address) => {
                // SAFETY: the caller's.
                unsafe { *to = address };
                Status::SUCCESS
            }
            None => Status::OUT_OF_MEMORY,
        }
    })
}

/// The memory stays mapped until the stream reaches this call.
#[unsafe(no_mangle)]
extern "C" fn cuMemFreeAsync(address: Address, stream: Handle) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "memory is freed") else {
            return Status::INVALID_HANDLE;
        };
        give_back(&mut machine.state, address);
        machine.streams.push(
            stream,
            Box::new(move |state| free(state, address)),
            &mut machine.state,
        );
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(to: *mut Address, bytes: usize) -> Status {
    let Some(device) = devices::current() else { return Status::INVALID_CONTEXT };
    if bytes == 0 {
        return Status::INVALID_VALUE;
    }
    machine::with(|machine| {
        machine.state.calls.count_at_its_place("allocation that waits for the device", bytes);
        match machine.state.memory[device].allocate(bytes) {
            Some(address) => {
                // SAFETY: the caller's.
                unsafe { *to = address };
                Status::SUCCESS
            }
            None => Status::OUT_OF_MEMORY,
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: Address) -> Status {
    machine::with(|machine| {
        machine.state.calls.count_at_its_place("free that waits for the device", 0)
    });
    machine::until(|machine| machine.streams.finish_all(&mut machine.state));
    machine::with(|machine| {
        give_back(&mut machine.state, address);
        free(&mut machine.state, address);
    });
    Status::SUCCESS
}

fn pinned(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), PAGE).expect("a size that memory can have")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Status {
    machine::with(|machine| {
        machine.state.calls.count("pinned memory", bytes);
        // SAFETY: the layout is not empty; `to` is the caller's.
        unsafe {
            let memory = alloc(pinned(bytes));
            *to = memory.cast();
            machine.pinned.insert(memory as usize, bytes);
        }
    });
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> Status {
    machine::until(|machine| machine.streams.finish_all(&mut machine.state));
    machine::with(|machine| {
        let Some(bytes) = machine.pinned.remove(&(memory as usize)) else {
            return Status::INVALID_VALUE;
        };
        // SAFETY: allocated above with this layout, and no queued work uses it.
        unsafe { dealloc(memory.cast(), pinned(bytes)) };
        Status::SUCCESS
    })
}

/// Copies bytes when the stream reaches the copy.
fn copy(state: &State, to: Address, from: Address, bytes: usize) {
    for (address, what) in [(to, "to"), (from, "from")] {
        let of_device = state.memory.iter().find(|memory| {
            let (start, end) = memory.addresses();
            (start..end).contains(&address)
        });
        if of_device.is_some_and(|memory| !memory.holds(address, bytes)) {
            crate::refuse(&format!(
                "a copy of {bytes} bytes {what} {address:#x}, which is not allocated, or freed"
            ));
        }
    }
    // SAFETY: allocated device memory, or host memory that the caller promised.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: Address,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "a copy to the device") else {
            return Status::INVALID_HANDLE;
        };
        if bytes > 0 && machine.device_that_holds(to, bytes).is_none() {
            return Status::INVALID_VALUE;
        }
        let from = from as usize;
        if machine.is_pinned(from, bytes) {
            machine.state.calls.count("copy of pinned memory to the device", bytes);
            let work = move |state: &mut State| copy(state, to, from, bytes);
            machine.streams.push(stream, Box::new(work), &mut machine.state);
            return Status::SUCCESS;
        }
        // The driver reads pageable memory at once, even if the stream has not reached the copy.
        machine.state.calls.count_at_its_place("copy of pageable memory to the device", bytes);
        // SAFETY: the caller's.
        let values = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
        let work = move |state: &mut State| copy(state, to, values.as_ptr() as usize, bytes);
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoD_v2(to: Address, from: *const c_void, bytes: usize) -> Status {
    // SAFETY: the caller's.
    unsafe { cuMemcpyHtoDAsync_v2(to, from, bytes, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> Status {
    let to = to as usize;
    let queued = machine::with(|machine| {
        let stream = machine.stream(stream, "a copy to the host").ok_or(Status::INVALID_HANDLE)?;
        if bytes > 0 && machine.device_that_holds(from, bytes).is_none() {
            return Err(Status::INVALID_VALUE);
        }
        let is_pinned = machine.is_pinned(to, bytes);
        match is_pinned {
            true => machine.state.calls.count("copy to pinned memory of the host", bytes),
            false => {
                let what = "copy to pageable memory of the host, which waits";
                machine.state.calls.count_at_its_place(what, bytes);
            }
        }
        let work = move |state: &mut State| copy(state, to, from, bytes);
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        Ok(is_pinned)
    });
    match queued {
        Ok(true) => Status::SUCCESS,
        // A copy to pageable memory waits for the stream, as the driver's does.
        Ok(false) => {
            machine::until(|machine| machine.streams.finish(stream, &mut machine.state));
            Status::SUCCESS
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: Address, bytes: usize) -> Status {
    // SAFETY: the caller's.
    let status = unsafe { cuMemcpyDtoHAsync_v2(to, from, bytes, 0) };
    machine::until(|machine| machine.streams.finish_all(&mut machine.state));
    status
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(
    to: Address,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "a copy within the device") else {
            return Status::INVALID_HANDLE;
        };
        if bytes > 0 && [to, from].iter().any(|&at| machine.device_that_holds(at, bytes).is_none())
        {
            return Status::INVALID_VALUE;
        }
        machine.state.calls.count_at_its_place("copy within the device", bytes);
        let work = move |state: &mut State| copy(state, to, from, bytes);
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: Address, value: c_uchar, bytes: usize, stream: Handle) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "memory is set") else {
            return Status::INVALID_HANDLE;
        };
        if bytes > 0 && machine.device_that_holds(to, bytes).is_none() {
            return Status::INVALID_VALUE;
        }
        machine.state.calls.count_at_its_place("memory set", bytes);
        let work = move |state: &mut State| {
            if bytes > 0 && !state.memory.iter().any(|memory| memory.holds(to, bytes)) {
                crate::refuse(&format!("{bytes} bytes at {to:#x} are set, which are freed"));
            }
            // SAFETY: allocated device memory.
            unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) };
        };
        machine.streams.push(stream, Box::new(work), &mut machine.state);
        Status::SUCCESS
    })
}

/// Each device has only its default pool, with the same handle as its context.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDefaultMemPool(to: *mut usize, device: c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { *to = device as usize + 1 };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuMemPoolSetAttribute(_pool: usize, attribute: c_int, _value: *mut c_void) -> Status {
    // Attribute 4 is the release threshold, which the emulator ignores.
    if attribute == 4 { Status::SUCCESS } else { Status::INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemPoolGetAttribute(
    pool: usize,
    attribute: c_int,
    value: *mut c_void,
) -> Status {
    machine::with(|machine| {
        let Some(memory) = pool.checked_sub(1).and_then(|device| machine.state.memory.get(device))
        else {
            return Status::INVALID_VALUE;
        };
        let bytes = match attribute {
            5 | 7 => memory.used, // reserved, used
            6 | 8 => memory.peak,
            _ => return Status::INVALID_VALUE,
        };
        // SAFETY: the caller's; the values of these attributes are u64.
        unsafe { *value.cast::<u64>() = bytes as u64 };
        Status::SUCCESS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Freed memory counts as available before the stream reaches the free, as in a device's pool.
    #[test]
    fn freed_memory_is_not_counted() {
        let (mut stream, mut address) = (0, 0);
        assert_eq!(devices::cuCtxSetCurrent(1), Status::SUCCESS);
        // SAFETY: valid places for a handle and an address.
        unsafe {
            assert_eq!(super::super::events::cuStreamCreate(&raw mut stream, 1), Status::SUCCESS);
            assert_eq!(cuMemAllocAsync(&raw mut address, 1000, stream), Status::SUCCESS);
        }
        let used = || machine::with(|machine| machine.state.memory[0].used);
        assert_eq!(used(), 1000);
        assert_eq!(cuMemFreeAsync(address, stream), Status::SUCCESS);
        assert_eq!(used(), 0);
    }
}
