//! A model of CUDA streams.
//!
//! A [`Machine`] has a thread that runs the tasks of its streams. The tasks of one stream run in
//! order. The next stream is chosen at random from a seed, and streams sometimes pause. Only events
//! order tasks of different streams.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::raw::{Free, Poll, RawStream};

/// An event, done once all tasks before it have run.
#[derive(Clone, Default)]
pub struct Event(Arc<AtomicBool>);

impl Event {
    /// Whether the event is done.
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

/// A task of a C library.
struct Foreign {
    poll: Poll,
    free: Free,
    data: *mut c_void,
}

// SAFETY: a library that pushes a task allows any thread to run and free it.
unsafe impl Send for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: freed only once, here.
        unsafe { (self.free)(self.data) };
    }
}

impl Task {
    /// Runs the task. Returns the task if it has to wait.
    fn step(self) -> Option<Self> {
        match self {
            Self::Run(run) => run(),
            Self::Record(event) => event.0.store(true, Ordering::SeqCst),
            Self::Wait(event) => return (!event.is_done()).then_some(Self::Wait(event)),
            Self::Foreign(task) => {
                // SAFETY: not freed yet.
                let done = unsafe { (task.poll)(task.data) } != 0;
                return (!done).then_some(Self::Foreign(task));
            }
        }
        None
    }
}

/// The tasks of a stream.
struct Queue {
    tasks: VecDeque<Task>,
    /// Value of `changes` when the first task last had to wait.
    waited: u64,
    /// End of its pause, which lets other streams overtake it.
    sleeps: Instant,
}

#[derive(Default)]
struct Queues {
    streams: Vec<Queue>,
    /// Number of changes that may let a waiting task continue.
    changes: u64,
}

/// Runs the tasks of streams.
pub struct Machine {
    queues: Mutex<Queues>,
    changed: Condvar,
}

impl Machine {
    /// Makes a machine that chooses streams by this seed.
    pub fn new(seed: u64) -> Arc<Self> {
        let machine = Arc::new(Self {
            queues: Mutex::new(Queues { changes: 1, ..Queues::default() }),
            changed: Condvar::new(),
        });
        let runs = Arc::downgrade(&machine);
        std::thread::Builder::new()
            .name("streams".to_owned())
            .spawn(move || run(&runs, fastrand::Rng::with_seed(seed)))
            .expect("a thread for the streams");
        machine
    }

    /// A new stream.
    pub fn stream(self: &Arc<Self>) -> Stream {
        let mut queues = self.queues.lock().expect("tasks run outside of the lock");
        queues.streams.push(Queue { tasks: VecDeque::new(), waited: 0, sleeps: Instant::now() });
        let index = queues.streams.len() - 1;
        Stream(Box::new(Place { raw: RawStream { push: push_raw }, machine: self.clone(), index }))
    }

    fn push(&self, stream: usize, task: Task) {
        let mut queues = self.queues.lock().expect("tasks run outside of the lock");
        queues.streams[stream].tasks.push_back(task);
        queues.changes += 1;
        self.changed.notify_all();
    }
}

/// The thread of a machine.
fn run(machine: &Weak<Machine>, mut random: fastrand::Rng) {
    while let Some(machine) = machine.upgrade() {
        let mut queues = machine.queues.lock().expect("tasks run outside of the lock");
        let (changes, now) = (queues.changes, Instant::now());
        let ready = |queue: &Queue| {
            !queue.tasks.is_empty() && queue.waited < changes && queue.sleeps <= now
        };
        let choice: Vec<usize> =
            (0..queues.streams.len()).filter(|&i| ready(&queues.streams[i])).collect();
        let Some(&stream) = (!choice.is_empty()).then(|| &choice[random.usize(..choice.len())])
        else {
            // Streams may pause, and a library's tasks may wait for events outside of streams, such
            // as an abort.
            let pause = Duration::from_micros(100);
            let (mut queues, _) = machine.changed.wait_timeout(queues, pause).expect("as above");
            queues.changes += 1;
            continue;
        };
        let Some(task) = queues.streams[stream].tasks.pop_front() else { continue };
        drop(queues);
        let waits = task.step();
        let mut queues = machine.queues.lock().expect("tasks run outside of the lock");
        let queue = &mut queues.streams[stream];
        match waits {
            Some(task) => {
                queue.tasks.push_front(task);
                queue.waited = changes;
            }
            None => {
                if random.u8(..8) == 0 {
                    queue.sleeps = Instant::now() + Duration::from_micros(random.u64(..400));
                }
                queues.changes += 1;
            }
        }
    }
}

struct Place {
    /// First, so that its address equals the struct's.
    raw: RawStream,
    machine: Arc<Machine>,
    index: usize,
}

/// A queue of tasks that run in order. Pushed tasks run even after the stream is dropped.
pub struct Stream(Box<Place>);

// `push_raw` needs the field first.
const _: () = assert!(std::mem::offset_of!(Place, raw) == 0);

unsafe extern "C" fn push_raw(stream: *const RawStream, poll: Poll, free: Free, data: *mut c_void) {
    // SAFETY: the address came from `Stream::raw`, and the caller still holds the stream.
    let place = unsafe { &*stream.cast::<Place>() };
    place.machine.push(place.index, Task::Foreign(Foreign { poll, free, data }));
}

impl Stream {
    /// The stream's address for a C library, valid until the stream is dropped.
    pub fn raw(&self) -> *mut c_void {
        (&raw const *self.0).cast_mut().cast()
    }

    /// Appends a task.
    pub fn push(&self, run: impl FnOnce() + Send + 'static) {
        self.0.machine.push(self.0.index, Task::Run(Box::new(run)));
    }

    /// Records an event that is done when all tasks so far have run.
    pub fn record(&self) -> Event {
        let event = Event::default();
        self.0.machine.push(self.0.index, Task::Record(event.clone()));
        event
    }

    /// Makes later tasks run after `event`.
    pub fn wait(&self, event: &Event) {
        self.0.machine.push(self.0.index, Task::Wait(event.clone()));
    }
}
