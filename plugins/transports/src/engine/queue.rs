//! The queue of a rank's pending collectives and messages, and the choice of the thread that runs
//! them.
//!
//! One thread at a time runs them: the communication thread, or a thread that waits for a
//! collective. So a caller that waits at once needs no other thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use candle_core::Tensor;
use fulgurite_engine::collective::{End, Work};
use fulgurite_error::Error;
use fulgurite_launch::Patience;

use super::plan::Collective;
use super::wait::Failure;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Time limit for started collectives of a dropped group.
pub(crate) const CLOSING: Duration = Duration::from_secs(5);

/// A collective or a message.
pub(crate) enum Task {
    Collective(Collective),
    P2p(P2pTask),
}

/// A message to or from a peer.
pub(crate) struct P2pTask {
    pub(crate) sending: bool,
    pub(crate) peer: usize,
    pub(crate) tensor: Tensor,
}

/// A task, and its result.
pub(crate) struct Job {
    pub(crate) task: Task,
    /// An operation that must end before this job begins.
    pub(crate) after: Option<Arc<dyn End>>,
    pub(crate) done: Arc<Completion>,
}

/// Waits for the end that a job follows. The wait ends by itself: the other group has its own
/// timeout and thread.
pub(crate) fn wait_for(after: Option<Arc<dyn End>>) -> Result<(), Failure> {
    after.map_or(Ok(()), |end| end.wait().map_err(Failure::from))
}

/// The end of a job that a communication thread runs without a waiting caller.
struct Ended<F> {
    done: Arc<Completion>,
    error: F,
}

impl<F: Fn(Failure) -> Error + Send + Sync + 'static> End for Ended<F> {
    fn wait(&self) -> fulgurite_error::Result<()> {
        self.done.wait().map_err(&self.error)
    }
}

/// Makes the work of a job, which `finish` waits for. A job that `overlaps` also gets an end.
pub(super) fn work<F, E>(done: Arc<Completion>, overlaps: bool, finish: F, error: E) -> Work
where
    F: FnOnce(&Completion) -> Result<(), Failure> + Send + 'static,
    E: Fn(Failure) -> Error + Clone + Send + Sync + 'static,
{
    let end = overlaps.then(|| Ended { done: done.clone(), error: error.clone() });
    let work = Work::pending(move || finish(&done).map_err(error));
    match end {
        Some(end) => work.with_end(Arc::new(end)),
        None => work,
    }
}

/// The result of a job, once it has ended.
#[derive(Default)]
pub(crate) struct Completion {
    result: Mutex<Option<Result<(), Failure>>>,
    there: Condvar,
}

impl Completion {
    pub(crate) fn set(&self, result: Result<(), Failure>) {
        *self.result.lock().expect("no panic while completing") = Some(result);
        self.there.notify_all();
    }

    fn result(&self) -> Option<Result<(), Failure>> {
        self.result.lock().expect("no panic while completing").clone()
    }

    /// Waits for the result. Every started job gets a result.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        let mut result = self.result.lock().expect("no panic while completing");
        loop {
            match &*result {
                Some(result) => return result.clone(),
                None => result = self.there.wait(result).expect("no panic while completing"),
            }
        }
    }
}

/// Jobs in the order they were started.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// Signalled when a job is queued or the group is dropped.
    work: Condvar,
    /// Signalled when a job has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Whether a thread is running a job.
    busy: bool,
    /// Number of threads waiting for a job to end.
    waiting: usize,
    /// Time limit for the remaining jobs, once the group was dropped.
    closing: Option<Patience>,
}

