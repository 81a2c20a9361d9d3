//! Copies of shards in the host's memory, from which a generation goes on.

use std::path::PathBuf;
use std::sync::Arc;

use super::agreement::open;
use super::kept::Copy;
use crate::fabric::OptimizerState;
use crate::trainer::saving::save::whole_state;
use crate::trainer::session::Session;
use crate::{Error, Result};
use fulgurite_checkpoint::{self as checkpoint, AsyncSaver, CheckpointIO};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_launch::job_memory;

/// Copies of a run's shards in the host's memory, made in the background.
pub(crate) struct Copies {
    io: Arc<dyn CheckpointIO>,
    saver: AsyncSaver,
    every_n_steps: u64,
    /// The copy that the next one replaces.
    last: Option<String>,
}

impl Copies {
    /// Prepares copies, if the configuration asks for them. `None` also if replicas have
    /// everything. Collective.
    ///
    /// # Errors
    /// If the host has no room for two copies of the state.
    pub(crate) fn new(session: &mut Session) -> Result<Option<Self>> {
        let config = &session.setup.config.elastic;
        let fabric = &session.setup.fabric;
        if !config.enabled
            || config.replicas == 0
            || !fabric.strategy()?.capabilities.saves_distributed_checkpoints
        {
            return Ok(None);
        }
        let every_n_steps = config.replicate_every_n_steps;
        let optimizers = session.optimizers.as_mut();
        let optimizers = optimizers.map(|optimizers| optimizers as &mut dyn OptimizerState);
        let request =
            fabric.checkpoints().save_request("", optimizers, &(), serde_json::Value::Null)?;
        let tensors = request.model.iter().chain(&request.optimizer);
        let of_tensor = |t: &checkpoint::ShardTensor| {
            (t.values.elem_count() * t.values.dtype().size_in_bytes()) as u64
        };
        let own: u64 = tensors.map(of_tensor).sum();
        let world = fabric.world();
        // Two at a time, while one replaces the other.
        let all = own.saturating_mul(2 * world.size() as u64);
        let place: Option<PathBuf> = broadcast_object(&**world, &job_memory(all), 0)?;
        let Some(place) = place else {
            return Err(Error::Config(format!(
                "`trainer.elastic.replicas`: the host has no room for two copies of the state, {all} bytes; give \
                 /dev/shm or the directory of temporary files more, or set the key to 0"
            )));
        };
        let io = open(&place.join(COPIES))?;
        let mut saver = AsyncSaver::new(io.clone(), &**world)?;
        saver.reserve(&request)?;
        // Of an earlier generation.
        let last = checkpoint::latest(&*io)?.map(|copy| copy.name);
        Ok(Some(Self { io, saver, every_n_steps, last }))
    }

    /// Ends the copies of a generation, and returns the newest that is whole.
    pub(super) fn finish(self) -> Option<Copy> {
        // Waits for the copy under way, which may replace the one before.
        drop(self.saver);
        newest(&*self.io)
    }
}

/// Returns the newest copy of this job that is whole.
pub(super) fn newest_copy() -> Option<Copy> {
    newest(&*open(&job_memory(0)?.join(COPIES)).ok()?)
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
