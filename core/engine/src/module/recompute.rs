//! Units whose activations are computed again in backward.

use std::sync::Arc;

use candle_core::{Tensor, Var};

use super::ForwardScope;
use super::activation_offload::Kept;
use super::stand_in;
use super::unit::{UnitHandle, UnitHooks};
use crate::autograd::{GradMode, function};
use crate::parallel::activations::{self, Activation};
use crate::parameter::Uses;
use crate::{Error, Result};

/// Calls a unit without a graph, and enters its output into the graph with a backward that computes
/// it again, this time with a graph of its own.
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
    let held = activations::of(x, unit.path())?;
    activations::pass_on(&held, &saved);
    let (y, uses) = {
        let _deferred = GradMode::Deferred.enter();
        Uses::collect(|| {
            unit.note_handed_out();
            let y = compute(&saved)?;
            let activation = activations::of(&y, unit.path())?;
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
    let stand_in = offload.and_then(|_| stand_in::of(x));
    // The token stands for the parameters. It goes in even where the input is in the graph: candle
    // takes a cast from an integer for tracked, and does not follow it.
    let token = uses.any().then(|| unit.token(x.device())).transpose()?;
    let in_graph = stand_in.as_deref().unwrap_or(x);
    let inputs: Vec<&Tensor> = tracked.then_some(in_graph).into_iter().chain(&token).collect();
    if inputs.is_empty() {
        activations::pass_on(&activation, &y);
        return Ok(y);
    }
    let input = match offload {
        // Otherwise the graph holds its memory, and a copy elsewhere frees none.
        Some(to) if stand_in.is_some() || !tracked => Kept::away(saved, to)?,
        _ => Kept::InPlace(saved),
    };
    uses.begin_taps();
    let with_token = token.is_some();
    let scope = ForwardScope::current();
    let again = Again { unit: unit.clone(), input, activation: held, tracked, scope, uses };
    let y = function(&inputs, y, move |y, grad| {
        if let Some(hooks) = &hooks {
            hooks.pre_backward(&again.unit)?;
        }
        let grad_x = again.backward(y, grad, &compute).map_err(|error| again.explain(error))?;
        again.uses.end_taps()?;
        Ok(tracked.then_some(grad_x).into_iter().chain(with_token.then_some(None)).collect())
    })?;
    let y = if offload.is_some() { stand_in::leave(y)? } else { y };
    activations::pass_on(&activation, &y);
    Ok(y)
}

/// What the backward of a call needs.
struct Again {
    unit: UnitHandle,
    /// The input, detached: in its place it shares the memory of what the graph holds anyway.
    input: Kept,
    /// How tensor-parallel ranks hold the input.
    activation: Option<Arc<Activation>>,
    /// Whether a gradient flows to the input.
    tracked: bool,
    /// The surroundings of the forward: masks of dropout follow from them.
    scope: ForwardScope,
    uses: Uses,
}

impl Again {
    /// Computes the unit again and runs its backward. The gradient of the input, if one flows.
    fn backward(
        &self,
        y: &Tensor,
        grad: &Tensor,
        compute: &impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let _recomputing = GradMode::recomputing().enter();
        let _scope = self.scope.clone().resume();
        let input = match self.tracked {
            true => Var::from_tensor(&self.input.get()?)?.into_inner(),
            false => self.input.get()?,
        };
        activations::pass_on(&self.activation, &input);
        let grad_x = self.uses.during(|| -> Result<Option<Tensor>> {
            let again = compute(&input)?;
            if (again.shape(), again.dtype()) != (y.shape(), y.dtype()) {
                return Err(Error::other(format!(
                    "gave {:?} in {:?} when it was computed again for backward, and {:?} in {:?} in \
                     its forward; what it computes must depend on its input and on what its closure \
                     captured alone",
                    again.dims(),
                    again.dtype(),
                    y.dims(),
                    y.dtype()
                )));
            }
            // Plain operations with parameters had no graph in the forward.
            activations::of(&again, self.unit.path())?;
            if !again.track_op() {
                return Ok(None);
            }
            let (seed, grad) = (Tensor::zeros((), y.dtype(), y.device())?, grad.clone());
            let seed = function(&[&again], seed, move |_, _| Ok(vec![Some(grad.clone())]))?;
            drop(again);
            Ok(seed.backward()?.remove(&input))
        })?;
        match (self.tracked, grad_x) {
            (true, None) => Ok(Some(input.zeros_like()?)),
            (_, grad_x) => Ok(grad_x),
        }
    }

    /// Says which unit an error is from, where it does not say what of.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::Candle(_) | Error::Other(_) => {
                Error::Module { path: self.unit.path().to_owned(), message: error.to_string() }
            }
            error => error,
        }
    }
}
