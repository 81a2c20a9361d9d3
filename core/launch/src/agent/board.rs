//! An agent's view of the others: a thread that polls the agents' store and writes to it.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::plan::{Attempt, End, Losses, Over, Stop};
use crate::link::GoingOn;
use crate::{Error, Result};
use fulgurite_error::advice;
use fulgurite_store::Store;

/// Interval between reads of the store.
const POLL: Duration = Duration::from_millis(100);
/// Interval between an agent's heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// Returns a key's value, if it exists and can be read.
pub(super) fn read<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Option<T> {
    serde_json::from_slice(&store.get(key, Duration::ZERO).ok()?).ok()
}

pub(super) fn write<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> Result<()> {
    store.set(key, &serde_json::to_vec(value).map_err(Error::other)?)
}

/// The keys of the agents' store.
pub(super) mod keys {
    /// Number of agents that have joined.
    pub(crate) const AGENTS: &str = "agents";
    /// The current attempt.
    pub(crate) const ATTEMPT: &str = "attempt";
    /// The end of the job.
    pub(crate) const OVER: &str = "over";

    pub(crate) fn member(agent: u64) -> String {
        format!("agent/{agent}")
    }

    /// Confirms that an agent knows about the end of the job.
    pub(crate) fn bye(agent: u64) -> String {
        format!("bye/{agent}")
    }

    /// The reason why an agent is refused.
    pub(crate) fn refused(agent: u64) -> String {
        format!("refused/{agent}")
    }

    pub(crate) fn beat(agent: u64) -> String {
        format!("beat/{agent}")
    }

    /// The address at which the ranks of an attempt meet.
    pub(crate) fn address(attempt: u64) -> String {
        format!("address/{attempt}")
    }

    /// The reason why the ranks of an attempt end.
    pub(crate) fn stop(attempt: u64) -> String {
        format!("stop/{attempt}")
    }

    /// The signal by which the ranks of an attempt were asked to end.
    pub(crate) fn interrupt(attempt: u64) -> String {
        format!("interrupt/{attempt}")
    }

    /// Set when the ranks of an attempt were asked to end a second time.
    pub(crate) fn kill(attempt: u64) -> String {
        format!("kill/{attempt}")
    }

    /// How the job goes on after a loss, if it is elastic, by an agent whose ranks belong to the
    /// attempt.
    pub(crate) fn going_on(attempt: u64, agent: u64) -> String {
        format!("going_on/{attempt}/{agent}")
    }

    /// An agent's ranks that are lost.
    pub(crate) fn losses(attempt: u64, agent: u64) -> String {
        format!("losses/{attempt}/{agent}")
    }

    /// The end of the first rank of an agent that failed; others may still be ending.
    pub(crate) fn failing(attempt: u64, agent: u64) -> String {
        format!("failing/{attempt}/{agent}")
    }

    pub(crate) fn end(attempt: u64, agent: u64) -> String {
        format!("end/{attempt}/{agent}")
    }
}

/// The content of the agents' store.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) attempt: Option<Attempt>,
    /// The address at which its ranks meet.
    pub(super) address: Option<(String, u16)>,
    /// The reason why its ranks end.
    pub(super) stop: Option<Stop>,
    /// The signal by which its ranks were asked to end.
    pub(super) interrupt: Option<i32>,
    /// Whether its ranks were asked to end a second time.
    pub(super) kill: bool,
    pub(super) over: Option<Over>,
    /// The reason why this agent is refused.
    pub(super) refused: Option<String>,
    /// Time of the store's last answer.
    pub(super) heard: Instant,
}

type Task = Box<dyn FnOnce(&dyn Store) + Send>;

/// The polling thread and the content that it has read.
pub(super) struct Board {
    seen: Arc<Mutex<Seen>>,
    tasks: Sender<Task>,
}

