//! Parameters excluded from data parallelism.

use std::sync::Arc;

use fulgurite_engine::collective::{ProcessGroup, Solo};
use fulgurite_engine::mesh::{DP_CP, DP_SHARD_CP, DeviceMesh};
use fulgurite_engine::module::{ModuleTree, PATTERN_HELP, any_pattern_matches, idle_pattern};
use fulgurite_engine::parameter::{Parameter, ParameterSlot};
use fulgurite_engine::shard::{Cut, Placement, ShardSpec};
use fulgurite_engine::strategy::materialize;
use fulgurite_error::{Error, Result};

use super::experts::expert_parts;
use super::gradients::PartialGrads;
use super::reduction::GradientReduction;
use super::replicated::Reducer;
use super::{MeshStrategy, Settings};
use crate::schedule::ddp::Event;

/// For each parameter, whether a pattern of the settings' `ignored` matches it or a module around
/// it.
///
/// # Errors
/// If a pattern matches nothing.
pub(super) fn chosen(settings: &Settings, tree: &ModuleTree) -> Result<Vec<bool>> {
    let fqns = tree.parameters().iter().map(|parameter| parameter.fqn());
    if let Some(pattern) = idle_pattern(&settings.ignored, fqns.clone()) {
        return Err(Error::other(format!(
            "`trainer.strategy.ignored`: no parameter matches `{pattern}`. {PATTERN_HELP}"
        )));
    }
    let chosen: Vec<bool> = fqns.map(|fqn| any_pattern_matches(&settings.ignored, fqn)).collect();
    let mut both = tree.parameters().iter().zip(&chosen);
    match both.find(|(parameter, ignored)| **ignored && expert_parts(parameter) > 1) {
        None => Ok(chosen),
        Some((parameter, _)) => Err(Error::parameter(
            parameter.fqn(),
            "has experts, which `trainer.strategy.expert_parallel_size` divides among ranks, and \
             `trainer.strategy.ignored` wants every rank to hold it whole; leave one of them out",
        )),
    }
}

/// Parameters that every rank holds whole (after tensor-parallel cuts) and whose gradients stay on
/// their rank, like FSDP2's `ignored_params` and DDP's `_ddp_params_and_buffers_to_ignore`.
pub(super) struct Ignored {
    slots: Vec<ParameterSlot>,
    /// Reduces over this rank alone.
    reducer: Arc<Reducer>,
    bucket_bytes: [usize; 2],
}

impl Ignored {
    /// Gives this rank the parameters of `slots` with their initial values.
    pub(super) fn new(
        slots: Vec<ParameterSlot>,
        mesh: &DeviceMesh,
        seed: u64,
        partial_grads: PartialGrads,
        bucket_bytes: [usize; 2],
    ) -> Result<Self> {
        for slot in &slots {
            slot.set_spec(Self::spec(slot, mesh)?);
        }
        materialize::replicate(&slots, seed)?;
        let alone = Arc::new(Solo::new("ignored", mesh.rank()));
        let trained: Vec<_> = slots.iter().filter(|slot| slot.requires_grad()).cloned().collect();
        let whole = GradientReduction::default();
        let reducer = Arc::new(Reducer::new(alone, whole, partial_grads, &trained, bucket_bytes)?);
        trained.iter().for_each(|slot| slot.set_reducer(reducer.clone()));
        Ok(Self { slots, reducer, bucket_bytes })
    }

    /// The cuts of an ignored parameter.
    pub(super) fn spec(parameter: &Parameter, mesh: &DeviceMesh) -> Result<ShardSpec> {
        let spec = MeshStrategy::outer_spec(parameter, mesh)?;
        Ok(match mesh.size(DP_SHARD_CP)? {
            1 => spec,
            ranks => spec.with_cut(Cut::new(DP_SHARD_CP, ranks, Placement::Replicate)),
        })
    }

    pub(super) fn begin_backward(&self) -> Result<()> {
        self.reducer.begin_backward(true, self.bucket_bytes)
    }

    pub(super) fn finish_backward(&self) -> Result<()> {
        self.reducer.on(Event::FinishBackward)
    }

    pub(super) fn finish_step(&self) -> Result<()> {
        self.reducer.finish_step()
    }

    pub(super) fn abandon_step(&self) -> Result<()> {
        self.reducer.abandon_step()
    }

    pub(super) fn prepare_forward(&self) -> Result<()> {
        materialize::refresh_compute(&self.slots)
    }

    /// Checks that trained parameters have the same values on all data-parallel ranks. Collective.
    pub(super) fn verify_same_values(&self, mesh: &DeviceMesh) -> Result<()> {
        let group: &Arc<dyn ProcessGroup> = mesh.group(DP_CP)?;
        let trained = self.slots.iter().filter(|slot| slot.requires_grad());
        let trained: Vec<_> = trained.map(|slot| slot.parameter().clone()).collect();
        if trained.is_empty() {
            return Ok(());
        }
        materialize::verify_same_values(&trained, &**group).map_err(|error| match error {
            Error::Parameter { fqn, message } => Error::Parameter {
                fqn,
                message: format!(
                    "{message}, so a checkpoint cannot have it: `trainer.strategy.ignored` names it, and its \
                     gradients were not summed over the ranks. Sum them in the program, freeze it, or do not \
                     ignore it"
                ),
            },
            error => error,
        })
    }
}
