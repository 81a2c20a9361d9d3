//! Copies of shards in the host's memory, from which a generation goes on.

use std::path::PathBuf;

use super::agreement::open;
use super::kept::{Copy, place_in_replica};
use super::places::Places;
use crate::fabric::OptimizerState;
use crate::trainer::saving::save::{held_state, whole_state};
use crate::trainer::session::{Session, SessionSetup};
use crate::{Error, Result};
use fulgurite_checkpoint::{self as checkpoint, AsyncSaver, CheckpointIO};
use fulgurite_engine::collective::broadcast_object;

/// Copies of a run's shards in the host's memory, made in the background.
pub(crate) struct Copies {
    saver: AsyncSaver,
    every_n_steps: u64,
    /// The copy that the next one replaces.
    last: Option<String>,
}

impl Copies {
    /// Prepares copies, if the configuration asks for them. `None` also if each rank has everything.
    /// Collective.
    ///
    /// # Errors
    /// If the host has no room for two copies of the state, or replicas train apart.
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
        let all = request.bytes().saturating_mul(world.size() as u64);
        let places = Places::of(&session.setup.run_dir);
        let place = match world.rank() {
            0 => place(&places, all),
            _ => None,
        };
        let place: Option<PathBuf> = broadcast_object(&**world, &place, 0)?;
        let Some(place) = place else {
            let message = format!(
                "`trainer.elastic.replicas`: the host has no room for two copies of the state, {} bytes; give \
                 /dev/shm or the directory of temporary files more, or set the key to 0",
                2 * all
            );
            if !session.progress.goes_on() {
                return Err(Error::Config(message));
            }
            tracing::warn!("{message}. The run goes on without copies");
            return Ok(None);
        };
        let io = open(&place)?;
        let mut saver = AsyncSaver::new(io.clone(), &**world)?;
        saver.reserve(&request)?;
        // Of an earlier generation.
        let last = checkpoint::latest(&*io)?.map(|copy| copy.name);
        Ok(Some(Self { saver, every_n_steps, last }))
    }
}

impl Copies {
    /// Waits for the copy under way. It may have failed, like the collectives of its generation.
    pub(crate) fn end(mut self) {
        if let Err(error) = self.saver.wait() {
            tracing::info!("a copy of the state was not made: {error}");
        }
    }
}

/// Returns where copies of `bytes` may be: two at a time, while one replaces the other.
fn place(places: &Places<'_>, bytes: u64) -> Option<PathBuf> {
    let free = |copies: u64| places.with_room_for(copies.saturating_mul(bytes));
    let used = newest_copy(places).and_then(|copy| Some(copy.path.parent()?.to_owned()));
    used.filter(|used| free(1).is_some_and(|dir| used.starts_with(dir)))
        .or_else(|| Some(free(2)?.join(COPIES)))
}

/// Returns the newest copy of this job that is whole.
pub(super) fn newest_copy(places: &Places<'_>) -> Option<Copy> {
    let dirs = places.all().into_iter().map(|dir| dir.join(COPIES));
    dirs.filter_map(|dir| newest(&*open(&dir).ok()?)).max()
}

fn newest(io: &dyn CheckpointIO) -> Option<Copy> {
    let found = checkpoint::latest(io).ok().flatten()?;
    Some(Copy { step: found.step, path: found.path })
}

/// The copies' directory in the host's memory.
const COPIES: &str = "copies";

/// Begins a copy of the state after this step, if one is due. Collective.
pub(crate) fn copy_if_due(session: &mut Session) -> Result<()> {
    let step = session.progress.step();
    let due = |copies: &Copies| step.is_multiple_of(copies.every_n_steps);
    if !session.copies.as_ref().is_some_and(due) {
        return Ok(());
    }
    let name = checkpoint::step_name(step);
    let mut request = whole_state(session, &name)?;
    let copies = session.copies.as_mut().expect("it is due");
    request.remove = copies.last.replace(name).into_iter().collect();
    copies.saver.start(request).map(drop)
}
