//! Calls of units with checkpointed activations: forward drops them, and backward computes them
//! again.

use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};

use super::activation_offload::{Offload, SavedActivation};
use super::activations::{Activations, tensors, with_tensors};
use super::graph_alias;
use super::graph_entry::{GraphEntry, backward_of, detached};
use super::unit::{UnitHandle, UnitHooks};
use crate::parallel::activations::{self, Activation, RecordOwner};
use crate::parameter::Uses;
use crate::{Error, Result, counted};
use fulgurite_tensor::autograd::{GradMode, GraphStart, copy};
use fulgurite_tensor::execution::ExecutionContext;

/// Calls a unit without recording a graph, and enters its outputs into the caller's graph. Their
/// backward computes the unit again with its own graph, and runs that graph's backward.
pub(super) fn call<A: Activations + Send + Sync + 'static, B: Activations>(
    unit: &UnitHandle,
    hooks: Option<Arc<dyn UnitHooks>>,
    x: &A,
    compute: impl Fn(&A) -> Result<B> + Send + Sync + 'static,
) -> Result<B> {
    if let Some(hooks) = &hooks {
        hooks.pre_forward(unit)?;
    }
    let given = tensors(x)?;
    let lookup = |x: &Tensor| activations::lookup(x, unit.path());
    let records = given.iter().map(lookup).collect::<Result<Vec<_>>>()?;
    let ((y, outputs), uses) = {
        let _deferred = GradMode::Deferred.enter();
        let (inputs, owner) = (given.iter().zip(&records), RecordOwner::new());
        let inputs = inputs.map(|(x, record)| activations::detach(x, record, &owner));
        let x = with_tensors(x, inputs.collect::<Result<_>>()?)?;
        let (computed, uses) = Uses::collect(|| {
            unit.note_exposed();
            let y = compute(&x)?;
            let outputs = tensors(&y)?.iter().map(|y| detached(unit, y)).collect::<Result<_>>()?;
            Ok::<(_, Vec<_>), Error>((y, outputs))
        });
        (computed?, uses)
    };
    if let Some(hooks) = &hooks {
        hooks.post_forward(unit)?;
    }
    let offload = unit.activation_offload();
    let aliases: Vec<Option<Arc<Tensor>>> =
        given.iter().map(|x| offload.and_then(|_| graph_alias::lookup(x))).collect();
    let tracked: Vec<bool> = given.iter().map(activations::takes_gradient).collect();
    let entry = GraphEntry::new(unit, (&given, &tracked), &aliases, outputs, &uses)?;
    if !entry.has_backward() {
        return with_tensors(&y, entry.without_backward()?);
    }
    let mut inputs = Vec::with_capacity(given.len());
    let mut elsewhere = offload.map(Offload::begin).transpose()?;
    for (((record, x), alias), tracked) in
        records.into_iter().zip(&given).zip(&aliases).zip(tracked)
    {
        let saved = x.detach();
        let saved = match &mut elsewhere {
            // If the graph holds the input itself, offloading a copy frees no memory.
            Some(elsewhere) if alias.is_some() || !tracked => elsewhere.save(saved)?,
            _ => SavedActivation::InPlace(saved),
        };
        let activation = record.map(|record| record.activation);
        inputs.push(SavedInput { saved, activation, tracked });
    }
    let x = match offload {
        None => with_tensors(x, given.iter().map(Tensor::detach).collect())?,
        // The inputs' memory is released, so the input's structure must not hold them.
        Some(_) => {
            let element = Tensor::zeros((), DType::F32, entry.device())?;
            with_tensors(x, vec![element; inputs.len()])?
        }
    };
    let forms = entry.outputs().iter().map(|(y, _)| (y.shape().clone(), y.dtype())).collect();
    let context = ExecutionContext::current();
    let state = RecomputeState { unit: unit.clone(), x, inputs, forms, context };
    let backward = move |uses: &Uses, grads| state.backward(uses, grads, &compute);
    with_tensors(&y, entry.enter(unit, hooks, uses, offload.is_some(), backward)?)
}

/// An input saved for a call's backward.
struct SavedInput {
    /// The detached input. Unless offloaded, it shares the memory of the tensor in the graph.
    saved: SavedActivation,
    /// The input's layout over tensor-parallel ranks.
    activation: Option<Arc<Activation>>,
    /// Whether the input gets a gradient.
    tracked: bool,
}

/// State for the backward of a call.
struct RecomputeState<A> {
    unit: UnitHandle,
    /// The structure of the input. Saved tensors replace its tensors.
    x: A,
    inputs: Vec<SavedInput>,
    /// Shapes and dtypes of the outputs.
    forms: Vec<(Shape, DType)>,
    /// The forward's context. Dropout masks depend on its scope.
    context: ExecutionContext,
}

impl<A: Activations> RecomputeState<A> {
    /// Computes the unit again and runs its backward, given gradients of some outputs by index.
    /// Returns the gradient of each input that gets one. `uses` are the parameter uses counted in
    /// forward.
    fn backward<B: Activations>(
        &self,
        uses: &Uses,
        grads: Vec<(usize, Tensor)>,
        compute: &impl Fn(&A) -> Result<B>,
    ) -> Result<Vec<Option<Tensor>>> {
        let _context = self.context.enter();
        let _recomputing = GradMode::recomputing().enter();
        let owner = RecordOwner::new();
        let mut tracked = Vec::new();
        let mut restore = |input: &SavedInput| -> Result<Tensor> {
            let x = input.saved.get()?;
            match (&input.activation, input.tracked) {
                (None, false) => Ok(x),
                (Some(activation), false) if activation.is_whole() => Ok(x),
                // A copy, because a leaf takes over its memory.
                (Some(activation), false) => {
                    activations::mark(copy(&x)?, activation.clone(), &owner)
                }
                (activation, true) => {
                    let start = GraphStart::new(&x)?;
                    let x = start.tensor().clone();
                    if let Some(activation) = activation {
                        owner.note(&x, activation.clone());
                    }
                    tracked.push(start);
                    Ok(x)
                }
            }
        };
        let inputs = self.inputs.iter().map(&mut restore).collect::<Result<Vec<_>>>()?;
        let x = with_tensors(&self.x, inputs)?;
        let tracked: Vec<&GraphStart> = tracked.iter().collect();
        uses.during(|| {
            let recomputed = tensors(&self.unit.keeping_buffers(|| compute(&x))?)?;
            self.check_forms(&recomputed)?;
            for y in &recomputed {
                // Detects candle operations that use parameters; forward had no graph to check.
                activations::lookup(y, self.unit.path())?;
            }
            backward_of(&self.unit, recomputed, grads, &tracked)
        })
    }

    /// Checks that the recomputed outputs have the same shapes and dtypes as the first.
    fn check_forms(&self, recomputed: &[Tensor]) -> Result<()> {
        const HINT: &str =
            "what it computes must depend on its input and on what its closure captured alone";
        let (got, want) = (recomputed.len(), self.forms.len());
        if got != want {
            return Err(Error::other(format!(
                "gave {} when it was computed again for backward, and {want} in its forward; {HINT}",
                counted(got, "tensor")
            )));
        }
        for (y, (shape, dtype)) in recomputed.iter().zip(&self.forms) {
            if (y.shape(), y.dtype()) != (shape, *dtype) {
                return Err(Error::other(format!(
                    "gave {:?} in {:?} when it was computed again for backward, and {:?} in {dtype:?} in \
                     its forward; {HINT}",
                    y.dims(),
                    y.dtype(),
                    shape.dims(),
                )));
            }
        }
        Ok(())
    }
}
