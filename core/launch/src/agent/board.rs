//! What an agent knows of the others: a thread that asks the agents' store, and tells it.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::plan::{Attempt, End, Over};
use crate::{Error, Result};
use fulgurite_error::advice;
use fulgurite_store::Store;

/// How often the store is asked.
const POLL: Duration = Duration::from_millis(100);
/// How often an agent says that it lives.
const BEAT: Duration = Duration::from_secs(1);

/// The value of a key, if it is there and can be read.
pub(super) fn read<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Option<T> {
    serde_json::from_slice(&store.get(key, Duration::ZERO).ok()?).ok()
}

pub(super) fn write<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> Result<()> {
    store.set(key, &serde_json::to_vec(value).map_err(Error::other)?)
}

/// The keys of the agents' store.
pub(super) mod keys {
    /// Number of agents that have come.
    pub(crate) const AGENTS: &str = "agents";
    /// Number of the attempt that is under way.
    pub(crate) const ATTEMPT: &str = "attempt";
    /// Says that the job is over.
    pub(crate) const OVER: &str = "over";

    pub(crate) fn member(agent: u64) -> String {
        format!("agent/{agent}")
    }

    /// Says that an agent knows that the job is over.
    pub(crate) fn bye(agent: u64) -> String {
        format!("bye/{agent}")
    }

    /// Why an agent is not taken in.
    pub(crate) fn refused(agent: u64) -> String {
        format!("refused/{agent}")
    }

    pub(crate) fn beat(agent: u64) -> String {
        format!("beat/{agent}")
    }

    /// Where the ranks of an attempt meet.
    pub(crate) fn address(attempt: u64) -> String {
        format!("address/{attempt}")
    }

    /// Why the ranks of an attempt end.
    pub(crate) fn stop(attempt: u64) -> String {
        format!("stop/{attempt}")
    }

    /// By which signal the ranks of an attempt were asked to end.
    pub(crate) fn interrupt(attempt: u64) -> String {
        format!("interrupt/{attempt}")
    }

    /// Says that the ranks of an attempt were asked to end a second time.
    pub(crate) fn kill(attempt: u64) -> String {
        format!("kill/{attempt}")
    }

    /// How the first rank of an agent that failed did, while others may still end.
    pub(crate) fn failing(attempt: u64, agent: u64) -> String {
        format!("failing/{attempt}/{agent}")
    }

    pub(crate) fn end(attempt: u64, agent: u64) -> String {
        format!("end/{attempt}/{agent}")
    }
}

/// What the agents' store says.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) attempt: Option<Attempt>,
    /// Where its ranks meet.
    pub(super) address: Option<(String, u16)>,
    /// Why its ranks end.
    pub(super) stop: Option<String>,
    /// By which signal they were asked to.
    pub(super) interrupt: Option<i32>,
    /// Whether they were asked to a second time.
    pub(super) kill: bool,
    pub(super) over: Option<Over>,
    /// Why this agent is not taken in.
    pub(super) refused: Option<String>,
    /// When the store answered last.
    pub(super) heard: Instant,
}

type Task = Box<dyn FnOnce(&dyn Store) + Send>;

/// The thread, and what it knows.
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
                        // Whether it was heard shows below.
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

    /// What is known.
    pub(super) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// Says where the ranks of an attempt meet.
    pub(super) fn tell_address(&self, attempt: u64, address: (String, u16)) {
        self.post(move |store| drop(write(store, &keys::address(attempt), &address)));
    }

    /// Says that the ranks of an attempt are asked to end.
    pub(super) fn tell_interrupt(&self, attempt: u64, signal: i32) {
        self.post(move |store| drop(write(store, &keys::interrupt(attempt), &signal)));
    }

    /// Says that the ranks of an attempt are to end at once.
    pub(super) fn tell_kill(&self, attempt: u64) {
        self.post(move |store| drop(write(store, &keys::kill(attempt), &true)));
    }

    /// Says how the first rank of this node that failed did.
    pub(super) fn tell_failing(&self, attempt: u64, agent: u64, failed: (String, i32)) {
        self.post(move |store| drop(write(store, &keys::failing(attempt, agent), &failed)));
    }

    /// Says how this node's ranks ended.
    pub(super) fn tell_end(&self, attempt: u64, agent: u64, end: End) {
        self.post(move |store| drop(write(store, &keys::end(attempt, agent), &end)));
    }

    /// Says that this agent knows that the job is over, within `limit`.
    pub(super) fn say_bye(&self, agent: u64, limit: Duration) {
        let (said, done) = channel();
        self.post(move |store| {
            let _ = write(store, &keys::bye(agent), &true);
            let _ = said.send(());
        });
        let _ = done.recv_timeout(limit);
    }

    fn post(&self, task: impl FnOnce(&dyn Store) + Send + 'static) {
        // The thread ends only after its sender.
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
