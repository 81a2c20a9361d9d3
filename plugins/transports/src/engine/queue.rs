//! What a rank has started and its communication thread has not finished.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use candle_core::Tensor;

use super::failure::Failure;
use super::plan::Collective;

/// What there is to do.
pub(crate) enum Task {
    Collective(Collective),
    Mail(MailTask),
}

/// A message to or from a peer.
pub(crate) struct MailTask {
    pub(crate) sending: bool,
    pub(crate) peer: usize,
    pub(crate) tensor: Tensor,
}

/// A task, and who waits for it.
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

    /// Waits for the result. It always comes: the communication thread ends every job.
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
    pub(crate) jobs: VecDeque<Job>,
    /// Since when the group has been dropped.
    pub(crate) closing: Option<Instant>,
}
