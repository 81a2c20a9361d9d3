//! An agent's connections to the seats of the rendezvous ([`quorum`]): a thread for each reads it,
//! and writes to it for the coordinator.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::endpoint::{CONNECTS_AGAIN, Connected};
use super::plan::{Attempt, Member, Over};
use super::quorum::{self, Claim, Lead, Record, Seat};
use crate::{Error, Result};
use fulgurite_error::advice;
use fulgurite_store::{JobKey, Store};

/// The state of a job after a decision, from which another coordinator can go on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Decision {
    pub(super) attempt: Attempt,
    /// The number of new processes of each rank.
    pub(super) restarts: Vec<u64>,
    /// The agents that are known, in the order of joining, and whether the job goes on without
    /// their ranks.
    pub(super) agents: Vec<(u64, Member, bool)>,
    /// How often each host was lost.
    pub(super) lost_hosts: BTreeMap<String, u64>,
    /// The agent that has decided so, and its host.
    pub(super) coordinator: (u64, String),
    pub(super) over: Option<Over>,
}

type Decided = Option<Decision>;

/// Connects to a seat; the first time, or again after the connection broke.
pub(super) type Connect = Box<dyn FnMut(bool) -> Result<Arc<dyn Store>> + Send>;

/// The keys of a seat's store for the seat itself.
const LIFE: &str = "life";
const RECORD: &str = "record";

/// A key of a seat's store to which nothing is added: the answer tells that the store answers.
const NOTHING: &str = "nothing";

/// The seats of the rendezvous, as this agent sees them.
pub(super) struct Seats {
    shared: Arc<Shared>,
    /// This agent's own seat.
    own: Option<usize>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// The agents' connections to this agent's own seat.
    connected: Connected,
    /// How long a coordinator may be silent.
    lease: Duration,
    interval: Duration,
}

struct State {
    seats: Vec<View>,
    /// The job that this agent belongs to, once it knows.
    job: Option<u64>,
    /// When the coordinator's last sign of life was seen.
    heard: Instant,
    claim: Option<(Claim<Decided>, Vec<Answer>)>,
    lead: Option<Lead<Decided>>,
    /// How often this agent has decided as coordinator, and how often it has written.
    decisions: u64,
    beats: u64,
    ended: bool,
}

/// What an agent knows of a seat.
#[derive(Default)]
struct View {
    store: Option<Arc<dyn Store>>,
    seat: Option<Seat<Decided>>,
    /// When it was last read, and when its record was last seen to change.
    read: Option<Instant>,
    changed: Option<Instant>,
    /// When this agent, as coordinator, last wrote it.
    written: Option<Instant>,
    /// Why it cannot be reached, and whether that will not change.
    unreached: Option<(Error, bool)>,
}

impl View {
    /// The agent that holds the seat as coordinator. An agent is the life of its own seat.
    fn holder(&self) -> Option<u64> {
        Some(self.seat.as_ref()?.record.as_ref()?.holder)
    }
}

/// A seat's answer to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Awaited,
    /// Granted by the seat with this life.
    Granted(u64),
    Refused,
}

