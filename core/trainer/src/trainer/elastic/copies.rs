//! Copies of shards in the memory of the hosts, from which a generation goes on.

use std::path::PathBuf;

use super::kept::place_in_replica;
use super::states::{copy_name, hosts, open, place_with_room, places, remove_states};
use crate::fabric::OptimizerState;
use crate::trainer::saving::failed::is_of_place;
use crate::trainer::saving::save::{held_state, whole_state};
use crate::trainer::session::{Session, SessionSetup};
use crate::{Error, Result};
use fulgurite_checkpoint::{AsyncSaver, parts_on_host};
use fulgurite_engine::collective::all_gather_object;
use fulgurite_launch::is_first_on_host;

/// Copies of a run's shards in the memory of its hosts, made in the background.
pub(crate) struct Copies {
    saver: AsyncSaver,
    every_n_steps: u64,
    /// On the first rank of a host: where older states may be that the first copy replaces.
    elsewhere: Vec<PathBuf>,
    /// The step of the last copy.
    last: Option<u64>,
    /// The step of the last copy that was made.
    made: Option<u64>,
    /// Whether the last copy was not made.
    has_failed: bool,
}

impl Copies {
    /// Prepares copies, if the configuration asks for them. `None` also if each rank has
    /// everything. Collective.
    ///
    /// # Errors
    /// If a host has no room for two copies of its part, or replicas train apart.
    pub(crate) fn new(session: &mut Session) -> Result<Option<Self>> {
        let SessionSetup { fabric, config, .. } = &session.setup;
        if !config.elastic.enabled || config.elastic.replicas == 0 {
            return Ok(None);
        }
        if !fabric.runtime.update_ranks()?.are_all() {
            return Err(Error::Config(
                "`trainer.elastic.replicas`: this strategy lets replicas train apart, and a copy would \
                 synchronise them after each step; set the key to 0"
                    .to_owned(),
            ));
        }
        let every_n_steps = config.elastic.replicate_every_n_steps;
        let optimizers = session.optimizers.as_mut();
        let optimizers = optimizers.map(|optimizers| optimizers as &mut dyn OptimizerState);
        let request =
            fabric.checkpoints().save_request("", optimizers, &(), serde_json::Value::Null)?;
        let (_, replica_size) = place_in_replica(fabric.device_mesh());
        if replica_size == 1 && held_state(session, "", Vec::new()).is_ok() {
            return Ok(None);
        }
        let world = session.setup.fabric.world();
        let hosts = hosts(world)?;
        let rank = world.rank();
        let bytes = hosts.bytes(&all_gather_object(&**world, &request.bytes())?);
        let place = match hosts.leads(rank) {
            true => place(bytes[hosts.of(rank)])?,
            false => None,
        };
        let places: Vec<Option<PathBuf>> = all_gather_object(&**world, &place)?;
        if let Some(host) = (0..hosts.count()).find(|host| places[hosts.leader(*host)].is_none()) {
            let message = format!(
                "`trainer.elastic.replicas`: the host of rank {} has no room for two copies of the state's part \
                 that it is to keep, {} bytes; give /dev/shm or the directory of temporary files more, or set the \
                 key to 0",
                hosts.leader(host),
                2 * bytes[host]
            );
            if !session.progress.goes_on() {
                return Err(Error::Config(message));
            }
            if rank == 0 {
                tracing::warn!("{message}. The run goes on without copies");
            }
            return Ok(None);
        }
        let Some(place) = &places[hosts.leader(hosts.of(rank))] else { return Ok(None) };
        let mut elsewhere = super::states::places();
        elsewhere.retain(|other| other != place && hosts.leads(rank));
        let background = &*session.setup.background;
        let mut saver = AsyncSaver::on_hosts(open(place)?, background, hosts)?;
        saver.reserve(&request)?;
        Ok(Some(Self {
            saver,
            every_n_steps,
            elsewhere,
            last: None,
            made: None,
            has_failed: false,
        }))
    }

    /// Waits for the copy under way. It may have failed, like the collectives of its generation.
    pub(crate) fn end(mut self) {
        if let Err(error) = self.saver.wait() {
            tracing::info!("a copy of the state was not made: {error}");
        }
    }
}

/// Returns where this host may keep its `bytes` of a copy: two at a time, while one replaces the
/// other.
fn place(bytes: u64) -> Result<Option<PathBuf>> {
    let free = |copies: u64| place_with_room(copies.saturating_mul(bytes));
    for used in places() {
        if !parts_on_host(&*open(&used)?)?.is_empty() && free(1).as_ref() == Some(&used) {
            return Ok(Some(used));
        }
    }
    Ok(free(2))
}

/// Begins a copy of the state after this step, if one is due. Collective.
pub(crate) fn copy_if_due(session: &mut Session) -> Result<()> {
    let step = session.progress.step();
    let due =
        |copies: &Copies| step.is_multiple_of(copies.every_n_steps) && copies.last != Some(step);
    if !session.copies.as_ref().is_some_and(due) {
        return Ok(());
    }
    let request = whole_state(session, &copy_name(step))?;
    let Session { copies: Some(copies), setup, saving, .. } = session else { return Ok(()) };
    copies.last = Some(step);
    let made = match copies.saver.wait() {
        Ok(Some(made)) => {
            (copies.made, copies.has_failed) = (Some(made.step), false);
            true
        }
        Ok(None) => false,
        // The hosts still have the copy before.
        Err(error) if is_of_place(&**setup.fabric.world(), &error)? => {
            let is_first = !std::mem::replace(&mut copies.has_failed, true);
            if is_first && setup.rank() == 0 {
                tracing::warn!(
                    "no copy of the state was made: {error}. Until the next one is made or a checkpoint is saved, a \
                     loss takes all steps since the copy before again"
                );
            }
            false
        }
        Err(error) => return Err(error),
    };
    if copies.has_failed && saving.committed() > copies.made && is_first_on_host() {
        // The checkpoint is newer than what the host has.
        remove_states();
    }
    copies.saver.start(request)?;
    if made {
        // All hosts have a copy in their new place.
        for place in copies.elsewhere.drain(..).filter(|place| place.is_dir()) {
            if let Err(error) = std::fs::remove_dir_all(&place) {
                tracing::warn!("{} stays until the end of the job: {error}", place.display());
            }
        }
    }
    Ok(())
}
