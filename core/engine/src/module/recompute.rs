//! The call of a unit whose activations are checkpointed: they are dropped after forward and computed
//! again in backward.

use std::sync::Arc;

use candle_core::{Tensor, Var};

use super::activation_offload::SavedActivation;
use super::graph_alias;
use super::unit::{UnitHandle, UnitHooks};
use crate::autograd::{GradMode, function};
use crate::execution::ExecutionContext;
use crate::parallel::activations::{self, Activation};
use crate::parameter::Uses;
use crate::{Error, Result};

/// Calls a unit without recording a graph, and enters its output into the caller's graph with a backward
/// that computes the unit again, with a graph of its own, and runs that graph's backward.
pub(super) fn call(
    unit: &UnitHandle,
    hooks: Option<Arc<dyn UnitHooks>>,
    x: &Tensor,
    compute: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    if let Some(hooks) = &hooks {
        hooks.pre_forward(unit)?;
    }
    let saved = x.detach();
    let held = activations::lookup(x, unit.path())?;
    activations::propagate(&held, &saved);
    let (y, uses) = {
        let _deferred = GradMode::Deferred.enter();
        Uses::collect(|| {
            unit.note_exposed();
            let y = compute(&saved)?;
            let activation = activations::lookup(&y, unit.path())?;
            // A copy, because the output may share memory with the input or a parameter.
            Ok::<_, Error>((y.detach().force_contiguous()?, activation))
        })
    };
    let (y, activation) = y?;
    if let Some(hooks) = &hooks {
        hooks.post_forward(unit)?;
    }
    let tracked = x.track_op();
    let offload = unit.activation_offload();
    let alias = offload.and_then(|_| graph_alias::lookup(x));
    // The token stands for the parameters. It goes in even if the input is tracked: candle tracks a cast
    // from an integer, but its backward does not follow it.
    let token = uses.any().then(|| unit.token(x.device())).transpose()?;
    let in_graph = alias.as_deref().unwrap_or(x);
    let inputs: Vec<&Tensor> = tracked.then_some(in_graph).into_iter().chain(&token).collect();
    if inputs.is_empty() {
        activations::propagate(&activation, &y);
        return Ok(y);
    }
    let input = match offload {
        // If the graph holds the input itself, a copy elsewhere frees no memory.
        Some(to) if alias.is_some() || !tracked => SavedActivation::offload(saved, to)?,
        _ => SavedActivation::InPlace(saved),
    };
    uses.begin_tensor_uses();
    let with_token = token.is_some();
    let context = ExecutionContext::current();
    let state =
        RecomputeState { unit: unit.clone(), input, activation: held, tracked, context, uses };
    let y = function(&inputs, y, move |y, grad| {
        if let Some(hooks) = &hooks {
            hooks.pre_backward(&state.unit)?;
        }
        let grad_x = state
            .backward(y, grad, &compute)
            .map_err(|error| error.in_module(state.unit.path()))?;
        state.uses.end_tensor_uses()?;
        Ok(tracked.then_some(grad_x).into_iter().chain(with_token.then_some(None)).collect())
    })?;
    let y = if offload.is_some() { graph_alias::detach_storage(y)? } else { y };
    activations::propagate(&activation, &y);
    Ok(y)
}

/// The state that the backward of a call needs.
struct RecomputeState {
    unit: UnitHandle,
    /// The input, detached. If it was not offloaded it shares the memory of the tensor in the graph.
    input: SavedActivation,
    /// How tensor-parallel ranks hold the input.
    activation: Option<Arc<Activation>>,
    /// Whether a gradient flows to the input.
    tracked: bool,
    /// The forward's context, on whose scope dropout masks depend.
    context: ExecutionContext,
    /// The uses that the forward counted.
    uses: Uses,
}

impl RecomputeState {
    /// Computes the unit again and runs its backward. Returns the input's gradient, if one flows.
    fn backward(
        &self,
        y: &Tensor,
        grad: &Tensor,
        compute: &impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let _context = self.context.enter();
        let _recomputing = GradMode::recomputing().enter();
        let input = match self.tracked {
            true => Var::from_tensor(&self.input.get()?)?.into_inner(),
            false => self.input.get()?,
        };
        activations::propagate(&self.activation, &input);
        let grad_x = self.uses.during(|| -> Result<Option<Tensor>> {
            let recomputed = compute(&input)?;
            if (recomputed.shape(), recomputed.dtype()) != (y.shape(), y.dtype()) {
                return Err(Error::other(format!(
                    "gave {:?} in {:?} when it was computed again for backward, and {:?} in {:?} in \
                     its forward; what it computes must depend on its input and on what its closure \
                     captured alone",
                    recomputed.dims(),
                    recomputed.dtype(),
                    y.dims(),
                    y.dtype()
                )));
            }
            // Checks candle's operations with parameters, which had no graph in the forward.
            activations::lookup(&recomputed, self.unit.path())?;
            if !recomputed.track_op() {
                return Ok(None);
            }
            let (seed, grad) = (Tensor::zeros((), y.dtype(), y.device())?, grad.clone());
            let seed = function(&[&recomputed], seed, move |_, _| Ok(vec![Some(grad.clone())]))?;
            drop(recomputed);
            Ok(seed.backward()?.remove(&input))
        })?;
        match (self.tracked, grad_x) {
            (true, None) => Ok(Some(input.zeros_like()?)),
            (_, grad_x) => Ok(grad_x),
        }
    }
}