impl Board {
    pub(super) fn new(store: Arc<dyn Store>, agent: u64) -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen {
            attempt: None,
            address: None,
            stop: None,
            interrupt: None,
            kill: false,
            over: None,
            refused: None,
            heard: Instant::now(),
        }));
        let (tasks, queue) = channel::<Task>();
        let run = {
            let seen = seen.clone();
            move || {
                let (mut beats, mut beaten) = (0_u64, None::<Instant>);
                loop {
                    match queue.recv_timeout(POLL) {
                        Ok(task) => task(&*store),
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => return,
                    }
                    if beaten.is_none_or(|at| at.elapsed() >= BEAT) {
                        (beats, beaten) = (beats + 1, Some(Instant::now()));
                        // A failure shows in the reads below.
                        let _ = write(&*store, &keys::beat(agent), &beats);
                    }
                    look(&*store, agent, &seen);
                }
            }
        };
        std::thread::Builder::new()
            .name("agents".to_owned())
            .spawn(run)
            .map_err(|e| Error::Launch(format!("starting a thread: {e}{}", advice(&e))))?;
        Ok(Self { seen, tasks })
    }

    /// Returns the content read last.
    pub(super) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// Publishes the address at which the ranks of an attempt meet.
    pub(super) fn tell_address(&self, attempt: u64, address: (String, u16)) {
        self.post(move |store| drop(write(store, &keys::address(attempt), &address)));
    }

    /// Publishes that the ranks of an attempt are asked to end.
    pub(super) fn tell_interrupt(&self, attempt: u64, signal: i32) {
        self.post(move |store| drop(write(store, &keys::interrupt(attempt), &signal)));
    }

    /// Publishes that the ranks of an attempt must end at once.
    pub(super) fn tell_kill(&self, attempt: u64) {
        self.post(move |store| drop(write(store, &keys::kill(attempt), &true)));
    }

    /// Publishes how the job goes on after a loss.
    pub(super) fn tell_going_on(&self, attempt: u64, agent: u64, going_on: GoingOn) {
        self.post(move |store| drop(write(store, &keys::going_on(attempt, agent), &going_on)));
    }

    /// Publishes which of this node's ranks are lost.
    pub(super) fn tell_losses(&self, attempt: u64, agent: u64, losses: Losses) {
        self.post(move |store| drop(write(store, &keys::losses(attempt, agent), &losses)));
    }

    /// Publishes the end of this node's first failed rank.
    pub(super) fn tell_failing(&self, attempt: u64, agent: u64, failed: (String, i32)) {
        self.post(move |store| drop(write(store, &keys::failing(attempt, agent), &failed)));
    }

    /// Publishes the end of this node's ranks.
    pub(super) fn tell_end(&self, attempt: u64, agent: u64, end: End) {
        self.post(move |store| drop(write(store, &keys::end(attempt, agent), &end)));
    }

    /// Confirms that this agent knows about the end of the job. Waits at most `limit`.
    pub(super) fn say_bye(&self, agent: u64, limit: Duration) {
        let (said, done) = channel();
        self.post(move |store| {
            let _ = write(store, &keys::bye(agent), &true);
            let _ = said.send(());
        });
        let _ = done.recv_timeout(limit);
    }

    fn post(&self, task: impl FnOnce(&dyn Store) + Send + 'static) {
        // The thread ends only after its sender is dropped.
        let _ = self.tasks.send(Box::new(task));
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().expect("no panic while looking")
}

fn look(store: &dyn Store, agent: u64, seen: &Mutex<Seen>) {
    // Any request tells whether the store answers.
    if store.add(keys::AGENTS, 0).is_err() {
        return;
    }
    let attempt: Option<Attempt> = read(store, keys::ATTEMPT);
    let number = attempt.as_ref().map_or(0, |attempt| attempt.number);
    let next = Seen {
        attempt,
        address: read(store, &keys::address(number)),
        stop: read(store, &keys::stop(number)),
        interrupt: read(store, &keys::interrupt(number)),
        kill: read(store, &keys::kill(number)).unwrap_or_default(),
        over: read(store, keys::OVER),
        refused: read(store, &keys::refused(agent)),
        heard: Instant::now(),
    };
    *lock(seen) = next;
}
