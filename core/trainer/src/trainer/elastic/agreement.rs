//! The state that a generation begins with.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use super::copies::newest_copy;
use super::kept::{Copy, Held, Kept, Offer, RunSoFar};
use super::places::Places;
use crate::trainer::Event;
use crate::trainer::record::log_table::SavedStates;
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;
use fulgurite_engine::checkpoint_io::{CheckpointIO, CheckpointIOConfig};
use fulgurite_engine::collective::{ProcessGroup, all_gather_object, broadcast_object};
use fulgurite_launch::{FailureWatch, JobFailure, generation};

/// What a generation goes on with. Equal on all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Recovered {
    pub(crate) run: RunSoFar,
    /// A checkpoint in the host's memory; `None` to go on from the run's last checkpoint, or from
    /// where the run began.
    pub(crate) state: Option<PathBuf>,
    /// Where the state was, for messages.
    pub(crate) from: String,
    /// Steps done in earlier generations, on any rank.
    pub(crate) steps_done: u64,
    /// The report of the last of these steps, as far as known.
    pub(crate) last_step: Option<Event>,
}

/// Begins the names of states that are written for one generation.
const WRITTEN: &str = "generation-";

/// Returns whether a state was written for one generation, and is not one of the copies.
pub(crate) fn is_written_for(state: &Path) -> bool {
    state.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(WRITTEN))
}

/// Leaves the present generation if the next one has begun. No collective fails when a node is taken
/// in: a rank hears of it here, and the others at the latest when they miss this one.
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

/// Loses these ranks, as if the kernel had killed them: the others notice, and a new process takes the
/// place of each. All ranks name the same. Collective.
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

/// Agrees on the state that a generation begins with, and writes it to the host's memory. `None` if
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
    let places = Places::of(&run.run_dir);
    let copied = broadcast_object(&**world, &newest_copy(&places), 0)?;
    let copy = offers.iter().filter_map(|offer| offer.copy.clone()).max().max(copied);
    let writers = writers(&offers).filter(|writers| {
        copy.as_ref().is_none_or(|copy| offers[writers[0]].held_step() >= Some(copy.step))
    });
    let of_copies = format!("the copies in {}", places.name());
    let (state, from) = match writers {
        Some(writers) => {
            let from = format!("the memory of {}", ranks(&writers));
            match write(world, kept, &places, &offers, &writers)? {
                Some(path) => (Some(path), from),
                None => (copy.map(|copy| copy.path), of_copies),
            }
        }
        None => (copy.map(|Copy { path, .. }| path), of_copies),
    };
    let state = on_all_hosts(world, state)?;
    let from = if state.is_some() { from } else { "the last checkpoint".to_owned() };
    let last_step = offers.into_iter().filter_map(|offer| offer.last_step);
    let last_step = last_step.max_by_key(number);
    kept.set_run(&run, last_step.as_ref());
    kept.end_session();
    Ok(Some(Recovered { run, state, from, steps_done, last_step }))
}

/// Returns a state if all ranks see it: hosts may not share the run's directory.
fn on_all_hosts(world: &Arc<dyn ProcessGroup>, state: Option<PathBuf>) -> Result<Option<PathBuf>> {
    let Some(state) = state else { return Ok(None) };
    let sees = all_gather_object(&**world, &state.is_dir())?;
    let Some(blind) = sees.iter().position(|sees| !sees) else { return Ok(Some(state)) };
    if world.rank() == 0 {
        tracing::warn!(
            "rank {blind} does not see {}, where the state is that the ranks could go on from. Give the hosts a \
             directory that they share, as trainer.default_root_dir",
            state.display()
        );
    }
    Ok(None)
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

/// Writes the state that `writers` hold. `None` if the host has no room. Collective.
fn write(
    world: &Arc<dyn ProcessGroup>,
    kept: &mut Kept,
    places: &Places<'_>,
    offers: &[Offer],
    writers: &[usize],
) -> Result<Option<PathBuf>> {
    let name = format!("{WRITTEN}{}", generation());
    let held = |rank: &usize| offers[*rank].held.as_ref();
    let bytes: u64 = writers.iter().filter_map(held).map(|held| held.bytes).sum();
    let place = match world.rank() {
        0 => places.with_room_for(bytes),
        _ => None,
    };
    let place = broadcast_object(&**world, &place, 0)?;
    let Some(place) = place else {
        if world.rank() == 0 {
            tracing::warn!(
                "the host has no memory or disk for the {bytes} bytes of the training's state, which the ranks \
                 that are left could go on from"
            );
        }
        return Ok(None);
    };
    let others = (0..world.size()).filter(|rank| !writers.contains(rank)).collect::<Vec<_>>();
    let mut groups = vec![writers.to_vec()];
    if !others.is_empty() {
        groups.push(others);
    }
    let group = world.split(&groups, "recovery")?;
    if writers.contains(&world.rank()) {
        let io = open(&place)?;
        kept.request(&name, epoch_states(offers))?.run(&*io, &*group)?;
        io.teardown()?;
    }
    // All wait here until the state is committed.
    world.barrier()?.wait()?;
    let path = place.join(&name);
    let step = held(&writers[0]).map_or(0, |held| held.step);
    kept.set_copy(Copy { step, path: path.clone() });
    Ok(Some(path))
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

/// Opens a directory of this host for checkpoints.
pub(super) fn open(place: &Path) -> Result<Arc<dyn CheckpointIO>> {
    PluginValue::new("local")
        .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
        .build(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(step: Option<u64>, place: &[usize], replica_size: usize) -> Offer {
        let held = |step| Held { step, place: place.to_vec(), replica_size, bytes: 8, epoch: None };
        let (run, copy, last_step) = (None, None, None);
        Offer { run, held: step.map(held), copy, last_step, steps_done: 0 }
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
