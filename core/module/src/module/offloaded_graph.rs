//! Calls of units with offloaded activations and without recomputation. The tensors of the unit's
//! graph are stored elsewhere from forward to backward.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::ActivationOffload;
use super::activation_offload::{Offload, SavedActivation};
use super::activations::{Activations, tensors, with_tensors};
use super::graph_alias;
use super::graph_entry::{GraphEntry, backward_of, detached};
use super::unit::{UnitHandle, UnitHooks};
use crate::parallel::activations::{self, RecordOwner};
use crate::parameter::Uses;
use crate::{Error, Result};
use fulgurite_tensor::autograd::{GradMode, GraphStart, collect_saved, storage};

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
    let owner = RecordOwner::new();
    let mode = GradMode::offloading();
    let tracked: Vec<bool> = given.iter().map(activations::takes_gradient).collect();
    let mut starts = Vec::new();
    let ((y, own, outputs), uses, saved) = {
        let _own_graph = mode.enter();
        let own_input =
            |(x, tracked): (_, &bool)| own_input(unit, (x, *tracked), (&owner, &mut starts));
        let compute = || {
            let inputs = given.iter().zip(&tracked).map(own_input).collect::<Result<Vec<_>>>()?;
            unit.note_exposed();
            let y = compute(&with_tensors(x, inputs)?)?;
            let own = tensors(&y)?;
            let outputs = own.iter().map(|y| detached(unit, y)).collect::<Result<_>>()?;
            Ok::<(_, _, Vec<_>), Error>((y, own, outputs))
        };
        let ((computed, uses), saved) = collect_saved(|| Uses::collect(compute));
        (computed?, uses, saved)
    };
    if let Some(hooks) = &hooks {
        hooks.post_forward(unit)?;
    }
    let aliases: Vec<_> = given.iter().map(graph_alias::lookup).collect();
    let entry = GraphEntry::new(unit, (&given, &tracked), &aliases, outputs, &uses)?;
    if !entry.has_backward() {
        return with_tensors(&y, entry.without_backward()?);
    }
    let form = with_tensors(&y, vec![Tensor::zeros((), DType::F32, &Device::Cpu)?; own.len()])?;
    drop(y);
    let mut keep: HashSet<usize> = given.iter().map(memory_of).collect();
    for parameter in uses.as_tensors() {
        keep.insert(memory_of(parameter.compute()?));
    }
    let graph =
        OwnGraph { elsewhere: offload(&own, &saved, keep, to)?, inputs: starts, outputs: own };
    let graph = Mutex::new(Some(graph));
    let handle = unit.clone();
    let backward = move |uses: &Uses, grads| {
        let graph = graph.lock().expect("no panic while taking").take();
        let graph = graph.ok_or_else(|| {
            Error::module(
                handle.path(),
                "its activations are offloaded, and free after its first backward; compute the loss again",
            )
        })?;
        let _own_graph = mode.enter();
        uses.during(|| graph.backward(&handle, grads))
    };
    with_tensors(&form, entry.enter(unit, hooks, uses, true, backward)?)
}

/// Makes an input a leaf of the unit's own graph. Adds it to `starts` if it is tracked.
fn own_input(
    unit: &UnitHandle,
    (x, tracked): (&Tensor, bool),
    (owner, starts): (&RecordOwner, &mut Vec<GraphStart>),
) -> Result<Tensor> {
    let record = activations::lookup(x, unit.path())?;
    if !tracked {
        return activations::detach(x, &record, owner);
    }
    let start = GraphStart::new(x)?;
    let own = start.tensor().clone();
    if let Some(record) = record {
        owner.note(&own, record.activation);
    }
    starts.push(start);
    Ok(own)
}

/// The graph of a call, from inputs to outputs.
struct OwnGraph {
    /// The offloaded tensors, one for each memory block, and their saved contents.
    elsewhere: Vec<(Tensor, SavedActivation)>,
    /// Inputs that get gradients.
    inputs: Vec<GraphStart>,
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
        let inputs: Vec<&GraphStart> = self.inputs.iter().collect();
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
        let flat = storage::flat(memory)?;
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
