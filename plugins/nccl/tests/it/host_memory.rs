//! Host memory that plays a device.
//!
//! NCCL gets a copy of a tensor's storage, its *shadow*. The shadow is filled when the compute
//! stream reaches the tensor, and copied back when the compute stream has waited for the work. So
//! work that events do not order meets unfilled or freed memory, which is poisoned.
#![allow(unsafe_code)] // Memory that streams access.

use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Storage, Tensor};
use fulgurite_core::accelerator::TimeStamp;
use fulgurite_core::autograd::storage;
use fulgurite_core::{Error, Result};
use fulgurite_nccl::streams::{Copy, Event, Memory, Stream, Streams};
use fulgurite_nccl_fake::streams::{self, Machine};

const POISON: u8 = 0xA5;

/// Bytes that streams access, ordered only by the streams' tasks.
struct Bytes {
    start: *mut u8,
    len: usize,
}

// SAFETY: streams and events order all accesses. If they fail to, the tests detect it.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn poisoned(len: usize) -> Self {
        let bytes = vec![POISON; len].into_boxed_slice();
        Self { start: Box::into_raw(bytes).cast(), len }
    }

    fn at(&self, byte: usize) -> *mut u8 {
        assert!(byte <= self.len);
        self.start.wrapping_add(byte)
    }

    fn write(&self, start: usize, bytes: &[u8]) {
        assert!(start + bytes.len() <= self.len);
        // SAFETY: within the bounds; ordered as above.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at(start), bytes.len()) };
    }

    fn read(&self, range: Range<usize>, target: &mut [u8]) {
        assert!(range.end <= self.len && range.len() == target.len());
        // SAFETY: within the bounds; ordered as above.
        unsafe { std::ptr::copy(self.at(range.start), target.as_mut_ptr(), range.len()) };
    }

    fn poison(&self) {
        // SAFETY: the whole allocation.
        unsafe { std::ptr::write_bytes(self.start, POISON, self.len) };
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: allocated as a boxed slice of this length, and freed only here.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.start, self.len)) });
    }
}

/// The device copy of a storage.
struct Shadow {
    bytes: Bytes,
    /// Ranges that works write and that are not copied back yet, by number of the work.
    written: Mutex<HashMap<u64, Range<usize>>>,
}

/// A rank's device.
pub(crate) struct HostMemory {
    machine: Arc<Machine>,
    compute: Arc<streams::Stream>,
    /// Dtypes on the device. Other dtypes use the host's group.
    dtypes: Option<Vec<DType>>,
    /// Number of copy batches given to streams.
    batches: Arc<AtomicU64>,
    /// Events recorded by its streams.
    recorded: Recorded,
    state: Mutex<(HashMap<usize, Weak<Shadow>>, u64)>,
}

/// Events of streams other than the compute stream.
type Recorded = Arc<Mutex<Vec<streams::Event>>>;

/// Holder of a tensor's [`Memory`].
struct Held {
    tensor: Tensor,
    shadow: Arc<Shadow>,
    range: Range<usize>,
    written: Option<u64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(number) = self.written {
            self.shadow.written.lock().unwrap().remove(&number);
        }
    }
}

/// Holder of [`Memory`] without a tensor. The memory is poisoned when the compute stream reaches
/// the drop.
struct Buffer {
    bytes: Arc<Bytes>,
    compute: Arc<streams::Stream>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = self.bytes.clone();
        self.compute.push(move || bytes.poison());
    }
}

impl HostMemory {
    pub(crate) fn new(
        machine: &Arc<Machine>,
        dtypes: Option<Vec<DType>>,
        batches: &Arc<AtomicU64>,
    ) -> Arc<Self> {
        let (machine, compute) = (machine.clone(), Arc::new(machine.stream()));
        let batches = batches.clone();
        let recorded = Recorded::default();
        Arc::new(Self { machine, compute, dtypes, batches, recorded, state: Mutex::default() })
    }

    /// Returns the number of launched collectives and messages, and how many of them have not run.
    pub(crate) fn launched(&self) -> (usize, usize) {
        let recorded = self.recorded.lock().unwrap();
        (recorded.len(), recorded.iter().filter(|event| !event.is_done()).count())
    }

