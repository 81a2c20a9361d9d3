//! A rank's collectives and messages that were started and have not ended, and which thread carries
//! them out.
//!
//! One thread at a time does: the communication thread, or a thread that waits for a collective. So a
//! collective that is waited for at once needs no other thread.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use candle_core::Tensor;

use super::plan::Collective;
use super::wait::Failure;

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

/// A task, and where its result goes.
pub(crate) struct Job {
    pub(crate) task: Task,
    pub(crate) done: Arc<Completion>,
}

/// The result of a job, once there is one.
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

    fn take(&self) -> Option<Result<(), Failure>> {
        self.result.lock().expect("no panic while completing").take()
    }

    /// Waits for the result, which always comes: every job that was started is ended.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        let mut result = self.result.lock().expect("no panic while completing");
        loop {
            match result.take() {
                Some(result) => return result,
                None => result = self.there.wait(result).expect("no panic while completing"),
            }
        }
    }
}

/// Jobs in the order they were started.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// A job came, or the group was dropped.
    work: Condvar,
    /// A job ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Whether a thread carries out a job.
    busy: bool,
    /// Threads that wait for a job to end.
    waiting: usize,
    /// Since when the group has been dropped.
    closing: Option<Instant>,
}

/// The right to carry out a job. The next may start when it is dropped.
pub(crate) struct Turn<'a>(&'a Queue);

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

    /// Puts a job last. `now`: the communication thread is woken to carry it out.
    pub(crate) fn push(&self, job: Job, now: bool) {
        self.state().jobs.push_back(job);
        if now {
            self.work.notify_one();
        }
    }

    /// The next job if it is a message, for the thread that carries out messages already.
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

    /// The next job, for the communication thread; none once the group was dropped and all it had
    /// started has ended.
    pub(crate) fn next(&self) -> Option<(Turn<'_>, Job)> {
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

    /// Waits for a collective's end. Meanwhile, as long as no other thread carries out jobs, this one
    /// carries them out with `run`, up to the collective.
    pub(crate) fn finish(
        &self,
        done: &Completion,
        mut run: impl FnMut(Turn<'_>, Job),
    ) -> Result<(), Failure> {
        let mut state = self.state();
        loop {
            if let Some(result) = done.take() {
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

    /// The group was dropped: no job comes any more, and those that were started are carried out.
    pub(crate) fn close(&self) {
        self.state().closing = Some(Instant::now());
        self.work.notify_one();
    }

    /// How long ago the group was dropped, if it was.
    pub(crate) fn closing_for(&self) -> Option<Duration> {
        self.state().closing.map(|since| since.elapsed())
    }
}
