//! Streams and events.

use std::ffi::{c_int, c_uint, c_void};

use super::{Status, devices};
use crate::machine::{self, DEFAULT_STREAMS};
use crate::streams::Handle;

const DISABLE_TIMING: c_uint = 2;

type Call = unsafe extern "C" fn(*mut c_void) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);

/// The target of a stream handle: lets a stand-in for NCCL (`plugins/nccl/fake`) queue collectives.
#[repr(C)]
struct RawStream {
    push: unsafe extern "C" fn(*const RawStream, Call, Free, *mut c_void),
}

/// Work queued by a C library.
struct Foreign {
    call: Call,
    free: Free,
    data: *mut c_void,
}

// SAFETY: a library that pushes work allows any thread to call and free it.
unsafe impl Send for Foreign {}

impl Foreign {
    fn call(&mut self) -> bool {
        // SAFETY: the data has not been freed.
        unsafe { (self.call)(self.data) != 0 }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: freed once, here.
        unsafe { (self.free)(self.data) };
    }
}

unsafe extern "C" fn push(stream: *const RawStream, call: Call, free: Free, data: *mut c_void) {
    let mut foreign = Foreign { call, free, data };
    machine::polls_by_itself();
    machine::with(|machine| {
        let poll = Box::new(move || foreign.call());
        machine.streams.push_poll(stream as Handle, poll, &mut machine.state);
    });
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn cuStreamCreate(to: *mut Handle, _flags: c_uint) -> Status {
    let Some(device) = devices::current() else { return Status::INVALID_CONTEXT };
    // Leaked: work on the stream may still run after the stream is destroyed.
    let raw: &'static RawStream = Box::leak(Box::new(RawStream { push }));
    let stream = std::ptr::from_ref(raw) as Handle;
    machine::with(|machine| {
        machine.streams.add_stream(stream);
        machine.device_of.insert(stream, device);
        // SAFETY: the caller's.
        unsafe { *to = stream };
    });
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    to: *mut Handle,
    flags: c_uint,
    _priority: c_int,
) -> Status {
    // SAFETY: the caller's.
    unsafe { cuStreamCreate(to, flags) }
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    machine::with(|machine| {
        if !machine.streams.has_stream(stream) {
            return Status::INVALID_HANDLE;
        }
        machine.streams.destroy_stream(stream);
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    let is_default = DEFAULT_STREAMS.contains(&stream);
    let is_there = machine::with(|machine| {
        machine.state.calls.count_at_its_place("wait for a stream", 0);
        is_default || machine.streams.has_stream(stream)
    });
    if !is_there {
        return Status::INVALID_HANDLE;
    }
    machine::until(|machine| match is_default {
        true => machine.streams.finish_all(&mut machine.state),
        false => machine.streams.finish(stream, &mut machine.state),
    });
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(_stream: Handle, to: *mut c_int) -> Status {
    // SAFETY: the caller's.
    unsafe { *to = 0 };
    Status::SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> Status {
    machine::with(|machine| {
        let Some(stream) = machine.stream(stream, "a wait for an event") else {
            return Status::INVALID_HANDLE;
        };
        if !machine.streams.has_event(event) {
            return Status::INVALID_HANDLE;
        }
        machine.streams.wait(event, stream, &mut machine.state);
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(to: *mut Handle, flags: c_uint) -> Status {
    if devices::current().is_none() {
        return Status::INVALID_CONTEXT;
    }
    let event = machine::with(|machine| machine.streams.new_event(flags & DISABLE_TIMING == 0));
    // SAFETY: the caller's.
    unsafe { *to = event };
    Status::SUCCESS
}

/// Streams that wait for the event keep waiting.
#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    match machine::with(|machine| machine.streams.has_event(event)) {
        true => Status::SUCCESS,
        false => Status::INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    machine::with(|machine| {
        let stream = machine.stream(stream, "an event");
        let Some(stream) = stream.filter(|_| machine.streams.has_event(event)) else {
            return Status::INVALID_HANDLE;
        };
        machine.streams.record(event, stream, &mut machine.state);
        Status::SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: Handle) -> Status {
    machine::with(|machine| match machine.streams.has_event(event) {
        false => Status::INVALID_HANDLE,
        true if machine.streams.query(event, &mut machine.state) => Status::SUCCESS,
        true => Status::NOT_READY,
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    let is_there = machine::with(|machine| {
        if !machine.streams.is_done_now(event) {
            machine.state.calls.count_at_its_place("wait for an event", 0);
        }
        machine.streams.has_event(event)
    });
    if !is_there {
        return Status::INVALID_HANDLE;
    }
    machine::until(|machine| machine.streams.synchronize(event, &mut machine.state));
    Status::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(to: *mut f32, from: Handle, until: Handle) -> Status {
    machine::with(|machine| match machine.streams.elapsed(from, until) {
        Some(milliseconds) => {
            // SAFETY: the caller's.
            unsafe { *to = milliseconds };
            Status::SUCCESS
        }
        None => Status::INVALID_HANDLE,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(to: *mut f32, from: Handle, until: Handle) -> Status {
    // SAFETY: the caller's.
    unsafe { cuEventElapsedTime_v2(to, from, until) }
}
