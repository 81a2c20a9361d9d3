//! Calls of units with checkpointed activations: forward drops them, and backward computes them
//! again.

use std::sync::Arc;

use candle_core::{DType, Shape, Tensor, Var};

use super::activation_offload::{Offload, SavedActivation};
use super::activations::{Activations, tensors, with_tensors};
use super::graph_alias;
use super::unit::{UnitHandle, UnitHooks};
use crate::parallel::activations::{self, Activation};
use crate::parameter::Uses;
use crate::{Error, Result, counted};
use fulgurite_tensor::autograd::{
    GradMode, function, functions, refuse_variables, refuse_wrong_gradients,
};
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
    let detach = |x: &Tensor| {
        let (saved, held) = (x.detach(), activations::lookup(x, unit.path())?);
        activations::propagate(&held, &saved);
        Ok((saved, held))
    };
    let saved = given.iter().map(detach).collect::<Result<Vec<_>>>()?;
    let x = with_tensors(x, saved.iter().map(|(saved, _)| saved.clone()).collect())?;
    let ((y, outputs), uses) = {
        let _deferred = GradMode::Deferred.enter();
        let (computed, uses) = Uses::collect(|| {
            unit.note_exposed();
            let y = compute(&x)?;
            let output = |y: &Tensor| {
                let activation = activations::lookup(y, unit.path())?;
                // A copy, because the output may share memory with the input or a parameter.
                Ok((y.detach().force_contiguous()?, activation))
            };
            let outputs = tensors(&y)?.iter().map(output).collect::<Result<Vec<_>>>()?;
            Ok::<_, Error>((y, outputs))
        });
        (computed?, uses)
    };
    if let Some(hooks) = &hooks {
        hooks.post_forward(unit)?;
    }
    let offload = unit.activation_offload();
    let aliases: Vec<Option<Arc<Tensor>>> =
        given.iter().map(|x| offload.and_then(|_| graph_alias::lookup(x))).collect();
    // The token stands for the parameters. It is needed even if an input is tracked: candle tracks
    // casts from integers, but its backward does not follow them.
    let token = uses.any().then(|| unit.token(unit_device(&given, &outputs))).transpose()?;
    let in_graph = given.iter().zip(&aliases).filter(|(x, _)| x.track_op());
    let in_graph = in_graph.map(|(x, alias)| alias.as_deref().unwrap_or(x));
    let graph_inputs: Vec<&Tensor> = in_graph.chain(&token).collect();
    // Only floating-point outputs have gradients.
    let has_grad: Vec<bool> = outputs.iter().map(|(y, _)| y.dtype().is_float()).collect();
    if graph_inputs.is_empty() || !has_grad.contains(&true) {
        for (output, activation) in &outputs {
            activations::propagate(activation, output);
        }
        return with_tensors(&y, outputs.into_iter().map(|(output, _)| output).collect());
    }
    let mut inputs = Vec::with_capacity(given.len());
    let mut elsewhere = offload.map(Offload::begin).transpose()?;
    for (((saved, activation), x), alias) in saved.into_iter().zip(&given).zip(&aliases) {
        let saved = match &mut elsewhere {
            // If the graph holds the input itself, offloading a copy frees no memory.
            Some(elsewhere) if alias.is_some() || !x.track_op() => elsewhere.save(saved)?,
            _ => SavedActivation::InPlace(saved),
        };
        inputs.push(SavedInput { saved, activation, tracked: x.track_op() });
    }
    let x = match offload {
        None => x,
        // The inputs' memory is released, so the input's structure must not hold them.
        Some(_) => {
            let element = Tensor::zeros((), DType::F32, graph_inputs[0].device())?;
            with_tensors(&x, vec![element; inputs.len()])?
        }
    };
    uses.begin_tensor_uses();
    let with_token = token.is_some();
    let forms = outputs.iter().map(|(y, _)| (y.shape().clone(), y.dtype())).collect();
    let context = ExecutionContext::current();
    let state = RecomputeState { unit: unit.clone(), x, inputs, forms, context, uses };
    let of_graph = outputs.iter().zip(&has_grad).filter(|(_, has_grad)| **has_grad);
    let of_graph = of_graph.map(|((y, _), _)| y.clone()).collect();
    let indices: Vec<usize> = (0..outputs.len()).filter(|&i| has_grad[i]).collect();
    let of_graph = functions(&graph_inputs, of_graph, move |grads| {
        if let Some(hooks) = &hooks {
            hooks.pre_backward(&state.unit)?;
        }
        let grads = indices.iter().copied().zip(grads);
        let grads = grads.filter_map(|(i, grad)| Some((i, grad.clone()?))).collect();
        let mut of_inputs =
            state.backward(grads, &compute).map_err(|error| error.in_module(state.unit.path()))?;
        state.uses.end_tensor_uses()?;
        of_inputs.extend(with_token.then_some(None));
        Ok(of_inputs)
    })?;
    with_tensors(&y, give(outputs, of_graph, &has_grad, offload.is_some())?)
}

