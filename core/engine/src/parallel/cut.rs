//! Cutting the parameters of a plan's layers, and telling the layers.

use std::sync::Mutex;

use super::apply::Applying;
use super::block::Block;
use super::{LayerParallel, Layout, ParallelStyle, Redistribute};
use crate::module::ModuleInfo;
use crate::parameter::{LayerCut, Parameter};
use crate::shard::{Cut, Placement, ShardSpec, chunk};
use crate::{Error, Result};

impl Applying<'_> {
    /// Carries out a plan that was checked.
    pub(super) fn cut_layers(&self) -> Result<()> {
        for (path, style) in &self.styles {
            let Some(info) = self.tree.modules().get(path) else {
                self.replicate_all(path)?;
                continue;
            };
            let block = path.rsplit_once('.').and_then(|(block, name)| {
                let info = self.tree.modules().get(block)?;
                Block::of(info.kind)?.names().any(|part| part == name).then_some((block, info))
            });
            if let Some((block, block_info)) = block {
                self.apply_projection(path, info, block, block_info, style)?;
            } else if Block::of(info.kind).is_none() {
                self.apply_layer(path, info, style)?;
            }
        }
        for (path, info) in self.tree.modules() {
            if let Some(block) = Block::of(info.kind) {
                self.apply_block(path, info, &block)?;
            }
        }
        Ok(())
    }

    fn layer(&self) -> LayerParallel {
        LayerParallel {
            group: self.group.clone(),
            input: Redistribute::Keep,
            output: Redistribute::Keep,
            layout: Layout::Replicate,
            sums: false,
            output_width: 0,
            loss_parallel: false,
            sequence: self.sequence.clone(),
            last: Mutex::default(),
        }
    }

    /// A projection within a block, which moves activations for it.
    fn apply_projection(
        &self,
        path: &str,
        info: &ModuleInfo,
        block: &str,
        block_info: &ModuleInfo,
        style: &ParallelStyle,
    ) -> Result<()> {
        match style {
            ParallelStyle::Colwise(_) => {
                let replicas = match block_info.heads {
                    Some(heads) if !path.ends_with(".q_proj") => {
                        heads.kv_replicas(path, self.group.size())?
                    }
                    _ => 1,
                };
                for name in ["weight", "bias"] {
                    self.cut(path, name, 0, replicas)?;
                }
            }
            ParallelStyle::Rowwise(rowwise) => {
                // The bias comes behind what the block does to its output.
                let output = match self.styles.get(block) {
                    Some(ParallelStyle::PrepareModuleOutput(prepare)) => prepare.desired,
                    _ => rowwise.output,
                };
                self.cut(path, "weight", 1, 1)?;
                self.replicate(path, "bias", output != Layout::Replicate)?;
                info.layer.set_parallel(LayerParallel { sums: true, ..self.layer() });
            }
            _ => {}
        }
        Ok(())
    }

    /// A block as a whole: it moves activations for its projections.
    fn apply_block(&self, path: &str, info: &ModuleInfo, block: &Block) -> Result<()> {
        let style = |name: &str| self.styles.get(&format!("{path}.{name}"));
        let own = self.styles.get(path);
        let mut layer = match (style(block.inputs[0]), style(block.output)) {
            (Some(ParallelStyle::Colwise(input)), Some(ParallelStyle::Rowwise(output))) => {
                LayerParallel {
                    input: into_parts(input.input),
                    output: from_sums(output.output),
                    ..self.layer()
                }
            }
            _ if own.is_none() => return Ok(()),
            _ => self.layer(),
        };
        let cut = layer.output != Redistribute::Keep;
        match own {
            Some(ParallelStyle::PrepareModuleInput(prepare)) => {
                layer.input = match cut {
                    true => into_parts(prepare.input),
                    false => between(prepare.input, prepare.desired),
                };
            }
            Some(ParallelStyle::PrepareModuleOutput(prepare)) => {
                layer.output = match cut {
                    true => from_sums(prepare.desired),
                    false => between(prepare.output, prepare.desired),
                };
            }
            _ => {}
        }
        info.layer.set_parallel(layer);
        Ok(())
    }

    /// A layer on its own.
    fn apply_layer(&self, path: &str, info: &ModuleInfo, style: &ParallelStyle) -> Result<()> {
        let embedding = info.kind == "Embedding";
        let layer = match style {
            ParallelStyle::Colwise(colwise) => {
                let weight_dim = usize::from(embedding);
                self.cut(path, "weight", weight_dim, 1)?;
                self.cut(path, "bias", 0, 1)?;
                let weight = self.parameter(path, "weight");
                LayerParallel {
                    input: if embedding { Redistribute::Keep } else { into_parts(colwise.input) },
                    output: match colwise.output {
                        Layout::Replicate => Redistribute::Gather(-1),
                        Layout::Shard(_) => Redistribute::Keep,
                    },
                    output_width: weight.map_or(0, |w| w.global_shape()[weight_dim]),
                    loss_parallel: colwise.loss_parallel,
                    ..self.layer()
                }
            }
            ParallelStyle::Rowwise(rowwise) => {
                self.cut(path, "weight", usize::from(!embedding), 1)?;
                self.replicate(path, "bias", rowwise.output != Layout::Replicate)?;
                LayerParallel {
                    input: match rowwise.input {
                        Layout::Replicate if !embedding => Redistribute::Split(-1),
                        _ => Redistribute::Keep,
                    },
                    output: from_sums(rowwise.output),
                    sums: true,
                    ..self.layer()
                }
            }
            ParallelStyle::SequenceParallel(sequence) => {
                self.replicate_all(path)?;
                LayerParallel {
                    input: between(sequence.input, Layout::SEQUENCE),
                    output: between(Layout::SEQUENCE, sequence.output),
                    layout: Layout::SEQUENCE,
                    ..self.layer()
                }
            }
            ParallelStyle::PrepareModuleInput(prepare) => {
                if style.is_partial() {
                    self.replicate_all(path)?;
                }
                let weight = self.parameter(path, "weight");
                LayerParallel {
                    input: between(prepare.input, prepare.desired),
                    layout: prepare.desired,
                    // The input's: nothing moves behind the layer.
                    output_width: weight
                        .and_then(|w| w.global_shape().last())
                        .copied()
                        .unwrap_or(0),
                    ..self.layer()
                }
            }
            ParallelStyle::PrepareModuleOutput(prepare) => {
                if style.is_partial() {
                    self.replicate_all(path)?;
                }
                LayerParallel { output: between(prepare.output, prepare.desired), ..self.layer() }
            }
            ParallelStyle::ReplicatedWithGradAllreduce => return self.replicate_all(path),
        };
        info.layer.set_parallel(layer);
        Ok(())
    }

    /// Cuts a parameter, if the layer has it, along `dim`, with each part on `replicas` neighbouring
    /// ranks. What those compute with it differs, so its gradient is a summand on each.
    fn cut(&self, path: &str, name: &str, dim: usize, replicas: usize) -> Result<()> {
        let Some(parameter) = self.parameter(path, name) else { return Ok(()) };
        let parts = self.group.size() / replicas;
        let n = parameter.global_shape().get(dim).copied().unwrap_or(0);
        if chunk(n, parts, parts - 1).1 == 0 {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "has shape {:?}: dimension {dim} cannot be cut over the {parts} ranks of `{}`, \
                     some would have nothing; choose a smaller tensor_parallel_size, or leave `{path}` \
                     out of the plan",
                    parameter.global_shape(),
                    self.dim
                ),
            ));
        }
        let mut spec = ShardSpec::new(parameter.global_shape().to_vec())
            .with_cut(Cut::new(self.dim, parts, Placement::Shard(dim)).with_stride(replicas));
        if replicas > 1 {
            spec = spec.with_cut(Cut::new(self.dim, replicas, Placement::Replicate));
        }
        self.set(parameter, spec, replicas > 1)
    }

    /// Notes that the ranks hold the same values of a parameter, if the layer has it.
    fn replicate(&self, path: &str, name: &str, partial_grad: bool) -> Result<()> {
        match self.parameter(path, name) {
            Some(parameter) => self.replicate_parameter(parameter, partial_grad),
            None => Ok(()),
        }
    }

    fn replicate_all(&self, path: &str) -> Result<()> {
        self.parameters_of(path).try_for_each(|p| self.replicate_parameter(p, true))
    }

    fn replicate_parameter(&self, parameter: &Parameter, partial_grad: bool) -> Result<()> {
        let spec = ShardSpec::new(parameter.global_shape().to_vec()).with_cut(Cut::new(
            self.dim,
            self.group.size(),
            Placement::Replicate,
        ));
        self.set(parameter, spec, partial_grad)
    }

    fn set(&self, parameter: &Parameter, spec: ShardSpec, partial_grad: bool) -> Result<()> {
        let present = parameter.spec();
        if !present.cuts.is_empty() {
            if present == spec && parameter.has_partial_grad() == partial_grad {
                return Ok(());
            }
            return Err(Error::parameter(
                parameter.fqn(),
                "has been cut another way already, by an earlier plan or by a strategy; apply one \
                 plan, before the strategy sets the model up",
            ));
        }
        let region = spec.region(|_| self.group.rank());
        parameter.cut_layer(spec, LayerCut { region, partial_grad })
    }
}

/// From what comes in to an input of which each rank computes another part of the output.
fn into_parts(layout: Layout) -> Redistribute {
    match layout {
        Layout::Replicate => Redistribute::Copy,
        Layout::Shard(dim) => Redistribute::AllGather(dim),
    }
}

/// From summands to what goes out.
fn from_sums(layout: Layout) -> Redistribute {
    match layout {
        Layout::Replicate => Redistribute::AllReduce,
        Layout::Shard(dim) => Redistribute::ReduceScatter(dim),
    }
}

/// Between two layouts of an activation that all ranks compute with alike.
fn between(from: Layout, to: Layout) -> Redistribute {
    match (from, to) {
        (Layout::Shard(dim), Layout::Replicate) => Redistribute::Gather(dim),
        (Layout::Replicate, Layout::Shard(dim)) => Redistribute::Split(dim),
        _ => Redistribute::Keep,
    }
}
