//! The state that a generation begins with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use super::kept::{Held, Kept, Offer, RunSoFar};
use super::states::{
    Memory, MemoryState, describe_copies, hosts, open, place_with_room, written_name,
};
use crate::trainer::Event;
use crate::trainer::record::log_table::SavedStates;
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_checkpoint::{Hosts, save_on_hosts};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_launch::{FailureWatch, JobFailure};

/// What a generation goes on with. Equal on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Recovered {
    pub(crate) run: RunSoFar,
    /// A state in the hosts' memory; `None` to go on from the run's last checkpoint, or from where
    /// the run began.
    pub(crate) state: Option<MemoryState>,
    /// Where the state was, for messages.
    pub(crate) from: String,
    /// Steps done in earlier generations, on any rank.
    pub(crate) steps_done: u64,
    /// The report of the last of these steps, as far as known.
    pub(crate) last_step: Option<Event>,
}

/// Leaves the present generation if the next one has begun. No collective fails when a node is
/// taken in: a rank hears of it here, and the others at the latest when they miss this one.
///
/// # Errors
/// The failure that ends the generation.
pub(crate) fn leave_if_invited(session: &Session) -> Result<()> {
    if !session.setup.config.elastic.enabled {
        return Ok(());
    }
    let failure = FailureWatch::new().and_then(|watch| watch.wait(Duration::ZERO));
    match failure.filter(|failure| failure.goes_on) {
        Some(JobFailure { rank, message, .. }) => Err(Error::PeerFailed { rank, message }),
        None => Ok(()),
    }
}

/// Loses these ranks, as if the kernel had killed them: the others notice, and a new process takes
/// the place of each. All ranks name the same. Collective.
///
/// # Errors
/// On the ranks that are left, because ranks are lost.
pub(crate) fn lose(world: &Arc<dyn ProcessGroup>, ranks: &[usize]) -> Result<()> {
    if ranks.contains(&world.rank()) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
    world.barrier()?.wait()
}

/// The number of a reported step.
pub(crate) fn number(step: &Event) -> u64 {
    if let Event::Step { step, .. } = step { *step } else { 0 }
}

/// Agrees on the state that a generation begins with, and writes it to the hosts' memory. `None` if
/// no rank has begun the training. Collective.
///
/// Afterwards this rank's session of the generation before has ended.
///
/// # Errors
/// If a rank is lost meanwhile. `kept` is as before then.
pub(crate) fn agree(world: &Arc<dyn ProcessGroup>, kept: &mut Kept) -> Result<Option<Recovered>> {
    let offers = all_gather_object(&**world, &kept.offer())?;
    let known = match merged(&offers) {
        Some(run) => Some(run),
        // All ranks are new.
        None => broadcast_object(&**world, &RunSoFar::noted(), 0)?,
    };
    let Some(run) = known else { return Ok(None) };
    let steps_done = offers.iter().map(|offer| offer.steps_done).max().unwrap_or(0);
    kept.steps_done = steps_done;
    let hosts = hosts(world)?;
    let Memory { newest, has_parts } = Memory::of(world, &hosts)?;
    let writers = writers(&offers).filter(|writers| {
        newest.as_ref().is_none_or(|newest| offers[writers[0]].held_step() >= Some(newest.step))
    });
    let written = match &writers {
        Some(writers) => write(world, kept, &hosts, &offers, writers)?,
        None => None,
    };
    let (state, from) = match (written, &writers) {
        (Some(written), Some(writers)) => {
            (Some(written), format!("the memory of {}", ranks(writers)))
        }
        _ => (newest, describe_copies(&hosts)),
    };
    if state.is_none() && has_parts && world.rank() == 0 {
        tracing::warn!(
            "of each copy in the hosts' memory a part was on two hosts that are both lost, or was not complete \
             on either; the run goes on from its last checkpoint"
        );
    }
    let from = if state.is_some() { from } else { "the last checkpoint".to_owned() };
    let last_step = offers.into_iter().filter_map(|offer| offer.last_step);
    let last_step = last_step.max_by_key(number);
    kept.set_run(&run, last_step.as_ref());
    kept.end_session();
    Ok(Some(Recovered { run, state, from, steps_done, last_step }))
}

impl Offer {
    fn held_step(&self) -> Option<u64> {
        self.held.as_ref().map(|held| held.step)
    }
}

fn ranks(ranks: &[usize]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        several => format!("ranks {several:?}"),
    }
}

