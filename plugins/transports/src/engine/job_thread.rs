//! [`JobThread`]: the thread that runs a group's jobs while no caller waits for one.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use fulgurite_engine::collective::{End, Work};
use fulgurite_error::{Error, Result, advice};

use super::plan::Collective;
use super::queue::{Completion, Job, Queue, Task, Turn, work};
use super::wait::Failure;

/// Number of times that the communication thread checks a flag before it sleeps: some tens of
/// microseconds. More would take cycles from the computing threads.
const SPINS: u32 = 2000;

/// Number of times that a waiting caller checks a flag before it sleeps.
///
/// This must take longer than waking another rank. Otherwise a rank that has slept once is late for
/// the next collective, so the others sleep there, and then the first rank sleeps again in the one
/// after.
const CALLERS_SPINS: u32 = 20_000;

/// Runs a rank's jobs in the order in which they were started.
pub(crate) trait RunJobs: Send + 'static {
    /// Runs a job on a thread that checks a flag `spins` times before it sleeps. Never panics.
    fn run(&mut self, job: Job, spins: u32);
}

/// A communication thread and its worker, which callers that wait use too.
pub(crate) struct JobThread<W> {
    queue: Arc<Queue>,
    worker: Arc<Mutex<W>>,
    thread: Option<JoinHandle<()>>,
}

impl<W: RunJobs> JobThread<W> {
    /// Starts the thread, which calls `leave` when the queue is closed and its jobs have ended.
    pub(crate) fn start(
        name: String,
        queue: Arc<Queue>,
        worker: W,
        leave: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let worker = Arc::new(Mutex::new(worker));
        let run_all = {
            let (queue, worker) = (queue.clone(), worker.clone());
            move || {
                while let Some((turn, job)) = queue.next() {
                    run(&worker, turn, job, SPINS);
                }
                leave();
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(run_all).map_err(|e| {
            Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
        })?;
        Ok(Self { queue, worker, thread: Some(thread) })
    }

    /// Queues a collective. If it `overlaps`, wakes the thread. `error` converts its failure.
    pub(crate) fn push(
        &self,
        collective: Collective,
        after: Option<Arc<dyn End>>,
        overlaps: bool,
        error: impl Fn(Failure) -> Error + Clone + Send + Sync + 'static,
    ) -> Work {
        let done = Arc::new(Completion::default());
        let job = Job { task: Task::Collective(collective), after, done: done.clone() };
        self.queue.push(job, overlaps);
        let (queue, worker) = (self.queue.clone(), self.worker.clone());
        let finish = move |done: &Completion| {
            queue.finish(done, |turn, job| run(&worker, turn, job, CALLERS_SPINS))
        };
        work(done, overlaps, finish, error)
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Runs a job. Only the thread with the turn uses the worker, so the lock is free.
fn run(worker: &Mutex<impl RunJobs>, turn: Turn<'_>, job: Job, spins: u32) {
    worker.lock().expect("a worker catches panics").run(job, spins);
    drop(turn);
}

/// Waits for the started jobs. The owner has closed the queue.
impl<W> Drop for JobThread<W> {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches panics; an error means that it has ended anyway.
            let _ = thread.join();
        }
    }
}