    fn shadow(&self, storage: &Storage, dtype: DType) -> Arc<Shadow> {
        let Storage::Cpu(cpu) = storage else { panic!("a tensor of the host") };
        let len = elements(cpu) * dtype.size_in_bytes();
        let key = std::ptr::from_ref(storage) as usize;
        let (shadows, _) = &mut *self.state.lock().unwrap();
        match shadows.get(&key).and_then(Weak::upgrade) {
            Some(shadow) if shadow.bytes.len == len => shadow,
            _ => {
                let shadow =
                    Arc::new(Shadow { bytes: Bytes::poisoned(len), written: Mutex::default() });
                shadows.insert(key, Arc::downgrade(&shadow));
                shadow
            }
        }
    }
}

fn elements(storage: &candle_core::CpuStorage) -> usize {
    use candle_core::CpuStorage as S;
    match storage {
        S::U8(v) => v.len(),
        S::U32(v) => v.len(),
        S::I32(v) => v.len(),
        S::I64(v) => v.len(),
        S::BF16(v) => v.len(),
        S::F16(v) => v.len(),
        S::F32(v) => v.len(),
        S::F64(v) => v.len(),
        _ => panic!("a dtype that is not communicated"),
    }
}

/// `range` without `others`.
fn without<'a>(
    range: Range<usize>,
    others: impl Iterator<Item = &'a Range<usize>>,
) -> Vec<Range<usize>> {
    let mut rest = vec![range];
    for other in others {
        rest = rest
            .into_iter()
            .flat_map(|one| {
                let before = one.start..one.end.min(other.start.max(one.start));
                let after = one.start.max(other.end.min(one.end))..one.end;
                [before, after]
            })
            .filter(|one| !one.is_empty())
            .collect();
    }
    rest
}

impl Streams for HostMemory {
    fn reaches(&self, tensor: &Tensor) -> bool {
        self.dtypes.as_ref().is_none_or(|dtypes| dtypes.contains(&tensor.dtype()))
    }

    fn bind(&self, _: &Device) -> Result<()> {
        Ok(())
    }

    fn stream(&self, _: &Device) -> Result<Box<dyn Stream>> {
        let (own, compute) = (self.machine.stream(), self.compute.clone());
        let (batches, recorded) = (self.batches.clone(), self.recorded.clone());
        Ok(Box::new(HostStream { own, compute, batches, recorded }))
    }

    fn memory(&self, tensor: &Tensor, written: bool) -> Result<Memory> {
        let size = tensor.dtype().size_in_bytes();
        let (shadow, start) = {
            let (storage, layout) = tensor.storage_and_layout();
            (self.shadow(&storage, tensor.dtype()), layout.start_offset() * size)
        };
        let range = start..start + tensor.elem_count() * size;
        let now = storage::with_bytes(tensor, <[u8]>::to_vec)?;
        let number = {
            let (_, numbers) = &mut *self.state.lock().unwrap();
            *numbers += 1;
            *numbers
        };
        let mut pending = shadow.written.lock().unwrap();
        // Results of earlier works are only on the device so far.
        for part in without(range.clone(), pending.values()) {
            let bytes = now[part.start - start..part.end - start].to_vec();
            let shadow = shadow.clone();
            self.compute.push(move || shadow.bytes.write(part.start, &bytes));
        }
        if written {
            pending.insert(number, range.clone());
        }
        drop(pending);
        let address = shadow.bytes.at(start).cast();
        let written = written.then_some(number);
        let held = Held { tensor: tensor.clone(), shadow, range, written };
        Ok(Memory { address, holder: Box::new(held) })
    }

    fn allocate(&self, _: &Device, bytes: usize) -> Result<Memory> {
        let bytes = Arc::new(Bytes::poisoned(bytes));
        let address = bytes.at(0).cast();
        let buffer = Buffer { bytes, compute: self.compute.clone() };
        Ok(Memory { address, holder: Box::new(buffer) })
    }