impl Seats {
    /// Connects to the seats, on a thread each. `own` is the seat of this `agent`.
    pub(super) fn new(
        connections: Vec<Connect>,
        (agent, own): (u64, Option<usize>),
        connected: Connected,
        lease: Duration,
    ) -> Result<Self> {
        let state = State {
            seats: connections.iter().map(|_| View::default()).collect(),
            job: None,
            heard: Instant::now(),
            claim: None,
            lead: None,
            decisions: 0,
            beats: 0,
            ended: false,
        };
        let interval = (lease / 10).min(Duration::from_millis(500));
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { state, changed, connected, lease, interval });
        for (seat, connect) in connections.into_iter().enumerate() {
            let life = (own == Some(seat)).then_some(agent);
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("seat-{seat}"))
                .spawn(move || shared.attend(seat, life, connect))
                .map_err(|e| Error::Launch(format!("starting a thread: {e}{}", advice(&e))))?;
        }
        Ok(Self { shared, own })
    }

    /// Whether this agent has a seat.
    pub(super) fn has_own(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the term of the job's coordinator and its agents' store, if it is known.
    pub(super) fn coordinator(&self) -> Option<(u64, TermStore)> {
        let term = self.shared.lock().coordinator(self.shared.lease)?;
        Some((term, self.store_of(term)?))
    }

    /// Returns the agents' store of a coordinator, as long as its seat is reached. At the end of
    /// the job it stays readable when the other seats are gone.
    pub(super) fn store_of(&self, term: u64) -> Option<TermStore> {
        let state = self.shared.lock();
        let store = state.seats[state.seat_of(term)].store.clone()?;
        Some(TermStore { store, term })
    }

    /// Returns the term of this agent, if it is the coordinator.
    pub(super) fn own_term(&self) -> Option<u64> {
        self.shared.lock().lead.as_ref().map(Lead::term)
    }

    /// For how long the coordinator has given no sign of life.
    pub(super) fn silent_for(&self) -> Duration {
        self.shared.lock().heard.elapsed()
    }

    /// Why seats cannot be reached: for each its place, the reason, and whether it stays so.
    pub(super) fn unreached(&self) -> Vec<(usize, String, bool)> {
        let state = self.shared.lock();
        let views = state.seats.iter().enumerate();
        let why = |(at, view): (usize, &View)| {
            let (why, stays) = view.unreached.as_ref()?;
            let why = match why {
                Error::Launch(why) => why.clone(),
                other => other.to_string(),
            };
            Some((at, why, *stays))
        };
        views.filter_map(why).collect()
    }

    /// Waits until this agent is the coordinator. Returns the agents' store of its term, and what
    /// the coordinator before has decided; `None` at the start of the job. Returns `None` at the
    /// end.
    ///
    /// # Errors
    /// If no random number can be drawn.
    pub(super) fn win(&self) -> Result<Option<(TermStore, Decided)>> {
        let Some(own) = self.own else { return Err(Error::other("this agent has no seat")) };
        let (new_job, lease) = (random()?, self.shared.lease);
        let possible = |state: &State| {
            let is_silent = |at: usize| state.is_silent(at, own, &self.shared.connected, lease);
            quorum::claim(own, &state.reached(lease), is_silent, || (new_job, None))
        };
        let mut state = self.shared.lock();
        loop {
            if state.ended {
                return Ok(None);
            }
            state.claim = possible(&state).map(|claim| {
                let asked = claim.records.iter().map(|record| match record {
                    Some(_) => Answer::Awaited,
                    None => Answer::Refused,
                });
                let answers = asked.collect();
                (claim, answers)
            });
            if state.claim.is_some() {
                let until = Instant::now() + lease;
                let lead = |(claim, answers): &(Claim<Decided>, Vec<Answer>)| {
                    let granted = answers.iter().map(|answer| match answer {
                        Answer::Granted(life) => Some(*life),
                        _ => None,
                    });
                    Lead::of(claim, &granted.collect::<Vec<_>>())
                };
                state = self.shared.wait(state, until, |state| {
                    let claim = state.claim.as_ref()?;
                    (!claim.1.contains(&Answer::Awaited) || lead(claim).is_some()).then_some(())
                });
                let claim = state.claim.take();
                state.lead = claim.as_ref().and_then(lead);
                state.decisions += 1;
            }
            if let Some(lead) = &state.lead {
                let (term, before) = (lead.term(), lead.decided().clone());
                // The next coordinator must find the same.
                state = self.shared.wait_recorded(state);
                let store = state.seats[own].store.clone();
                let is_recorded = state.lead.as_ref().is_some_and(Lead::is_recorded);
                if let Some(store) = store.filter(|_| is_recorded) {
                    return Ok(Some((TermStore { store, term }, before)));
                }
                state.lead = None;
            }
            let until = Instant::now() + self.shared.interval;
            state = self.shared.wait(state, until, |state| possible(state).map(drop));
        }
    }

    /// As coordinator, decides. The decision outlives this agent.
    ///
    /// # Errors
    /// If no majority of the seats has recorded it in time: another agent may be the coordinator.
    pub(super) fn decide(&self, decision: Decision) -> Result<()> {
        let mut state = self.shared.lock();
        if let Some(lead) = &mut state.lead {
            lead.decide(Some(decision));
        }
        state.decisions += 1;
        let state = self.shared.wait_recorded(state);
        match state.lead.as_ref().is_some_and(Lead::is_recorded) {
            true => Ok(()),
            false => Err(lost(state.seats.len(), self.shared.lease)),
        }
    }

    /// As coordinator, checks that it still is.
    ///
    /// # Errors
    /// If no majority of the seats has answered lately.
    pub(super) fn check(&self) -> Result<()> {
        // Before another agent claims the seats.
        let limit = self.shared.lease * 3 / 4;
        let is_held = |state: &State| {
            let written = |at: usize| state.seats[at].written;
            let in_time = |at: usize| written(at).is_some_and(|at| at.elapsed() < limit);
            state.lead.as_ref().is_some_and(|lead| lead.is_held(in_time))
        };
        let state = self.shared.lock();
        // The only seat is in this process.
        if state.seats.len() == 1 || is_held(&state) {
            return Ok(());
        }
        // This process may have been stopped, and is about to write again.
        let until = Instant::now() + 2 * self.shared.interval;
        let state = self.shared.wait(state, until, |state| is_held(state).then_some(()));
        match is_held(&state) {
            true => Ok(()),
            false => Err(lost(state.seats.len(), limit)),
        }
    }

    /// Ends the threads. The stores stay readable until the process ends.
    pub(super) fn end(&self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

fn lost(seats: usize, limit: Duration) -> Error {
    Error::Launch(match seats {
        1 => format!("the rendezvous on this host has not answered for {limit:?}"),
        _ => format!(
            "fewer than a majority of the {seats} hosts of the rendezvous have answered for {limit:?}. The others \
             may go on with another coordinator"
        ),
    })
}

impl State {
    fn seat_of(&self, term: u64) -> usize {
        (term % self.seats.len() as u64) as usize
    }

    /// The seats that were read lately.
    fn reached(&self, lease: Duration) -> Vec<Option<Seat<Decided>>> {
        let lately = |view: &&View| {
            let read = view.read.filter(|_| view.store.is_some());
            read.is_some_and(|read| read.elapsed() < lease / 2 + MARGIN)
        };
        self.seats.iter().map(|view| Some(view).filter(lately)?.seat.clone()).collect()
    }

    fn coordinator(&self, lease: Duration) -> Option<u64> {
        quorum::coordinator(&self.reached(lease))
    }

    /// Whether the agent of seat `own` may claim a seat. Its record has not changed for so long
    /// that its coordinator has given up. If the coordinator's connection to `own` has ended, a
    /// shorter time is enough. Of several agents the one of the first seat begins.
    fn is_silent(&self, at: usize, own: usize, connected: &Connected, lease: Duration) -> bool {
        let reached = self.reached(lease);
        let before = reached[..own].iter().flatten().count() as u32;
        let view = &self.seats[at];
        let Some(changed) = view.changed else { return false };
        let is_silent_for = |time: Duration| changed.elapsed() >= time + before * time / 2;
        let is_cut_off = |agent| connected.is_cut_off(agent, changed);
        is_silent_for(lease)
            || is_silent_for(CONNECTS_AGAIN) && view.holder().is_some_and(is_cut_off)
    }
}

/// A reading may be this much later than planned.
const MARGIN: Duration = Duration::from_secs(1);
/// Pause before another connection.
const PAUSE: Duration = Duration::from_millis(500);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `until`, or until `ready`.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        until: Instant,
        ready: impl Fn(&State) -> Option<()>,
    ) -> MutexGuard<'a, State> {
        self.changed.notify_all();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.ended || ready(&state).is_some() {
                return state;
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn wait_recorded<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.wait(state, Instant::now() + self.lease, |state| {
            state.lead.as_ref().is_none_or(Lead::is_recorded).then_some(())
        })
    }

    /// Reads a seat, and writes to it, until the end.
    fn attend(&self, at: usize, life: Option<u64>, mut connect: Connect) {
        let mut first = true;
        loop {
            let state = self.lock();
            if state.ended {
                return;
            }
            let store = state.seats[at].store.clone();
            let (claims, decisions) = (state.claim.is_some(), state.decisions);
            drop(state);
            let begun = Instant::now();
            let visited = match store {
                Some(store) => self.visit(at, life, &*store),
                None => match connect(first) {
                    Ok(store) => {
                        let view = &mut self.lock().seats[at];
                        (view.store, view.unreached) = (Some(store), None);
                        first = false;
                        continue;
                    }
                    Err(error) => Err(error),
                },
            };
            let pause = match visited {
                Ok(()) => self.interval,
                Err(error) => {
                    let mut state = self.lock();
                    let view = &mut state.seats[at];
                    view.store = None;
                    view.unreached = Some((error, first));
                    if let Some((_, answers)) = &mut state.claim
                        && answers[at] == Answer::Awaited
                    {
                        answers[at] = Answer::Refused;
                    }
                    PAUSE
                }
            };
            drop(self.wait(self.lock(), begun + pause, |state| {
                let has_news = state.claim.is_some() && !claims || state.decisions > decisions;
                (has_news && state.seats[at].store.is_some()).then_some(())
            }));
        }
    }

    /// Reads a seat once, and writes to it if this agent claims it or is the coordinator.
    fn visit(&self, at: usize, life: Option<u64>, store: &dyn Store) -> Result<()> {
        if let Some(life) = life {
            store.compare_set(LIFE, None, life.to_string().as_bytes())?;
        }
        // A value may be missing, and the request tells that the store answers.
        store.add(NOTHING, 0)?;
        // Its agent is about to set it.
        let Ok(life) = store.get(LIFE, Duration::ZERO) else { return Ok(()) };
        let wrong = || Error::Launch("the store of a seat has other values".to_owned());
        let life = String::from_utf8_lossy(&life).parse().map_err(|_| wrong())?;
        let bytes = store.get(RECORD, Duration::ZERO).ok();
        let found = bytes.as_ref().map(|bytes| serde_json::from_slice(bytes)).transpose();
        let found = found.map_err(|_| wrong())?;
        let Some(record) = self.read(at, life, found) else { return Ok(()) };
        let begun = Instant::now();
        let text = serde_json::to_vec(&record).map_err(Error::other)?;
        let done = store.compare_set(RECORD, bytes.as_deref(), &text)?;
        self.note_written(at, life, record, done.then_some(begun));
        Ok(())
    }

    /// Notes what was read. Returns what to write.
    fn read(
        &self,
        at: usize,
        life: u64,
        found: Option<Record<Decided>>,
    ) -> Option<Record<Decided>> {
        let mut state = self.lock();
        let (now, job) = (Instant::now(), state.job);
        let view = &mut state.seats[at];
        if found.as_ref().is_some_and(|found| job.is_some_and(|job| found.job != job)) {
            view.seat = None;
            return None;
        }
        let seat = Some(Seat { life, record: found.clone() });
        if view.seat != seat {
            (view.seat, view.changed) = (seat, Some(now));
        }
        view.read = Some(now);
        self.note_life(&mut state);
        if let Some((claim, answers)) = &mut state.claim {
            if answers[at] != Answer::Awaited {
                return None;
            }
            if claim.read[at] != found {
                answers[at] = Answer::Refused;
                return None;
            }
            return claim.records[at].clone();
        }
        state.beats += 1;
        state.lead.as_ref().and_then(|lead| lead.record(found.as_ref(), state.beats))
    }

    fn note_written(
        &self,
        at: usize,
        life: u64,
        record: Record<Decided>,
        written: Option<Instant>,
    ) {
        let mut state = self.lock();
        let is_claim = |claim: &Claim<Decided>| claim.term == record.term && record.beat == 0;
        if let Some((_, answers)) = state.claim.as_mut().filter(|(claim, _)| is_claim(claim)) {
            if answers[at] == Answer::Awaited {
                answers[at] = written.map_or(Answer::Refused, |_| Answer::Granted(life));
            }
        } else if let (Some(begun), Some(lead)) = (written, &mut state.lead)
            && lead.term() == record.term
        {
            lead.note(at, life, &record);
            state.seats[at].written = Some(begun);
        }
        if written.is_some() {
            let view = &mut state.seats[at];
            view.seat = Some(Seat { life, record: Some(record) });
            view.changed = Some(Instant::now());
        }
        self.note_life(&mut state);
        drop(state);
        self.changed.notify_all();
    }

    /// Notes a sign of life of the coordinator.
    fn note_life(&self, state: &mut State) {
        let Some(term) = state.coordinator(self.lease) else { return };
        let of_term = |view: &&View| {
            let record = view.seat.as_ref().and_then(|seat| seat.record.as_ref());
            record.is_some_and(|record| record.term == term)
        };
        let changed = state.seats.iter().filter(of_term).filter_map(|view| view.changed).max();
        state.heard = state.heard.max(changed.unwrap_or(state.heard));
        let job = |view: &View| Some(view.seat.as_ref()?.record.as_ref()?.job);
        state.job = state.job.or_else(|| state.seats.iter().find_map(job));
    }
}

/// A random number.
pub(super) fn random() -> Result<u64> {
    let text = JobKey::random_secret()?;
    let digits = text.get(..16).and_then(|digits| u64::from_str_radix(digits, 16).ok());
    digits.ok_or_else(|| Error::other("a random number has too few digits"))
}

/// The agents' store in the term of one coordinator.
#[derive(Clone)]
pub(super) struct TermStore {
    store: Arc<dyn Store>,
    term: u64,
}

impl TermStore {
    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.term)
    }
}

impl Store for TermStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(&self.key(key), timeout)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.key(key), amount)
    }

    fn compare_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<bool> {
        self.store.compare_set(&self.key(key), expected, value)
    }

    fn report_failure(&self, message: &str) -> Result<()> {
        self.store.report_failure(message)
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.store.failure()
    }
}

#[cfg(test)]
mod tests;
