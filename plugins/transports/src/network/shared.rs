//! State shared by a group's handle, its worker and its lanes: members, failure, and the ways in
//! which a wait ends.
#![allow(unsafe_code)] // Reads fingerprints where a wire has put them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fulgurite_engine::collective::TIMED_OUT;
use fulgurite_launch::{Patience, Store};

use super::memory::Memory;
use super::messenger::Messenger;
use super::wire::{Network, Watch, WireError};
use crate::engine::{Failure, Identity, Queue};

/// Interval at which a waiting rank asks the store whether the group was aborted: first, and at
/// most.
const FIRST_ASK: Duration = Duration::from_millis(100);
const LAST_ASK: Duration = Duration::from_secs(1);
/// Time that a rank waits for the reason after a peer's connection has ended.
const GRACE: Duration = Duration::from_secs(2);
/// Duration of a wait after which the awaited rank is written to the store.
const LONG: Duration = Duration::from_millis(500);
/// Maximum number of ranks in a message that lists a chain of waits.
const CHAIN: usize = 8;

pub(super) struct Shared {
    pub(super) network: Arc<dyn Network>,
    pub(super) store: Arc<dyn Store>,
    messenger: Messenger,
    /// The group's failure as reported by another rank.
    told: Arc<Told>,
    pub(super) identity: Identity,
    pub(super) timeout: Duration,
    /// Bytes of a round of a reduction, for all members together.
    pub(super) chunk_bytes: usize,
    pub(super) queue: Arc<Queue>,
    /// The failure of the group, if it has failed.
    failure: Mutex<Option<Failure>>,
}

/// The store's answers about a group's failure.
#[derive(Default)]
struct Told {
    abort: Mutex<Option<Abort>>,
    /// Whether a question is waiting for its answer.
    asked: AtomicBool,
}

/// A failed group's message to other ranks: the reporting rank, the failed rank if known, and the
/// text.
type Abort = (usize, Option<usize>, String);

impl Shared {
    pub(super) fn new(world: &World, identity: Identity) -> Self {
        let World { network, store, messenger, timeout, chunk_bytes } = world.clone();
        let (queue, failure) = (Arc::default(), Mutex::new(None));
        Self {
            network,
            store,
            messenger,
            told: Arc::default(),
            identity,
            timeout,
            chunk_bytes,
            queue,
            failure,
        }
    }

    pub(super) fn world(&self) -> World {
        World {
            network: self.network.clone(),
            store: self.store.clone(),
            messenger: self.messenger.clone(),
            timeout: self.timeout,
            chunk_bytes: self.chunk_bytes,
        }
    }

    /// Returns the group's failure, if this rank knows of one.
    pub(super) fn broken(&self) -> Option<Failure> {
        self.failure.lock().expect("no panic while failing").clone()
    }

    /// Returns the group's failure, even if only another rank has reported it so far.
    pub(super) fn broken_anywhere(&self) -> Option<Failure> {
        self.broken().or_else(|| self.told(true))
    }

    /// Sets the failure of the group, unless it has failed before, and tells the other ranks.
    pub(super) fn fail(&self, failure: &Failure) {
        let mut first = self.failure.lock().expect("no panic while failing");
        if first.is_some() {
            return;
        }
        *first = Some(failure.clone());
        drop(first);
        let abort: Abort = match failure {
            Failure::Group(message) => (self.identity.own_rank(), None, message.clone()),
            Failure::Interrupted => (self.identity.own_rank(), None, "interrupted".to_owned()),
            Failure::Peer { rank, message } => {
                (self.identity.own_rank(), Some(*rank), message.clone())
            }
        };
        if let Ok(abort) = serde_json::to_vec(&abort) {
            let key = self.abort_key();
            // Waits for the store, as this process may be about to end. Without a store, the other
            // ranks are not told.
            self.messenger.ask(GRACE, move |store| drop(store.set(&key, &abort)));
        }
    }

    fn abort_key(&self) -> String {
        format!("{}/aborted", self.identity.key)
    }

    /// Returns the failure that another rank has reported, or the job's. With `ask_store` the store
    /// is asked, for the answer of a later call.
    fn told(&self, ask_store: bool) -> Option<Failure> {
        let job = || self.store.failure().map(|(rank, message)| Failure::Peer { rank, message });
        if let Some(failure) = job() {
            return Some(failure);
        }
        if ask_store && !self.told.asked.swap(true, Ordering::Relaxed) {
            let (key, told) = (self.abort_key(), self.told.clone());
            self.messenger.post(move |store| {
                if let Ok(abort) = store.get(&key, Duration::ZERO) {
                    let abort = serde_json::from_slice(&abort).ok();
                    *told.abort.lock().expect("no panic while told") = abort;
                }
                told.asked.store(false, Ordering::Relaxed);
            });
        }
        let abort = self.told.abort.lock().expect("no panic while told").clone();
        let (by, failed, reason) = abort?;
        Some(match failed {
            Some(rank) => Failure::Peer { rank, message: reason },
            None if by == self.identity.own_rank() => Failure::Group(reason),
            None => Failure::Group(format!("aborted by rank {by}: {reason}")),
        })
    }