    fn wait(&self, event: &dyn Event, memory: &[Memory]) -> Result<()> {
        self.compute.wait(host_event(event)?);
        let done = self.compute.record();
        // The host computes, so it must wait for the compute stream.
        while !done.is_done() {
            std::thread::sleep(Duration::from_micros(20));
        }
        for held in memory.iter().filter_map(|memory| memory.holder.downcast_ref::<Held>()) {
            if held.written.is_some() {
                let range = held.range.clone();
                storage::with_bytes_mut(&held.tensor, |tensor| {
                    held.shadow.bytes.read(range, tensor)
                })?;
            }
        }
        Ok(())
    }
}

struct HostStream {
    own: streams::Stream,
    compute: Arc<streams::Stream>,
    /// As in [`HostMemory`].
    batches: Arc<AtomicU64>,
    recorded: Recorded,
}

/// Asserts that no target, the first of two ranges, overlaps another range.
fn assert_apart(copies: &[[Range<usize>; 2]]) {
    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    for (i, [target, _]) in copies.iter().enumerate() {
        for (j, [other, source]) in copies.iter().enumerate() {
            assert!(!overlap(target, source) && (i == j || !overlap(target, other)), "{copies:?}");
        }
    }
}

impl Stream for HostStream {
    fn handle(&self) -> *mut c_void {
        self.own.raw()
    }

    fn follow_compute(&self) -> Result<()> {
        self.own.wait(&self.compute.record());
        Ok(())
    }

    fn follow(&self, event: &dyn Event) -> Result<()> {
        self.own.wait(host_event(event)?);
        Ok(())
    }

    unsafe fn copy(&self, copies: &[Copy]) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        self.batches.fetch_add(1, Ordering::Relaxed);
        let range = |start: *const c_void, bytes| start as usize..start as usize + bytes;
        let copies: Vec<_> = copies
            .iter()
            .map(|copy| [range(copy.target, copy.bytes), range(copy.source, copy.bytes)])
            .collect();
        assert_apart(&copies);
        // Reversed, as a device may copy in any order.
        self.own.push(move || {
            for [target, source] in copies.into_iter().rev() {
                let (to, from) = (target.start as *mut u8, source.start as *const u8);
                // SAFETY: as the caller promises.
                unsafe { std::ptr::copy_nonoverlapping(from, to, target.len()) };
            }
        });
        Ok(())
    }

    fn record(&self) -> Result<Box<dyn Event>> {
        let event = self.own.record();
        self.recorded.lock().unwrap().push(event.clone());
        Ok(Box::new(HostEvent(event)))
    }

    fn stamp(&self) -> Result<Option<Arc<dyn TimeStamp>>> {
        let stamp = HostStamp::default();
        let at = stamp.0.clone();
        self.own.push(move || at.set(Instant::now()).expect("a stamp is set once"));
        Ok(Some(Arc::new(stamp)))
    }
}

#[derive(Default)]
struct HostStamp(Arc<OnceLock<Instant>>);

impl HostStamp {
    fn instant(&self) -> Instant {
        loop {
            if let Some(instant) = self.0.get() {
                return *instant;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl TimeStamp for HostStamp {
    fn is_past(&self) -> Result<bool> {
        Ok(self.0.get().is_some())
    }

    fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64> {
        let earlier: &dyn Any = earlier;
        let earlier: &Self = earlier.downcast_ref().expect("a stamp of this device");
        let (from, to) = (earlier.instant(), self.instant());
        let sign = if to < from { -1.0 } else { 1.0 };
        Ok(sign * to.max(from).duration_since(to.min(from)).as_secs_f64() * 1e6)
    }
}

struct HostEvent(streams::Event);

fn host_event(event: &dyn Event) -> Result<&streams::Event> {
    let event: &dyn Any = event;
    let event = event.downcast_ref::<HostEvent>();
    event.map(|event| &event.0).ok_or_else(|| Error::other("an event of another device"))
}

impl Event for HostEvent {
    fn is_done(&self) -> Result<bool> {
        Ok(self.0.is_done())
    }
}
