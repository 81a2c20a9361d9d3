//! An agent's view of the others: a thread polls the agents' store and writes to it. Another
//! coordinator has another store, and gets everything again.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::plan::{Attempt, End, Losses, Member, Over, Stop};
use super::seats::{Seats, TermStore};
use crate::link::GoingOn;
use crate::{Error, Result};
use fulgurite_error::advice;
use fulgurite_store::Store;

/// Interval between reads of the store.
const POLL: Duration = Duration::from_millis(100);
/// Interval between an agent's heartbeats.
const BEAT: Duration = Duration::from_millis(500);

/// Returns a key's value, if it exists and can be read.
pub(super) fn read<T: DeserializeOwned>(store: &dyn Store, key: &str) -> Option<T> {
    serde_json::from_slice(&store.get(key, Duration::ZERO).ok()?).ok()
}

pub(super) fn write<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> Result<()> {
    store.set(key, &serde_json::to_vec(value).map_err(Error::other)?)
}

/// Writes what all agents read.
pub(super) fn write_for_all<T: Serialize>(store: &dyn Store, key: &str, value: &T) -> Result<()> {
    write(store, key, value)?;
    store.add(keys::CHANGES, 1).map(drop)
}

/// The keys of the agents' store.
pub(super) mod keys {
    /// How often an agent has come.
    pub(crate) const AGENTS: &str = "agents";
    /// How often something for all agents was written.
    pub(crate) const CHANGES: &str = "changes";
    /// The current attempt.
    pub(crate) const ATTEMPT: &str = "attempt";
    /// The end of the job.
    pub(crate) const OVER: &str = "over";

    /// The agent that was the `number`th to come: its id and its `Member`.
    pub(crate) fn comer(number: u64) -> String {
        format!("agent/{number}")
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
#[derive(Debug, Clone, Default)]
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
}

/// The polling threads and the content that they have read.
pub(super) struct Board(Arc<Shared>);

struct Shared {
    seats: Arc<Seats>,
    agent: u64,
    member: Member,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    seen: Seen,
    /// When a coordinator's store last answered.
    heard: Instant,
    /// What this agent has said, in order.
    said: Vec<Said>,
    /// Number of the first of it that is not forgotten.
    first: usize,
    /// Number of the first of it that the present coordinator does not know.
    untold: usize,
    /// The term of the present coordinator.
    term: u64,
    ended: bool,
}

struct Said {
    attempt: u64,
    /// Whether all agents read it, or the coordinator alone.
    is_for_all: bool,
    key: String,
    value: Vec<u8>,
}

impl Board {
    /// Makes the agent known to the coordinator, now and whenever it is another one.
    pub(super) fn new(seats: Arc<Seats>, agent: u64, member: Member) -> Result<Self> {
        let (seen, heard, said) = (Seen::default(), Instant::now(), Vec::new());
        let state = State { seen, heard, said, first: 0, untold: 0, term: 0, ended: false };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { seats, agent, member, state, changed });
        let shared_for_thread = shared.clone();
        start(move || shared_for_thread.follow_coordinators())?;
        Ok(Self(shared))
    }

    /// Returns the content read last.
    pub(super) fn seen(&self) -> Seen {
        self.0.lock().seen.clone()
    }

    /// For how long no coordinator's store has answered.
    pub(super) fn silent_for(&self) -> Duration {
        self.0.lock().heard.elapsed()
    }

    /// Publishes the address at which the ranks of an attempt meet.
    pub(super) fn tell_address(&self, attempt: u64, address: (String, u16)) {
        self.say(attempt, true, keys::address(attempt), &address);
    }

    /// Publishes that the ranks of an attempt are asked to end.
    pub(super) fn tell_interrupt(&self, attempt: u64, signal: i32) {
        self.say(attempt, true, keys::interrupt(attempt), &signal);
    }

    /// Publishes that the ranks of an attempt must end at once.
    pub(super) fn tell_kill(&self, attempt: u64) {
        self.say(attempt, true, keys::kill(attempt), &true);
    }

    /// Publishes how the job goes on after a loss.
    pub(super) fn tell_going_on(&self, attempt: u64, agent: u64, going_on: GoingOn) {
        self.say(attempt, false, keys::going_on(attempt, agent), &going_on);
    }

    /// Publishes which of this node's ranks are lost.
    pub(super) fn tell_losses(&self, attempt: u64, agent: u64, losses: Losses) {
        self.say(attempt, false, keys::losses(attempt, agent), &losses);
    }

    /// Publishes the end of this node's first failed rank.
    pub(super) fn tell_failing(&self, attempt: u64, agent: u64, failed: (String, i32)) {
        self.say(attempt, false, keys::failing(attempt, agent), &failed);
    }

    /// Publishes the end of this node's ranks.
    pub(super) fn tell_end(&self, attempt: u64, agent: u64, end: End) {
        self.say(attempt, false, keys::end(attempt, agent), &end);
    }

