//! What the handle of a group, its works and the watchdog share.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulgurite_engine::collective::ProcessGroup;
use fulgurite_error::Error;

use crate::communicator::Communicator;
use crate::failure::Failure;
use crate::flight::Flight;
use crate::streams::{Event, Memory};
use crate::world::World;

/// A group of this rank.
pub(crate) struct Shared {
    pub(crate) world: Arc<World>,
    /// The same ranks, for tensors of the host, ids of communicators, and telling each other of failures.
    pub(crate) host: Arc<dyn ProcessGroup>,
    /// Unique among all groups of the job.
    pub(crate) key: String,
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) global_ranks: Vec<usize>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    next: u64,
    flights: BTreeMap<u64, Flight>,
    communicators: Vec<Arc<Communicator>>,
}

impl Shared {
    pub(crate) fn new(
        world: Arc<World>,
        host: Arc<dyn ProcessGroup>,
        key: String,
        name: String,
    ) -> Arc<Self> {
        let (rank, global_ranks) = (host.rank(), host.global_ranks().to_vec());
        let state = Mutex::default();
        let shared = Arc::new(Self { world, host, key, name, rank, global_ranks, state });
        shared.world.watch(&shared);
        shared
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn own_rank(&self) -> usize {
        self.global_ranks[self.rank]
    }

    /// The failure of the group, if this rank knows of one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// `failure` as an error of the operation `op`.
    pub(crate) fn error(&self, op: &'static str, failure: Failure) -> Error {
        match failure {
            Failure::Peer { rank, message } => Error::PeerFailed { rank, message },
            Failure::Interrupted => Error::Interrupted,
            Failure::Group(message) => {
                Error::Collective { rank: self.own_rank(), group: self.name.clone(), op, message }
            }
        }
    }

    /// Ends the group, unless it has ended: here, and on the other ranks by the host's group. What is under way may
    /// still access its memory, which is never freed.
    pub(crate) fn fail(&self, failure: Failure) {
        let mut state = self.state();
        if state.failure.is_some() {
            return;
        }
        let reason = failure.reason();
        state.failure = Some(failure);
        let flights = std::mem::take(&mut state.flights);
        let communicators = std::mem::take(&mut state.communicators);
        drop(state);
        flights.into_values().for_each(|flight| std::mem::forget(flight.memory));
        self.host.abort(&reason);
        for communicator in communicators {
            communicator.abort();
            // Its stream may still have what was queued on it.
            std::mem::forget(communicator);
        }
    }

    /// Notes a new communicator.
    pub(crate) fn add(&self, communicator: &Arc<Communicator>) {
        let mut state = self.state();
        if state.failure.is_none() {
            return state.communicators.push(communicator.clone());
        }
        drop(state);
        communicator.abort();
    }

    /// The communicators, unless the group has failed.
    pub(crate) fn communicators(&self) -> Vec<Arc<Communicator>> {
        self.state().communicators.clone()
    }

    /// Notes that something begins. Returns its ticket.
    pub(crate) fn begin(&self, flight: Flight) -> u64 {
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.flights.insert(ticket, flight);
        ticket
    }

    /// Notes that it is on its stream, and has run when `event` has come.
    ///
    /// # Errors
    /// If the group has failed.
    pub(crate) fn launched(&self, ticket: u64, event: Arc<dyn Event>) -> Result<(), Failure> {
        let mut state = self.state();
        if let Some(failure) = state.failure.clone() {
            return Err(failure);
        }
        if let Some(flight) = state.flights.get_mut(&ticket) {
            flight.event = Some(event);
        }
        Ok(())
    }

    /// Holds memory of what nobody waits for until it has run; for ever, if the group has failed.
    pub(crate) fn hold(&self, ticket: u64, memory: Vec<Memory>) {
        let mut state = self.state();
        if state.failure.is_some() {
            return std::mem::forget(memory);
        }
        if let Some(flight) = state.flights.get_mut(&ticket) {
            flight.memory = memory;
        }
    }

    /// Calls `look` on what is under way, in order, and forgets that of which it returns false.
    pub(crate) fn flights(&self, mut look: impl FnMut(&mut Flight) -> bool) {
        let mut ended = Vec::new();
        let mut state = self.state();
        state.flights.retain(|_, flight| {
            let keep = look(flight);
            if !keep {
                ended.append(&mut flight.memory);
            }
            keep
        });
        // Memory is freed without the lock.
        drop(state);
        drop(ended);
    }
}