/// An output of a unit, and its layout over tensor-parallel ranks.
pub(super) type Output = (Tensor, Option<Arc<Activation>>);

/// The outputs of a unit. Outputs with gradients are replaced by the tensors in the graph, whose
/// memory the graph does not hold if they are `offloaded`.
pub(super) fn give(
    outputs: Vec<Output>,
    of_graph: Vec<Tensor>,
    has_grad: &[bool],
    offloaded: bool,
) -> Result<Vec<Tensor>> {
    let mut of_graph = of_graph.into_iter();
    let give = |((output, activation), has_grad): (Output, &bool)| {
        let y = match has_grad {
            true => of_graph.next().expect("one for each that has a gradient"),
            false => output,
        };
        let y = if offloaded && *has_grad { graph_alias::detach_storage(y)? } else { y };
        activations::propagate(&activation, &y);
        Ok(y)
    };
    outputs.into_iter().zip(has_grad).map(give).collect()
}

/// Runs the backward of a unit's own graph, given gradients of some outputs by index. Returns the
/// gradient of each of `inputs`, its variables, with zeros for inputs that get none.
pub(super) fn backward_of(
    unit: &UnitHandle,
    outputs: Vec<Tensor>,
    grads: Vec<(usize, Tensor)>,
    inputs: &[&Tensor],
) -> Result<Vec<Option<Tensor>>> {
    let mut seed: Option<Tensor> = None;
    for (i, grad) in grads {
        let y = &outputs[i];
        if !y.track_op() {
            continue;
        }
        let next = Tensor::zeros((), DType::F32, y.device())?;
        seed = Some(match &seed {
            None => function(&[y], next, move |_, _| Ok(vec![Some(grad.clone())]))?,
            Some(seed) => function(&[seed, y], next, move |_, of_seed| {
                Ok(vec![Some(of_seed.clone()), Some(grad.clone())])
            })?,
        });
    }
    drop(outputs);
    let mut of_inputs: Vec<Option<Tensor>> = vec![None; inputs.len()];
    if let Some(seed) = seed {
        let mut grads = seed.backward()?;
        of_inputs = inputs.iter().map(|x| grads.remove(x)).collect();
        if unit.checks_variables() {
            refuse_variables(&seed, &grads)?;
            if GradMode::current().recomputes() {
                refuse_wrong_gradients(&seed).map_err(|error| error.in_module(unit.path()))?;
            }
        }
    }
    let or_zeros = |(grad, x): (Option<Tensor>, &&Tensor)| -> Result<Option<Tensor>> {
        Ok(Some(grad.map_or_else(|| x.zeros_like(), Ok)?))
    };
    of_inputs.into_iter().zip(inputs).map(or_zeros).collect()
}

/// The device of the unit's first input tensor, or else of its first output.
pub(super) fn unit_device<'a>(
    given: &'a [Tensor],
    outputs: &'a [Output],
) -> &'a candle_core::Device {
    let outputs = outputs.iter().map(|(output, _)| output);
    given.iter().chain(outputs).next().map_or(&candle_core::Device::Cpu, Tensor::device)
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
    /// The parameter uses counted in forward.
    uses: Uses,
}

impl<A: Activations> RecomputeState<A> {
    /// Computes the unit again and runs its backward, given gradients of some outputs by index.
    /// Returns the gradient of each input that gets one.
    fn backward<B: Activations>(
        &self,
        grads: Vec<(usize, Tensor)>,
        compute: &impl Fn(&A) -> Result<B>,
    ) -> Result<Vec<Option<Tensor>>> {
        let _context = self.context.enter();
        let _recomputing = GradMode::recomputing().enter();
        let restore = |input: &SavedInput| -> Result<Tensor> {
            let x = input.saved.get()?;
            let x = if input.tracked { Var::from_tensor(&x)?.into_inner() } else { x };
            activations::propagate(&input.activation, &x);
            Ok(x)
        };
        let inputs = self.inputs.iter().map(restore).collect::<Result<Vec<_>>>()?;
        let x = with_tensors(&self.x, inputs.clone())?;
        let tracked = inputs.iter().zip(&self.inputs).filter(|(_, input)| input.tracked);
        let tracked: Vec<&Tensor> = tracked.map(|(x, _)| x).collect();
        self.uses.during(|| {
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
