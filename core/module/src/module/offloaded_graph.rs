//! Calls of units with offloaded activations and without recomputation. The tensors of the unit's
//! graph are stored elsewhere from forward to backward.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor, Var};

use super::ActivationOffload;
use super::activation_offload::{Offload, SavedActivation};
use super::activations::{Activations, tensors, with_tensors};
use super::graph_alias;
use super::recompute::{Output, backward_of, give, unit_device};
use super::unit::{UnitHandle, UnitHooks};
use crate::parallel::activations;
use crate::parameter::Uses;
use crate::{Error, Result};
use fulgurite_tensor::autograd::{GradMode, collect_saved, functions, storage};

/// Calls a unit with its own graph and offloads the memory of the graph's tensors. Enters the
/// outputs into the caller's graph. Their backward restores the memory and runs the backward of the
/// unit's graph.
pub(super) fn call<A: Activations, B: Activations>(
    unit: &UnitHandle,
    hooks: Option<Arc<dyn UnitHooks>>,
    x: &A,
    to: ActivationOffload,
    compute: impl FnOnce(&A) -> Result<B>,
) -> Result<B> {
    if let Some(hooks) = &hooks {
        hooks.pre_forward(unit)?;
    }
    let given = tensors(x)?;
    let inputs = given.iter().map(|x| own_input(unit, x)).collect::<Result<Vec<_>>>()?;
    let mode = GradMode::offloading();
    let ((y, own, outputs), uses, saved) = {
        let _own_graph = mode.enter();
        let compute = || {
            unit.note_exposed();
            let y = compute(&with_tensors(x, inputs.clone())?)?;
            let own = tensors(&y)?;
            let output = |y: &Tensor| {
                let activation = activations::lookup(y, unit.path())?;
                // A copy, because the memory of the unit's own graph is released.
                Ok((y.detach().force_contiguous()?, activation))
            };
            let outputs = own.iter().map(output).collect::<Result<Vec<Output>>>()?;
            Ok::<_, Error>((y, own, outputs))
        };
        let ((computed, uses), saved) = collect_saved(|| Uses::collect(compute));
        (computed?, uses, saved)
    };
    if let Some(hooks) = &hooks {
        hooks.post_forward(unit)?;
    }
    let aliases: Vec<_> = given.iter().map(graph_alias::lookup).collect();
    // The token stands for the parameters, as in a recomputed call.
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
    let form = with_tensors(&y, vec![Tensor::zeros((), DType::F32, &Device::Cpu)?; own.len()])?;
    drop(y);
    let mut keep: HashSet<usize> = given.iter().map(memory_of).collect();
    for parameter in uses.as_tensors() {
        keep.insert(memory_of(parameter.compute()?));
    }
    let tracked = inputs.into_iter().zip(&given).filter(|(_, given)| given.track_op());
    let graph = OwnGraph {
        elsewhere: offload(&own, &saved, keep, to)?,
        inputs: tracked.map(|(x, _)| x).collect(),
        outputs: own,
    };
    let graph = Mutex::new(Some(graph));
    uses.begin_tensor_uses();
    let of_graph = outputs.iter().zip(&has_grad).filter(|(_, has_grad)| **has_grad);
    let of_graph = of_graph.map(|((y, _), _)| y.clone()).collect();
    let indices: Vec<usize> = (0..outputs.len()).filter(|&i| has_grad[i]).collect();
    let (handle, with_token) = (unit.clone(), token.is_some());
    let of_graph = functions(&graph_inputs, of_graph, move |grads| {
        if let Some(hooks) = &hooks {
            hooks.pre_backward(&handle)?;
        }
        let graph = graph.lock().expect("no panic while taking").take();
        let graph = graph.ok_or_else(|| {
            Error::module(
                handle.path(),
                "its activations are offloaded, and free after its first backward; compute the loss again",
            )
        })?;
        let grads = indices.iter().copied().zip(grads);
        let grads = grads.filter_map(|(i, grad)| Some((i, grad.clone()?))).collect();
        let of_inputs = {
            let _own_graph = mode.enter();
            uses.during(|| graph.backward(&handle, grads))
        };
        let mut of_inputs = of_inputs.map_err(|error| error.in_module(handle.path()))?;
        uses.end_tensor_uses()?;
        of_inputs.extend(with_token.then_some(None));
        Ok(of_inputs)
    })?;
    with_tensors(&form, give(outputs, of_graph, &has_grad, true)?)
}

/// Makes an input a leaf of the unit's own graph.
fn own_input(unit: &UnitHandle, x: &Tensor) -> Result<Tensor> {
    let activation = activations::lookup(x, unit.path())?;
    let own = match x.track_op() {
        true => Var::from_tensor(&x.detach())?.into_inner(),
        false => x.detach(),
    };
    activations::propagate(&activation, &own);
    Ok(own)
}

/// The graph of a call, from inputs to outputs.
struct OwnGraph {
    /// The offloaded tensors, one for each memory block, and their saved contents.
    elsewhere: Vec<(Tensor, SavedActivation)>,
    /// Inputs that get gradients.
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

impl OwnGraph {
    /// Restores the memory and runs the backward. Drops the graph.
    fn backward(
        self,
        unit: &UnitHandle,
        grads: Vec<(usize, Tensor)>,
    ) -> Result<Vec<Option<Tensor>>> {
        for (tensor, saved) in self.elsewhere {
            storage::replace(&tensor, storage::take(&saved.get()?)?)?;
        }
        let inputs: Vec<&Tensor> = self.inputs.iter().collect();
        backward_of(unit, self.outputs, grads, &inputs)
    }
}

/// Offloads the memory of all tensors from which `outputs` were computed and of tensors that layers
/// have `saved`. Tokens and the memory in `keep` stay.
fn offload(
    outputs: &[Tensor],
    saved: &[Tensor],
    mut keep: HashSet<usize>,
    to: ActivationOffload,
) -> Result<Vec<(Tensor, SavedActivation)>> {
    let mut offload = Offload::begin(to)?;
    let mut elsewhere = Vec::new();
    for tensor in outputs.iter().flat_map(Tensor::sorted_nodes).chain(saved) {
        // A tensor with repeated elements is a view of another tensor.
        let repeats = tensor.stride().iter().zip(tensor.dims()).any(|(&s, &n)| s == 0 && n > 1);
        let is_empty = tensor.elem_count() == 0;
        if repeats || is_empty || is_token(tensor) || !keep.insert(memory_of(tensor)) {
            continue;
        }
        let memory = storage::take(tensor)?;
        let flat = storage::flat(memory, tensor.device())?;
        elsewhere.push((tensor.clone(), offload.save(flat)?));
    }
    Ok(elsewhere)
}

/// Whether a node is a scalar variable, like the tokens that stand for parameters.
fn is_token(node: &Tensor) -> bool {
    node.is_variable() && node.rank() == 0
}

/// Identifies a memory block by address.
fn memory_of(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}
