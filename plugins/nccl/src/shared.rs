//! State shared by a group's handle, its works and the watchdog.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fulgurite_core::Error;
use fulgurite_core::collective::ProcessGroup;

use crate::communicator::Communicator;
use crate::failure::Failure;
use crate::flight::Flight;
use crate::streams::{Event, Memory};
use crate::world::World;

/// A group of this rank.
pub(crate) struct Shared {
    pub(crate) world: Arc<World>,
    /// The same ranks, for host tensors, ids of communicators, and news of failures.
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

    /// Returns the group's failure, if this rank knows of one.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.state().failure.clone()
    }

    /// Converts `failure` to an error of the operation `op`.
    pub(crate) fn error(&self, op: &'static str, failure: Failure) -> Error {
        match failure {
            Failure::Peer { rank, message } => Error::PeerFailed { rank, message },
            Failure::Interrupted => Error::Interrupted,
            Failure::Group(message) => {
                Error::Collective { rank: self.own_rank(), group: self.name.clone(), op, message }
            }
        }
    }

    /// Ends the group, unless it has ended. The host's group tells the other ranks. Unfinished
    /// collectives may still access their memory, so it is never freed.
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
            // Its stream may still hold queued calls.
            std::mem::forget(communicator);
        }
    }

    /// Registers a new communicator.
    pub(crate) fn add(&self, communicator: &Arc<Communicator>) {
        let mut state = self.state();
        if state.failure.is_none() {
            return state.communicators.push(communicator.clone());
        }
        drop(state);
        communicator.abort();
    }

    /// Returns the communicators, or none if the group has failed.
    pub(crate) fn communicators(&self) -> Vec<Arc<Communicator>> {
        self.state().communicators.clone()
    }

    /// Registers a collective or message that begins. Returns its ticket.
    pub(crate) fn begin(&self, flight: Flight) -> u64 {
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.flights.insert(ticket, flight);
        ticket
    }

    /// Notes that a collective or message is on its stream. It has run when `event` is done.
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

    /// Holds the memory of a dropped work until the work has run, or for ever if the group has
    /// failed.
    pub(crate) fn hold(&self, ticket: u64, memory: Vec<Memory>) {
        let mut state = self.state();
        if state.failure.is_some() {
            return std::mem::forget(memory);
        }
        if let Some(flight) = state.flights.get_mut(&ticket) {
            flight.memory = memory;
        }
    }

    /// Calls `look` on all unfinished flights, in order, and removes the ones for which it returns
    /// false.
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
        // Memory is freed outside the lock.
        drop(state);
        drop(ended);
    }
}