/// What the ranks know of the run.
fn merged(offers: &[Offer]) -> Option<RunSoFar> {
    offers.iter().find_map(|offer| offer.run.clone())
}

/// Returns the ranks that have the whole state after the last step together, one for each place in
/// a replica; `None` if a place is missing.
fn writers(offers: &[Offer]) -> Option<Vec<usize>> {
    let newest = offers.iter().filter_map(Offer::held_step).max()?;
    let mut places: BTreeMap<&[usize], usize> = BTreeMap::new();
    let mut replica_size = 0;
    for (rank, offer) in offers.iter().enumerate() {
        if let Some(held) = offer.held.as_ref().filter(|held| held.step == newest) {
            replica_size = held.replica_size;
            places.entry(&held.place).or_insert(rank);
        }
    }
    let mut writers: Vec<usize> = places.into_values().collect();
    writers.sort_unstable();
    (writers.len() == replica_size).then_some(writers)
}

/// Writes the state that `writers` hold to the memory of their hosts. `None` if a host has no room.
/// Collective.
fn write(
    world: &Arc<dyn ProcessGroup>,
    kept: &mut Kept,
    hosts: &Hosts,
    offers: &[Offer],
    writers: &[usize],
) -> Result<Option<MemoryState>> {
    let rank = world.rank();
    let held = |rank: &usize| offers[*rank].held.as_ref();
    let step = held(&writers[0]).map_or(0, |held| held.step);
    let bytes = |host| {
        let there = hosts.files_on(host).into_iter().filter(|rank| writers.contains(rank));
        there.filter_map(|rank| held(&rank)).map(|held| held.bytes).sum()
    };
    let place = hosts.leads(rank).then(|| place_with_room(bytes(hosts.of(rank)))).flatten();
    let places: Vec<Option<PathBuf>> = all_gather_object(&**world, &place)?;
    let full = (0..hosts.count()).find(|host| places[hosts.leader(*host)].is_none());
    let place = places[hosts.leader(hosts.of(rank))].as_ref();
    let (None, Some(place)) = (full, place) else {
        if let (0, Some(host)) = (rank, full) {
            tracing::warn!(
                "the host of rank {} has no memory or disk for the {} bytes of the training's state that it is to \
                 keep, which the ranks that are left could go on from",
                hosts.leader(host),
                bytes(host)
            );
        }
        return Ok(None);
    };
    let name = written_name(step);
    let (request, ready) = match writers.contains(&rank) {
        true => kept
            .request(&name, epoch_states(offers))
            .map_or_else(|error| (None, Err(error)), |request| (Some(request), Ok(()))),
        false => (None, Ok(())),
    };
    let io = open(place)?;
    save_on_hosts(&*io, &**world, hosts, &name, request.as_ref(), ready)?;
    io.teardown()?;
    let Memory { newest, .. } = Memory::of(world, hosts)?;
    match newest {
        Some(written) if written.name() == name => Ok(Some(written)),
        _ => Err(Error::other(format!("the state {name} was written, and is not found again"))),
    }
}

/// The values logged in the present epoch by the ranks that are left; empty if none has any.
fn epoch_states(offers: &[Offer]) -> Vec<SavedStates> {
    let of_rank = |offer: &Offer| offer.held.as_ref().and_then(|held: &Held| held.epoch.clone());
    let all: Vec<Option<SavedStates>> = offers.iter().map(of_rank).collect();
    match all.iter().any(Option::is_some) {
        true => all.into_iter().map(Option::unwrap_or_default).collect(),
        false => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(step: Option<u64>, place: &[usize], replica_size: usize) -> Offer {
        let held = |step| Held { step, place: place.to_vec(), replica_size, bytes: 8, epoch: None };
        Offer { run: None, held: step.map(held), last_step: None, steps_done: 0 }
    }

    #[test]
    fn newest_replica_is_written_once() {
        let (old, new) = (|place| offer(Some(3), &[place], 2), |place| offer(Some(4), &[place], 2));
        assert_eq!(writers(&[old(0), new(1), new(0), new(1)]), Some(vec![1, 2]));
        assert_eq!(writers(&[new(1), old(0), new(1)]), None, "only one half of the newest state");
        assert_eq!(writers(&[offer(None, &[], 1), offer(Some(0), &[], 1)]), Some(vec![1]));
        assert_eq!(writers(&[offer(None, &[], 1)]), None);
    }
}