    /// Returns the failure that ended an exchange with `members` (indices in the group).
    pub(super) fn failure_of(
        &self,
        error: WireError,
        members: &[usize],
        ended: Option<Failure>,
        what: &str,
    ) -> Failure {
        let (member, why) = match error {
            WireError::Lost { member, why } => (members[member], why),
            WireError::Failed(why) => return Failure::Group(format!("{why}, {what}")),
            WireError::Ended => {
                return ended.unwrap_or_else(|| Failure::Group(format!("it was given up, {what}")));
            }
        };
        // A failing rank closes its connections, and other ranks notice this before they learn the
        // reason.
        let mut patience = Patience::new(GRACE);
        while let Some(slice) = patience.slice() {
            if let Some(failure) = self.broken_anywhere() {
                return failure;
            }
            std::thread::sleep(slice.min(FIRST_ASK));
        }
        let rank = self.identity.global_ranks[member];
        let place = self.place(rank);
        let message = format!("its connection{place} ended ({why}), {what}");
        Failure::Peer { rank, message }
    }

    /// Formats ` (10.0.0.2)`, if known.
    fn place(&self, rank: usize) -> String {
        self.network.place(rank).map_or_else(String::new, |place| format!(" ({place})"))
    }

    /// Formats `rank 3 (10.0.0.2), which waits for rank 5`.
    pub(super) fn describe_missing(&self, rank: usize) -> String {
        let chain = self.messenger.chain(self.identity.own_rank(), rank, CHAIN, GRACE);
        let mut text = format!("rank {rank}{}", self.place(rank));
        chain[1..].iter().for_each(|rank| text.push_str(&format!(", which waits for rank {rank}")));
        text
    }
}

/// State shared by all groups of a world.
#[derive(Clone)]
pub(super) struct World {
    pub(super) network: Arc<dyn Network>,
    pub(super) store: Arc<dyn Store>,
    pub(super) messenger: Messenger,
    pub(super) timeout: Duration,
    pub(super) chunk_bytes: usize,
}

/// First message of each member, which shows whether members are in the same operation. All have
/// one length.
pub(super) trait Greeting {
    /// Returns an error message if another member's bytes, `theirs`, do not match.
    fn mismatch(&self, member: usize, theirs: &[u8]) -> Option<String>;
}

/// Watches one exchange: compares the members' greetings, and ends the wait when necessary.
pub(super) struct Waiting<'a> {
    shared: &'a Shared,
    /// The group's members by the wire's numbers.
    members: &'a [usize],
    what: &'a dyn Fn() -> String,
    greeting: Option<&'a dyn Greeting>,
    /// Memory for the greetings: the first receives, by the wire's number of the member.
    greetings: &'a [(usize, Memory)],
    patience: Patience,
    since: Instant,
    next_ask: Instant,
    asks: Duration,
    on_record: Option<usize>,
    /// The reason why it ended the exchange.
    pub(super) ended: Option<Failure>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        members: &'a [usize],
        what: &'a dyn Fn() -> String,
        greeting: Option<&'a dyn Greeting>,
        greetings: &'a [(usize, Memory)],
    ) -> Self {
        let now = Instant::now();
        Self {
            shared,
            members,
            what,
            greeting,
            greetings,
            patience: Patience::new(shared.timeout),
            since: now,
            next_ask: now + FIRST_ASK,
            asks: FIRST_ASK,
            on_record: None,
            ended: None,
        }
    }

    fn end(&mut self, failure: Failure) -> Result<(), WireError> {
        self.ended = Some(failure);
        Err(WireError::Ended)
    }

    /// Tells other ranks which rank this rank waits for.
    fn record(&mut self, missing: &[usize]) {
        let Some(&first) = missing.first() else { return };
        let awaited = self.shared.identity.global_ranks[self.members[first]];
        if self.on_record != Some(awaited) {
            self.on_record = Some(awaited);
            self.shared.messenger.record_wait(self.shared.identity.own_rank(), Some(awaited));
        }
    }
}

impl Watch for Waiting<'_> {
    fn received(&mut self, index: usize) -> Result<(), WireError> {
        let (Some(greeting), Some(&(member, memory))) = (self.greeting, self.greetings.get(index))
        else {
            return Ok(());
        };
        // SAFETY: the memory lives as long as the exchange, which has received the message and no
        // longer writes to it.
        let theirs = unsafe { memory.bytes() };
        match greeting.mismatch(self.members[member], theirs) {
            None => Ok(()),
            Some(message) => self.end(Failure::Group(message)),
        }
    }

    fn waiting(&mut self, moved: bool, missing: &[usize]) -> Result<(), WireError> {
        let shared = self.shared;
        let now = Instant::now();
        if moved {
            self.patience = Patience::new(shared.timeout);
            self.since = now;
        }
        let asks = now >= self.next_ask;
        if asks {
            self.asks = (self.asks * 2).min(LAST_ASK);
            self.next_ask = now + self.asks;
        }
        if let Some(failure) = shared.broken().or_else(|| shared.told(asks)) {
            return self.end(failure);
        }
        if shared.store.give_up().is_some() {
            return self.end(Failure::Interrupted);
        }
        if shared.queue.is_over() {
            let rank = shared.identity.own_rank();
            let what = (self.what)();
            return self.end(Failure::Group(format!("rank {rank} dropped the group, {what}")));
        }
        if now - self.since > LONG {
            self.record(missing);
        }
        if self.patience.slice().is_none() {
            let ranks =
                missing.iter().map(|&member| shared.identity.global_ranks[self.members[member]]);
            let missing: Vec<String> = ranks.map(|rank| shared.describe_missing(rank)).collect();
            let failure = Failure::Group(format!(
                "{TIMED_OUT} {:?}: {}, waited for {}",
                shared.timeout,
                (self.what)(),
                missing.join(", ")
            ));
            // The awaited rank stays on record.
            self.on_record = None;
            return self.end(failure);
        }
        Ok(())
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.on_record.is_some() {
            self.shared.messenger.record_wait(self.shared.identity.own_rank(), None);
        }
    }
}
