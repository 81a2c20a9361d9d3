//! The devices of this process and their queued work.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::calls::Calls;
use crate::compile::Kernel;
use crate::memory::{Fails, Memory};
use crate::ptx::Module;
use crate::streams::{Handle, Order, Streams};

/// State that queued work changes.
pub(crate) struct State {
    /// Memory by device.
    pub(crate) memory: Vec<Memory>,
    pub(crate) calls: Calls,
}

/// A kernel requested by name, compiled at its first launch.
pub(crate) struct Function {
    pub(crate) module: Arc<Module>,
    pub(crate) name: String,
    pub(crate) kernel: Option<Arc<Kernel>>,
    /// Bytes of shared memory that a launch may request.
    pub(crate) most_shared_bytes: u32,
}

/// The process-wide state of the emulator.
pub(crate) struct Machine {
    pub(crate) state: State,
    pub(crate) streams: Streams<State>,
    /// The device of each stream.
    pub(crate) device_of: BTreeMap<Handle, usize>,
    pub(crate) modules: Vec<Arc<Module>>,
    pub(crate) functions: Vec<Function>,
    /// Pinned host memory: start address to bytes.
    pub(crate) pinned: BTreeMap<usize, usize>,
    /// Number of launches so far.
    pub(crate) launches: u64,
    pub(crate) seed: u64,
}

/// Handles of CUDA's predefined streams.
pub(crate) const DEFAULT_STREAMS: [Handle; 3] = [0, 1, 2];

fn number(name: &str, default: usize) -> usize {
    let Ok(text) = std::env::var(name) else { return default };
    match text.parse() {
        Ok(number) => number,
        Err(_) => crate::refuse(&format!("{name} is `{text}`; expected a number")),
    }
}

impl Machine {
    fn new() -> Self {
        let devices = number("FULGURITE_GPU_EMULATOR_DEVICES", 1);
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        // In this order. An index without a device hides itself and all later ones, as in CUDA.
        let visible: Vec<usize> = match visible {
            None => (0..devices).collect(),
            Some(list) => list
                .split(',')
                .map_while(|one| one.trim().parse().ok().filter(|&index| index < devices))
                .collect(),
        };
        let bytes = number("FULGURITE_GPU_EMULATOR_BYTES", 8 << 30);
        let order =
            std::env::var("FULGURITE_GPU_EMULATOR_ORDER").unwrap_or_else(|_| "1".to_owned());
        let order = Order::parse(&order).unwrap_or_else(|| {
            crate::refuse(&format!(
                "FULGURITE_GPU_EMULATOR_ORDER is `{order}`; expected `eager`, `lazy` or a number, the seed of a random order"
            ))
        });
        let seed = match order {
            Order::Random(seed) => seed,
            _ => 0,
        };
        let fails = std::env::var("FULGURITE_GPU_EMULATOR_FAILS").ok().map(|text| {
            Fails::parse(&text).unwrap_or_else(|| {
                crate::refuse(&format!(
                    "FULGURITE_GPU_EMULATOR_FAILS is `{text}`; expected DEVICE:COUNT:BYTES, the COUNTth allocation of at least \
                     BYTES bytes on a GPU"
                ))
            })
        });
        let fails_on = |device: usize| fails.filter(|fails| fails.device == device);
        let memory = visible.iter().map(|&device| Memory::new(bytes).with_fails(fails_on(device)));
        let memory = memory.collect();
        Self {
            state: State { memory, calls: Calls::of_environment() },
            streams: Streams::new(order),
            device_of: BTreeMap::new(),
            modules: Vec::new(),
            functions: Vec::new(),
            pinned: BTreeMap::new(),
            launches: 0,
            seed,
        }
    }

    /// Whether all of these host bytes are pinned.
    pub(crate) fn is_pinned(&self, start: usize, bytes: usize) -> bool {
        let block = self.pinned.range(..=start).next_back();
        block.is_some_and(|(&first, &length)| start + bytes <= first + length)
    }

    /// The device that holds all of these bytes.
    pub(crate) fn device_that_holds(&self, start: usize, bytes: usize) -> Option<usize> {
        self.state.memory.iter().position(|memory| memory.holds(start, bytes))
    }

    /// The stream, if it exists. Use of a default stream waits for all streams, and is counted.
    pub(crate) fn stream(&mut self, stream: Handle, what: &str) -> Option<Handle> {
        if DEFAULT_STREAMS.contains(&stream) {
            self.state.calls.count_at_its_place(&format!("on a default stream: {what}"), 0);
            self.streams.finish_all(&mut self.state);
            return Some(stream);
        }
        self.streams.has_stream(stream).then_some(stream)
    }
}

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

/// Calls `act` with the machine, one thread at a time.
pub(crate) fn with<R>(act: impl FnOnce(&mut Machine) -> R) -> R {
    let mut machine: MutexGuard<'_, Option<Machine>> =
        MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    act(machine.get_or_insert_with(Machine::new))
}

/// Calls `act` with the machine until `act` returns true. Other threads may use the machine in
/// between.
pub(crate) fn until(mut act: impl FnMut(&mut Machine) -> bool) {
    while !with(&mut act) {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Starts a thread that advances polled work while this process is outside the driver, as a GPU
/// does: other processes may wait for that work.
pub(crate) fn polls_by_itself() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let goes_on = || {
            loop {
                std::thread::sleep(Duration::from_micros(200));
                with(|machine| machine.streams.finish_polls(&mut machine.state));
            }
        };
        let started = std::thread::Builder::new().name("streams".to_owned()).spawn(goes_on);
        if let Err(error) = started {
            crate::refuse(&format!("no thread for streams: {error}"));
        }
    });
}

/// Writes the counts when the process ends.
pub(crate) fn end() {
    // Another thread may hold the machine forever.
    if let Ok(machine) = MACHINE.try_lock()
        && let Some(machine) = &*machine
    {
        machine.state.calls.write();
    }
}