    /// Confirms that this agent knows about the end of the job. Waits at most `limit`.
    pub(super) fn say_bye(&self, limit: Duration) {
        self.say(u64::MAX, false, keys::bye(self.0.agent), &true);
        let until = Instant::now() + limit;
        let mut state = self.0.lock();
        while state.untold < state.first + state.said.len() && Instant::now() < until {
            state = self.0.wait(state, POLL);
        }
    }

    /// Tells something about an attempt.
    fn say<T: Serialize>(&self, attempt: u64, is_for_all: bool, key: String, value: &T) {
        let value = serde_json::to_vec(value).expect("what agents say is JSON");
        let mut state = self.0.lock();
        // No coordinator needs to hear of attempts before the last two again.
        let old = state.said.iter().take_while(|said| said.attempt.saturating_add(1) < attempt);
        let old = old.count().min(state.untold - state.first);
        state.said.drain(..old);
        state.first += old;
        state.said.push(Said { attempt, is_for_all, key, value });
        self.0.changed.notify_all();
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

fn start(run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name("agents".to_owned()).spawn(run);
    thread.map(drop).map_err(|e| Error::Launch(format!("starting a thread: {e}{}", advice(&e))))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, within: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, within).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Starts a thread for each coordinator. The one of a lost coordinator may wait for its answer.
    fn follow_coordinators(self: Arc<Self>) {
        let mut last = 0;
        while !self.lock().ended {
            if let Some((term, _)) = self.seats.coordinator()
                && term > last
            {
                let mut state = self.lock();
                (state.term, state.untold) = (term, state.first);
                drop(state);
                let shared = self.clone();
                // Without a thread now, the next round tries again.
                if start(move || shared.talk(term)).is_ok() {
                    last = term;
                }
            }
            drop(self.wait(self.lock(), POLL));
        }
    }

    /// Tells one coordinator everything, and reads what it says, until there is another one.
    fn talk(&self, term: u64) {
        let (mut beats, mut beaten) = (0_u64, None::<Instant>);
        let (mut is_known, mut last_change) = (false, None);
        loop {
            let state = self.lock();
            if state.ended || state.term != term {
                return;
            }
            drop(state);
            let mut answers = false;
            if let Some(store) = self.seats.store_of(term) {
                is_known = is_known || self.come(&store).is_ok();
                if is_known {
                    answers = self.tell(&store, term);
                    // The first heartbeat says that the coordinator knows everything.
                    if answers && beaten.is_none_or(|at| at.elapsed() >= BEAT) {
                        (beats, beaten) = (beats + 1, Some(Instant::now()));
                        // A failure shows in the reads below.
                        let _ = write(&store, &keys::beat(self.agent), &beats);
                        // A read that failed has passed for a missing key.
                        last_change = None;
                    }
                    self.look(&store, term, &mut last_change);
                }
            }
            let state = self.lock();
            if !answers {
                drop(state);
                std::thread::sleep(POLL);
            } else if state.untold == state.first + state.said.len() {
                drop(self.wait(state, POLL));
            }
        }
    }

    /// Makes this agent known.
    fn come(&self, store: &TermStore) -> Result<()> {
        let number = store.add(keys::AGENTS, 1)?.unsigned_abs() - 1;
        write(store, &keys::comer(number), &(self.agent, &self.member))
    }

    /// Tells what this agent has said since the last time. Returns whether the store answers.
    fn tell(&self, store: &TermStore, term: u64) -> bool {
        loop {
            let state = self.lock();
            let Some(said) = state.said.get(state.untold - state.first) else { return true };
            let (number, is_for_all) = (state.untold, said.is_for_all);
            let (key, value) = (said.key.clone(), said.value.clone());
            drop(state);
            if store.set(&key, &value).is_err()
                || is_for_all && store.add(keys::CHANGES, 1).is_err()
            {
                return false;
            }
            let mut state = self.lock();
            if state.term != term {
                return true;
            }
            state.untold = state.untold.max(number + 1);
            self.changed.notify_all();
        }
    }

    /// Reads what was written for all agents since the `last` change that this thread has read.
    fn look(&self, store: &TermStore, term: u64, last: &mut Option<i64>) {
        // This also tells whether the store answers.
        let Ok(change) = store.add(keys::CHANGES, 0) else { return };
        if *last == Some(change) {
            self.lock().heard = Instant::now();
            return;
        }
        let attempt: Option<Attempt> = read(store, keys::ATTEMPT);
        let number = attempt.as_ref().map_or(0, |attempt| attempt.number);
        let seen = Seen {
            address: read(store, &keys::address(number)),
            stop: read(store, &keys::stop(number)),
            interrupt: read(store, &keys::interrupt(number)),
            kill: read(store, &keys::kill(number)).unwrap_or_default(),
            over: read(store, keys::OVER),
            refused: read(store, &keys::refused(self.agent)),
            attempt,
        };
        *last = store.add(keys::CHANGES, 0).ok().filter(|now| *now == change);
        // A new coordinator has not said anything yet.
        let says = seen.attempt.is_some() || seen.over.is_some() || seen.refused.is_some();
        let mut state = self.lock();
        state.heard = Instant::now();
        if says && state.term == term {
            state.seen = seen;
        }
    }
}
