//! Partial gradients of replicated and sharded parameters, and the error of a late gradient.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::shard::Placement;
use fulgurite_error::{Error, Result};

/// The error of a gradient that arrives after its parameter's reduction has begun: a loss joined
/// forwards whose uses of `parameter` were not counted together.
pub(super) fn gradient_after_reduction(parameter: &Parameter) -> Error {
    Error::parameter(
        parameter.fqn(),
        "got a gradient after its sum over the ranks was begun: this loss joins the graph of a forward \
         from before the last backward with that of a newer one. Call backward for each of them, or \
         run these forwards before the step's first backward",
    )
}

/// The parameters with partial gradients on tensor-parallel ranks. The ranks hold the same values
/// but use them on different parts of an activation (norms on parts of the sequence, shared key
/// heads).
#[derive(Clone, Default)]
pub(super) struct PartialGrads {
    sets: Vec<Set>,
}

#[derive(Clone)]
struct Set {
    group: Arc<dyn ProcessGroup>,
    /// Number of neighbouring ranks in the group.
    size: usize,
    parameters: Vec<Parameter>,
}

impl PartialGrads {
    /// Finds the parameters in a tree to which a plan was applied. Collective over the
    /// tensor-parallel group.
    pub(super) fn new(tree: &ModuleTree, mesh: &DeviceMesh) -> Result<Self> {
        let mut sets: Vec<Set> = Vec::new();
        let whole = mesh.group(TENSOR_PARALLEL)?;
        for parameter in tree.trainable().filter(|p| p.has_partial_grad()) {
            let spec = parameter.spec();
            let replicas = spec.cuts.iter().find(|cut| {
                cut.mesh_dim == TENSOR_PARALLEL && cut.placement == Placement::Replicate
            });
            let Some(size) = replicas.map(|cut| cut.size) else { continue };
            if let Some(set) = sets.iter_mut().find(|set| set.size == size) {
                set.parameters.push(parameter.clone());
                continue;
            }
            let group = if size == whole.size() {
                whole.clone()
            } else {
                let ranks: Vec<usize> = (0..whole.size()).collect();
                let partition: Vec<Vec<usize>> = ranks.chunks(size).map(<[_]>::to_vec).collect();
                whole.split(&partition, "tensor_parallel_replicas")?
            };
            sets.push(Set { group, size, parameters: vec![parameter.clone()] });
        }
        Ok(Self { sets })
    }

    /// This rank's index among the ranks whose partial gradients add up to the parameter's
    /// gradient; 0 if the gradient is not partial.
    pub(super) fn rank_of(&self, parameter: &Parameter) -> usize {
        let set = self.sets.iter().find(|set| set.parameters.contains(parameter));
        set.map_or(0, |set| set.group.rank())
    }

    /// Whether the parameter's gradient is partial.
    pub(super) fn has(&self, parameter: &Parameter) -> bool {
        self.sets.iter().any(|set| set.parameters.contains(parameter))
    }

    /// Sums the partial gradients returned by `grad` in place, with one collective per dtype and
    /// group. `grad` must return gradients of the same parameters on every rank. Collective.
    pub(super) fn sum(&self, grad: impl Fn(&Parameter) -> Option<Tensor>) -> Result<()> {
        for set in &self.sets {
            let grads: Vec<Tensor> = set.parameters.iter().filter_map(&grad).collect();
            let mut dtypes: Vec<DType> = Vec::new();
            for grad in &grads {
                if !dtypes.contains(&grad.dtype()) {
                    dtypes.push(grad.dtype());
                }
            }
            for dtype in dtypes {
                let same: Vec<&Tensor> = grads.iter().filter(|g| g.dtype() == dtype).collect();
                if same.iter().all(|grad| grad.elem_count() == 0) {
                    continue;
                }
                if let [grad] = same[..] {
                    set.group.run(Collective::all_reduce(grad, ReduceOp::Sum))?;
                    continue;
                }
                let flat = Tensor::cat(&same, 0)?;
                set.group.run(Collective::all_reduce(&flat, ReduceOp::Sum))?;
                let mut start = 0;
                for grad in same {
                    let n = grad.elem_count();
                    if n > 0 {
                        storage::copy_from(grad, &flat.narrow(0, start, n)?)?;
                    }
                    start += n;
                }
            }
        }
        Ok(())
    }
}
