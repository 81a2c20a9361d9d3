//! Requests of waits to the job's store, on their own thread: an unreachable store must not delay a
//! wait beyond its timeout.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use fulgurite_core::launch::Store;
use fulgurite_core::{Error, Result, advice};

type Task = Box<dyn FnOnce(&dyn Store) + Send>;

/// Sends requests to a store, one after another. The thread ends when the messenger is dropped.
#[derive(Clone)]
pub struct Messenger(Sender<Task>);

impl Messenger {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn new(store: Arc<dyn Store>) -> Result<Self> {
        let (tasks, queue) = channel::<Task>();
        let run = move || queue.into_iter().for_each(|task| task(&*store));
        std::thread::Builder::new().name("store-messages".to_owned()).spawn(run).map_err(|e| {
            Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
        })?;
        Ok(Self(tasks))
    }

    /// Runs `task` soon, without waiting for it.
    pub fn post(&self, task: impl FnOnce(&dyn Store) + Send + 'static) {
        // The thread ends only after its sender.
        let _ = self.0.send(Box::new(task));
    }

    /// Returns the result of `task`, if it takes at most `limit`.
    pub fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        task: impl FnOnce(&dyn Store) -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = channel();
        self.post(move |store| drop(answer.send(task(store))));
        answered.recv_timeout(limit).ok()
    }

    /// Tells the ranks of other hosts which rank `rank` waits for. Both are global.
    pub(crate) fn record_wait(&self, rank: usize, awaited: Option<usize>) {
        let value = awaited.map_or_else(String::new, |awaited| awaited.to_string());
        self.post(move |store| {
            // If the store cannot be reached, a later message just says less.
            let _ = store.set(&waits_key(rank), value.as_bytes());
        });
    }

    /// Returns the chain of ranks that wait for each other, from the rank that `own` waits for; at
    /// most `most`.
    pub(super) fn chain(
        &self,
        own: usize,
        awaited: usize,
        most: usize,
        limit: Duration,
    ) -> Vec<usize> {
        let follow = move |store: &dyn Store| {
            let mut chain = vec![awaited];
            while chain.len() < most
                && let Ok(next) = store.get(&waits_key(chain[chain.len() - 1]), Duration::ZERO)
                && let Some(next) = String::from_utf8(next).ok().and_then(|next| next.parse().ok())
            {
                let known = next == own || chain.contains(&next);
                chain.push(next);
                if known {
                    break;
                }
            }
            chain
        };
        self.ask(limit, follow).unwrap_or_else(|| vec![awaited])
    }
}

/// The key under which a rank records the rank that it waits for, or an empty value.
fn waits_key(rank: usize) -> String {
    format!("network/waits/{rank}")
}
