//! Cuts the parameters of a plan's layers and configures the layers.

use super::{PlanApplication, Shardings};
use crate::parallel::{
    ALL, LayerEdges, LayerParallel, LayerSharding, ParameterSharding, PlanRecord,
};
use crate::parameter::{LayerCut, Parameter};
use crate::{Error, Result};
use fulgurite_collective::shard::{Cut, Placement, ShardSpec, chunk};

impl PlanApplication<'_> {
    /// Applies a checked plan.
    pub(super) fn cut_layers(&self, shardings: &Shardings) -> Result<()> {
        for path in self.styles.keys() {
            if !self.tree.modules().contains_key(path) {
                self.shard_parameter(
                    path,
                    ALL,
                    ParameterSharding::Replicated { partial_grad: true },
                )?;
            }
        }
        let plan = PlanRecord::new(&self.group, self.tree.trainable(), &self.sequence);
        for (path, sharding) in shardings {
            self.shard_parameters(path, sharding)?;
            let edges = LayerEdges::new(path, self.styles.get(path), sharding)?;
            self.tell(path, LayerParallel::new(plan.clone(), path, edges, sharding)?);
            for (name, part) in &sharding.parts {
                let path = format!("{path}.{name}");
                self.shard_parameters(&path, part)?;
                self.tell(&path, LayerParallel::of_part(plan.clone(), &path, part));
            }
        }
        // Layers outside of the plan take whole activations. A sharded activation is an error.
        for (path, info) in self.tree.modules() {
            if info.layer.parallel().is_none() {
                info.layer.set_parallel(LayerParallel::not_in_plan(plan.clone(), path));
            }
        }
        Ok(())
    }

    fn tell(&self, path: &str, parallel: LayerParallel) {
        if let Some(info) = self.tree.modules().get(path) {
            info.layer.set_parallel(parallel);
        }
    }

    fn shard_parameters(&self, path: &str, sharding: &LayerSharding) -> Result<()> {
        sharding
            .parameters
            .iter()
            .try_for_each(|(name, sharding)| self.shard_parameter(path, name, *sharding))
    }

    fn shard_parameter(&self, path: &str, name: &str, sharding: ParameterSharding) -> Result<()> {
        let shard = |parameter: &Parameter| match sharding {
            ParameterSharding::Cut { dim, replicas } => self.cut(path, parameter, dim, replicas),
            ParameterSharding::Replicated { partial_grad } => {
                self.replicate(parameter, partial_grad)
            }
        };
        match name {
            ALL => self.parameters_of(path).try_for_each(shard),
            name => self.parameter(path, name).map_or(Ok(()), shard),
        }
    }

    /// Cuts a parameter along `dim`, with each part on `replicas` neighbouring ranks. They compute
    /// different things with it, so its gradient is partial.
    fn cut(&self, path: &str, parameter: &Parameter, dim: usize, replicas: usize) -> Result<()> {
        let parts = self.group.size() / replicas;
        let n = parameter.global_shape().get(dim).copied().unwrap_or(0);
        let of_blocks = parameter.packed().filter(|packed| packed.format.columns_a_code() > 1);
        if let Some(packed) = of_blocks
            && dim + 1 == packed.shape.len()
            && !n.is_multiple_of(parts)
        {
            return Err(Error::parameter(
                parameter.fqn(),
                format!(
                    "has {} inputs in {}: the {parts} ranks of `{}` would cut within its {n} blocks; choose \
                     another tensor_parallel_size, a smaller `trainer.quantization.block_size`, or leave \
                     `{path}` out of the quantised layers with `trainer.quantization.exclude`",
                    packed.shape[dim],
                    packed.format.name(),
                    self.dim
                ),
            ));
        }
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

    /// Records that all ranks hold the same values of a parameter.
    fn replicate(&self, parameter: &Parameter, partial_grad: bool) -> Result<()> {
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
