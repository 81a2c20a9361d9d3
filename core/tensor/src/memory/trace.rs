//! Who holds what, from moment to moment.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::address_space;
use super::kind::{self, MemoryKind, Place};

/// Bytes held at a moment, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held([i64; MemoryKind::ALL.len()]);

impl Held {
    /// Bytes of a kind.
    pub fn of(&self, kind: MemoryKind) -> u64 {
        self.0[kind as usize].max(0) as u64
    }

    /// Bytes of all kinds.
    pub fn held(&self) -> u64 {
        self.0.iter().sum::<i64>().max(0) as u64
    }

    fn add(&mut self, kind: MemoryKind, bytes: i64) {
        self.0[kind as usize] += bytes;
    }
}

/// What was held when a part of the step ended, and the most in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracePoint {
    /// The part, as [`mark`] named it.
    pub label: String,
    /// Bytes at the end of the part.
    pub at_end: Held,
    /// Bytes at the instant of the part in which most was held.
    pub most: Held,
    /// The same of the host's memory, if devices have memory of their own. Then `at_end` and `most`
    /// are the device's.
    pub most_on_host: Held,
}

/// What a trace has recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traced {
    /// The parts of the step, in order.
    pub points: Vec<TracePoint>,
    /// Bytes at the instant at which most was held.
    pub peak: Held,
    /// The part of that instant.
    pub peak_label: String,
}

struct Block {
    /// Bytes in the present trace's sums.
    bytes: usize,
    kind: MemoryKind,
    place: Place,
    is_reserved: bool,
}

#[derive(Default)]
struct Recorder {
    blocks: HashMap<usize, Block>,
    held: Held,
    /// The most that was held in the present part.
    most: Held,
    on_host: Held,
    most_on_host: Held,
    label: String,
    traced: Traced,
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static RESERVES: AtomicBool = AtomicBool::new(false);
/// Whether the host's memory counts apart.
static HAS_HOST: AtomicBool = AtomicBool::new(false);
/// Number of blocks that [`remove`] knows.
static BLOCKS: AtomicUsize = AtomicUsize::new(0);
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

thread_local! {
    /// Whether this thread is inside the recorder, whose own blocks are not recorded.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The trace in force. One at a time in a process; dropping it ends it.
#[derive(Debug)]
pub struct Trace(());

impl Trace {
    /// Starts to record the blocks that the process allocates from now on. `None` if the program's
    /// allocator is not [`Accounted`](super::Accounted), or if another trace is in force.
    pub fn start() -> Option<Self> {
        Self::begin(false, false)
    }

    /// Like [`start`](Self::start). Large blocks are address space only, until they are written: a
    /// dry run, which writes nothing, holds more than the machine has. With `has_host`, memory at
    /// [`Place::Host`] counts apart, else with the rest.
    pub fn start_reserving(has_host: bool) -> Option<Self> {
        Self::begin(true, has_host)
    }

    fn begin(reserves: bool, has_host: bool) -> Option<Self> {
        if !super::is_accounted() || IS_ON.swap(true, Ordering::SeqCst) {
            return None;
        }
        inside(|| {
            let mut recorder = recorder();
            // Blocks that outlive an earlier trace stay known.
            let blocks = recorder.take().map(|earlier| earlier.blocks).unwrap_or_default();
            *recorder = Some(Recorder { blocks, ..Recorder::default() });
        });
        RESERVES.store(reserves, Ordering::SeqCst);
        HAS_HOST.store(has_host, Ordering::SeqCst);
        Some(Self(()))
    }

    /// Ends the trace.
    pub fn finish(self) -> Traced {
        mark("");
        inside(|| recorder().as_mut().map(|recorder| std::mem::take(&mut recorder.traced)))
            .unwrap_or_default()
        // Dropping `self` ends the trace.
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        RESERVES.store(false, Ordering::SeqCst);
        // Other blocks are the inner allocator's, which frees them without being told.
        inside(|| {
            if let Some(recorder) = &mut *recorder() {
                recorder.blocks.retain(|_, block| block.is_reserved);
                // A later trace has not counted them.
                recorder.blocks.values_mut().for_each(|block| block.bytes = 0);
                BLOCKS.store(recorder.blocks.len(), Ordering::Relaxed);
            }
            address_space::forget();
        });
        IS_ON.store(false, Ordering::SeqCst);
    }
}

/// Ends a part of the trace, if one is in force, and begins the part of this name.
pub fn mark(label: &str) {
    if !is_on() {
        return;
    }
    inside(|| {
        if let Some(recorder) = &mut *recorder() {
            let label = std::mem::replace(&mut recorder.label, label.to_owned());
            let (at_end, most, most_on_host) =
                (recorder.held, recorder.most, recorder.most_on_host);
            recorder.traced.points.push(TracePoint { label, at_end, most, most_on_host });
            (recorder.most, recorder.most_on_host) = (recorder.held, recorder.on_host);
        }
    });
}

/// Whether a trace is in force, and this thread is outside of the recorder.
#[inline]
pub(super) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed) && !INSIDE.try_with(Cell::get).unwrap_or(true)
}

