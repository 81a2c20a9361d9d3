//! The ranks that hold each parameter.

use std::sync::Arc;

use fulgurite_engine::collective::ProcessGroup;
use fulgurite_engine::mesh::{DeviceMesh, PIPELINE_PARALLEL};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::module::stage::Stage;
use fulgurite_engine::parameter::ParameterSlot;
use fulgurite_engine::shard::{Cut, Placement};
use fulgurite_error::{Error, Result};

use super::{PipelineSettings, balance};

/// The stages of a model, and what this rank holds of it.
pub(in crate::mesh_strategy) struct Assignment {
    /// All stages, in order.
    pub(super) stages: Vec<Stage>,
    /// The pipeline's rank of each stage.
    pub(super) rank_of_stage: Vec<usize>,
    /// The parameters of each stage, empty for stages of other ranks.
    pub(super) slots: Vec<Vec<ParameterSlot>>,
    /// The parameters that several stages of this rank share.
    pub(super) shared: Vec<ParameterSlot>,
    /// The parameters that the ranks of the first and the last stage both hold.
    pub(super) tied: Vec<ParameterSlot>,
}

impl Assignment {
    /// Cuts the model into stages, and gives the parameters of other ranks away. Called before
    /// values exist. Not collective.
    ///
    /// # Errors
    /// If the model has not declared its units, or cannot be cut into so many stages.
    pub(in crate::mesh_strategy) fn new(
        settings: &PipelineSettings,
        tree: &mut ModuleTree,
        mesh: &DeviceMesh,
    ) -> Result<Self> {
        if let Some(because) = tree.no_stages() {
            return Err(Error::Config(format!(
                "`trainer.strategy.pipeline_parallel_size`: no pipeline can cut this model: {because}"
            )));
        }
        let Some(declared) = tree.stages().cloned() else {
            return Err(Error::Config(
                "`trainer.strategy.pipeline_parallel_size`: this model does not say between which units it can be \
                 cut; its `configure_model` calls `ModuleBuilder::stages`, and it computes them with \
                 `module::stage::through`"
                    .to_owned(),
            ));
        };
        if let Some(buffer) = tree.persistent_buffers().find(|buffer| buffer.is_set_in_forward()) {
            return Err(Error::Config(format!(
                "`trainer.strategy.pipeline_parallel_size`: forwards may set the buffer `{}`, which checkpoints save, \
                 and stages do not exchange buffers. A buffer that is constant, or set after steps alone, is declared \
                 with `BufferOptions::not_set_in_forward`",
                buffer.fqn()
            )));
        }
        let rank_of_stage = settings.source.rank_of_stages(settings.ranks)?;
        let work = balance::work(tree, declared.units().len());
        let split = settings.split(rank_of_stage.len(), &work)?;
        let of = declared.units().len();
        let own = mesh.coordinate(PIPELINE_PARALLEL);
        let stage_of = |part: usize| match part {
            0 => 0,
            part if part > of => split.len() - 1,
            part => split.iter().position(|units| units.contains(&(part - 1))).unwrap_or(0),
        };
        let mut slots = vec![Vec::new(); split.len()];
        let (mut shared, mut tied) = (Vec::new(), Vec::new());
        for (index, slot) in tree.slots().into_iter().enumerate() {
            let mut stages: Vec<usize> = tree.parts_of(index).into_iter().map(stage_of).collect();
            stages.dedup();
            let mut ranks: Vec<usize> = stages.iter().map(|stage| rank_of_stage[*stage]).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let (first, last) = match ranks[..] {
                [rank] => (rank, rank),
                [first, last] => (first, last),
                _ => {
                    return Err(Error::parameter(
                        slot.fqn(),
                        format!(
                            "is tied across {} ranks of the pipeline, which at most two can share",
                            ranks.len()
                        ),
                    ));
                }
            };
            let mut ends = [rank_of_stage[0], rank_of_stage[split.len() - 1]];
            ends.sort_unstable();
            if first != last && [first, last] != ends {
                return Err(Error::parameter(
                    slot.fqn(),
                    "is tied between stages that are not the first and the last, whose ranks alone can share weights; \
                     use fewer stages",
                ));
            }
            if slot.global_shape().is_empty() {
                let message = "is a scalar, which no stage of a pipeline can hold alone; give it the shape [1]";
                return Err(Error::parameter(slot.fqn(), message));
            }
            let cut = Cut::new(PIPELINE_PARALLEL, settings.ranks, Placement::Stages(first, last));
            let spec = slot.spec().with_cut(cut);
            if own != first && own != last {
                let region = spec.region(|dim| mesh.coordinate(dim));
                slot.set_elsewhere(spec, region)?;
                continue;
            }
            slot.set_spec(spec);
            if first != last {
                tied.push(slot.clone());
            }
            let mut of_rank = stages.iter().filter(|stage| rank_of_stage[**stage] == own);
            match (of_rank.next(), of_rank.next()) {
                (Some(stage), None) => slots[*stage].push(slot),
                _ => shared.push(slot),
            }
        }
        let stages = split.into_iter().map(|units| Stage { units, of }).collect();
        Ok(Self { stages, rank_of_stage, slots, shared, tied })
    }

    /// The ranks of the first and of the last stage as a group, if tied parameters need one.
    /// Collective over the pipeline.
    ///
    /// # Errors
    /// If a peer fails.
    pub(super) fn tied_group(
        &self,
        pipeline: &Arc<dyn ProcessGroup>,
    ) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let ends = [self.rank_of_stage[0], self.rank_of_stage[self.rank_of_stage.len() - 1]];
        if ends[0] == ends[1] {
            return Ok(None);
        }
        pair(pipeline, ends, "tied").map(Some)
    }
}

/// A group of two ranks of the pipeline; of one rank on the others. Collective over the pipeline.
pub(super) fn pair(
    pipeline: &Arc<dyn ProcessGroup>,
    [a, b]: [usize; 2],
    name: &str,
) -> Result<Arc<dyn ProcessGroup>> {
    let alone = (0..pipeline.size()).filter(|rank| *rank != a && *rank != b);
    let partition: Vec<Vec<usize>> =
        std::iter::once(vec![a, b]).chain(alone.map(|rank| vec![rank])).collect();
    pipeline.split(&partition, name)
}
