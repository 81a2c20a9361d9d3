//! A model of CUDA's streams.
//!
//! A [`Machine`] has a thread that runs the tasks of its streams. Those of one stream run in order; which stream is
//! next is random, by a seed. Only events order the tasks of different streams.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::raw::{Free, Poll, RawStream};

/// Something that is done once all tasks before it have run.
#[derive(Clone, Default)]
pub struct Event(Arc<AtomicBool>);

impl Event {
    /// Whether it is done.
    pub fn is_done(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

enum Task {
    Run(Box<dyn FnOnce() + Send>),
    Record(Event),
    Wait(Event),
    Foreign(Foreign),
}

/// A task of a library of C.
struct Foreign {
    poll: Poll,
    free: Free,
    data: *mut c_void,
}

// SAFETY: a library that pushes a task allows any thread to run and free it.
unsafe impl Send for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: it is freed once, here.
        unsafe { (self.free)(self.data) };
    }
}

impl Task {
    /// Runs it; gives it back if it has to wait.
    fn step(self) -> Option<Self> {
        match self {
            Self::Run(run) => run(),
            Self::Record(event) => event.0.store(true, Ordering::SeqCst),
            Self::Wait(event) => return (!event.is_done()).then_some(Self::Wait(event)),
            Self::Foreign(task) => {
                // SAFETY: it has not been freed.
                let done = unsafe { (task.poll)(task.data) } != 0;
                return (!done).then_some(Self::Foreign(task));
            }
        }
        None
    }
}

#[derive(Default)]
struct Queues {
    /// By stream, its tasks, and the change after which its first had to wait.
    streams: Vec<(VecDeque<Task>, u64)>,
    /// Counts what may let a waiting task go on.
    changes: u64,
    /// The stream whose task runs.
    over: bool,
}

/// Runs the tasks of streams.
pub struct Machine {
    queues: Mutex<Queues>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Machine {
    /// A machine that chooses streams by this seed.
    pub fn new(seed: u64) -> Arc<Self> {
        let machine = Arc::new(Self {
            queues: Mutex::new(Queues { changes: 1, ..Queues::default() }),
            changed: Condvar::new(),
            thread: Mutex::new(None),
        });
        let runs = Arc::downgrade(&machine);
        let spawned = std::thread::Builder::new()
            .name("streams".to_owned())
            .spawn(move || run(&runs, fastrand::Rng::with_seed(seed)))
            .expect("a thread for the streams");
        *machine.thread.lock().expect("no panic while it starts") = Some(spawned);
        machine
    }

    /// A new stream.
    pub fn stream(self: &Arc<Self>) -> Stream {
        let mut queues = self.queues.lock().expect("tasks run outside of the lock");
        queues.streams.push((VecDeque::new(), 0));
        let index = queues.streams.len() - 1;
        Stream(Box::new(Place { raw: RawStream { push: push_raw }, machine: self.clone(), index }))
    }

    fn push(&self, stream: usize, task: Task) {
        let mut queues = self.queues.lock().expect("tasks run outside of the lock");
        queues.streams[stream].0.push_back(task);
        queues.changes += 1;
        self.changed.notify_all();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.queues.lock().expect("tasks run outside of the lock").over = true;
        self.changed.notify_all();
    }
}

/// The thread of a machine.
fn run(machine: &Weak<Machine>, mut random: fastrand::Rng) {
    while let Some(machine) = machine.upgrade() {
        let mut queues = machine.queues.lock().expect("tasks run outside of the lock");
        let changes = queues.changes;
        let ready =
            |(tasks, waited): &(VecDeque<Task>, u64)| !tasks.is_empty() && *waited < changes;
        let choice: Vec<usize> =
            (0..queues.streams.len()).filter(|&i| ready(&queues.streams[i])).collect();
        let Some(&stream) = (!choice.is_empty()).then(|| &choice[random.usize(..choice.len())])
        else {
            // Tasks of a library may wait for what is no stream, such as an abort.
            let pause = Duration::from_millis(1);
            let (mut queues, _) = machine.changed.wait_timeout(queues, pause).expect("as above");
            queues.changes += 1;
            continue;
        };
        let Some(task) = queues.streams[stream].0.pop_front() else { continue };
        drop(queues);
        // Callers run ahead of the streams, by more or by less.
        if random.u8(..16) == 0 {
            std::thread::sleep(Duration::from_micros(random.u64(..100)));
        }
        let waits = task.step();
        let mut queues = machine.queues.lock().expect("tasks run outside of the lock");
        match waits {
            Some(task) => {
                queues.streams[stream].0.push_front(task);
                queues.streams[stream].1 = changes;
            }
            None => queues.changes += 1,
        }
    }
}

struct Place {
    /// First, so that its address is that of the whole.
    raw: RawStream,
    machine: Arc<Machine>,
    index: usize,
}

/// A queue of tasks that run in order. Tasks that were pushed run also after it is dropped.
pub struct Stream(Box<Place>);

// The field is first, as `push_raw` needs.
const _: () = assert!(std::mem::offset_of!(Place, raw) == 0);

unsafe extern "C" fn push_raw(stream: *const RawStream, poll: Poll, free: Free, data: *mut c_void) {
    // SAFETY: it is the address that `Stream::raw` gave, of a stream that the caller still has.
    let place = unsafe { &*stream.cast::<Place>() };
    place.machine.push(place.index, Task::Foreign(Foreign { poll, free, data }));
}

impl Stream {
    /// Its address, for a library of C; valid until it is dropped.
    pub fn raw(&self) -> *mut c_void {
        (&raw const *self.0).cast_mut().cast()
    }

    /// Appends a task.
    pub fn push(&self, run: impl FnOnce() + Send + 'static) {
        self.0.machine.push(self.0.index, Task::Run(Box::new(run)));
    }

    /// An event that is done when all tasks so far have run.
    pub fn record(&self) -> Event {
        let event = Event::default();
        self.0.machine.push(self.0.index, Task::Record(event.clone()));
        event
    }

    /// Lets tasks from now on run after `event`.
    pub fn wait(&self, event: &Event) {
        self.0.machine.push(self.0.index, Task::Wait(event.clone()));
    }
}