/// Whether large blocks are address space only.
pub(super) fn reserves() -> bool {
    RESERVES.load(Ordering::Relaxed)
}

/// Whether there are blocks of a trace.
#[inline]
pub(super) fn has_blocks() -> bool {
    BLOCKS.load(Ordering::Relaxed) > 0 && !INSIDE.try_with(Cell::get).unwrap_or(true)
}

/// Records a new block.
pub(super) fn add(address: usize, bytes: usize, is_reserved: bool) {
    inside(|| {
        let Some(recorder) = &mut *recorder() else { return };
        let (kind, place) = (kind::current(), current_place());
        recorder.blocks.insert(address, Block { bytes, kind, place, is_reserved });
        BLOCKS.store(recorder.blocks.len(), Ordering::Relaxed);
        if place == Place::Host {
            recorder.on_host.add(kind, bytes as i64);
            if recorder.on_host.held() > recorder.most_on_host.held() {
                recorder.most_on_host = recorder.on_host;
            }
            return;
        }
        recorder.held.add(kind, bytes as i64);
        if recorder.held.held() > recorder.most.held() {
            recorder.most = recorder.held;
        }
        if recorder.held.held() > recorder.traced.peak.held() {
            recorder.traced.peak = recorder.held;
            recorder.traced.peak_label.clone_from(&recorder.label);
        }
    });
}

/// Forgets a block. Returns whether it is reserved address space.
pub(super) fn remove(address: usize) -> bool {
    inside(|| {
        let Some(recorder) = &mut *recorder() else { return false };
        let Some(block) = recorder.blocks.remove(&address) else { return false };
        BLOCKS.store(recorder.blocks.len(), Ordering::Relaxed);
        let held = match block.place {
            Place::Device => &mut recorder.held,
            Place::Host => &mut recorder.on_host,
        };
        held.add(block.kind, -(block.bytes as i64));
        block.is_reserved
    })
}

fn current_place() -> Place {
    match HAS_HOST.load(Ordering::Relaxed) {
        true => kind::place(),
        false => Place::Device,
    }
}

/// The place of the block at this address. Blocks that no trace knows are the device's.
pub fn place_of(address: usize) -> Place {
    let place = |recorder: &Recorder| recorder.blocks.get(&address).map(|block| block.place);
    inside(|| recorder().as_ref().and_then(place)).unwrap_or(Place::Device)
}

/// Calls `f`, whose own blocks are not recorded.
pub(super) fn inside<T>(f: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let value = f();
    INSIDE.set(before);
    value
}

fn recorder() -> MutexGuard<'static, Option<Recorder>> {
    RECORDER.lock().unwrap_or_else(PoisonError::into_inner)
}