/// The right to run a job. The next job may start when this is dropped.
pub(super) struct Turn<'a>(&'a Queue);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.busy = false;
        let (waiting, more) =
            (state.waiting > 0, !state.jobs.is_empty() || state.closing.is_some());
        drop(state);
        if waiting {
            self.0.ended.notify_all();
        }
        if more {
            self.0.work.notify_one();
        }
    }
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while queueing")
    }

    /// Appends a job. With `now`, wakes the communication thread to run it.
    pub(crate) fn push(&self, job: Job, now: bool) {
        self.state().jobs.push_back(job);
        if now {
            self.work.notify_one();
        }
    }

    /// Takes the next job if it is a message, for the thread that already runs messages.
    pub(crate) fn next_p2p(&self) -> Option<(P2pTask, Arc<Completion>)> {
        let mut state = self.state();
        let job = state.jobs.pop_front()?;
        match job.task {
            Task::P2p(task) => Some((task, job.done)),
            Task::Collective(_) => {
                state.jobs.push_front(job);
                None
            }
        }
    }

    /// Waits for the next job, on the communication thread. Returns `None` when the group was
    /// dropped and all jobs have ended.
    pub(super) fn next(&self) -> Option<(Turn<'_>, Job)> {
        let mut state = self.state();
        loop {
            if !state.busy {
                if let Some(job) = state.jobs.pop_front() {
                    state.busy = true;
                    return Some((Turn(self), job));
                }
                if state.closing.is_some() {
                    return None;
                }
            }
            state = self.work.wait(state).expect("no panic while queueing");
        }
    }

    /// Waits for a collective. While no other thread runs jobs, this thread runs them with `run`,
    /// up to the collective.
    pub(super) fn finish(
        &self,
        done: &Completion,
        mut run: impl FnMut(Turn<'_>, Job),
    ) -> Result<(), Failure> {
        let mut state = self.state();
        loop {
            if let Some(result) = done.result() {
                return result;
            }
            if !state.busy
                && let Some(job) = state.jobs.pop_front()
            {
                state.busy = true;
                drop(state);
                run(Turn(self), job);
                state = self.state();
            } else {
                state.waiting += 1;
                state = self.ended.wait(state).expect("no panic while queueing");
                state.waiting -= 1;
            }
        }
    }

    /// Closes the queue when the group is dropped. No more jobs are queued, and the queued ones
    /// still run.
    pub(crate) fn close(&self) {
        self.state().closing = Some(Patience::new(CLOSING));
        self.work.notify_one();
    }

    /// Whether the time limit for the jobs of a dropped group has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.state().closing.as_mut().is_some_and(|patience| patience.slice().is_none())
    }
}

/// Tests of all orders in which the threads of a rank can run (`--features interleavings`).
#[cfg(all(test, feature = "interleavings"))]
mod interleavings {
    use candle_core::Device;
    use loom::thread;

    use super::*;

    /// Makes a job, identified by its `number` as the peer.
    fn job(number: usize) -> (Job, Arc<Completion>) {
        let tensor = Tensor::zeros(1, candle_core::DType::U8, &Device::Cpu).unwrap();
        let done = Arc::new(Completion::default());
        let task = Task::P2p(P2pTask { sending: true, peer: number, tensor });
        (Job { task, after: None, done: done.clone() }, done)
    }

    type Ran = Arc<std::sync::Mutex<Vec<usize>>>;

    fn run(ran: &Ran, turn: Turn<'_>, job: Job) {
        let Task::P2p(task) = job.task else { panic!("it is a message") };
        ran.lock().unwrap().push(task.peer);
        job.done.set(Ok(()));
        drop(turn);
    }

    /// Checks that jobs run once and in the order they were started, on any thread, and that both
    /// threads end.
    fn check(now: [bool; 2], finish: bool) {
        loom::model(move || {
            let (queue, ran) = (Arc::new(Queue::default()), Ran::default());
            let communication = {
                let (queue, ran) = (queue.clone(), ran.clone());
                thread::spawn(move || {
                    while let Some((turn, job)) = queue.next() {
                        run(&ran, turn, job);
                    }
                })
            };
            let done: Vec<_> = (0..2)
                .map(|number| {
                    let (job, done) = job(number);
                    queue.push(job, now[number]);
                    done
                })
                .collect();
            if finish {
                queue.finish(&done[1], |turn, job| run(&ran, turn, job)).unwrap();
                done[0].wait().unwrap();
            }
            queue.close();
            communication.join().unwrap();
            assert_eq!(*ran.lock().unwrap(), [0, 1]);
        });
    }

    #[test]
    fn waiting_and_communication_thread_share_jobs() {
        check([true, false], true);
        check([false, false], true);
        check([true, true], true);
    }

    #[test]
    fn started_jobs_run_after_group_is_dropped() {
        check([true, true], false);
        check([false, false], false);
    }

    /// The communication thread may have been woken for the second job while the first ran.
    #[test]
    fn job_started_during_another_runs_next() {
        loom::model(|| {
            let queue = Arc::new(Queue::default());
            let communication = {
                let queue = queue.clone();
                thread::spawn(move || {
                    while let Some((turn, job)) = queue.next() {
                        job.done.set(Ok(()));
                        drop(turn);
                    }
                })
            };
            let ((first, done_first), (second, done_second)) = (job(0), job(1));
            let mut second = Some(second);
            queue.push(first, false);
            let run = |turn: Turn<'_>, job: Job| {
                if let Some(second) = second.take() {
                    queue.push(second, true);
                }
                job.done.set(Ok(()));
                drop(turn);
            };
            queue.finish(&done_first, run).unwrap();
            match second {
                // The communication thread ran the first job.
                Some(second) => drop(second),
                None => done_second.wait().unwrap(),
            }
            queue.close();
            communication.join().unwrap();
        });
    }

    #[test]
    fn result_wakes_the_waiting_thread() {
        loom::model(|| {
            let done = Arc::new(Completion::default());
            let setter = {
                let done = done.clone();
                thread::spawn(move || done.set(Ok(())))
            };
            done.wait().unwrap();
            setter.join().unwrap();
        });
    }
}
