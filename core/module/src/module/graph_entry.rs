//! The entry of a unit's outputs into the caller's graph, for calls whose unit computes outside of
//! that graph: recomputed calls and calls with an offloaded graph.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::graph_alias;
use super::unit::{UnitHandle, UnitHooks};
use crate::Result;
use crate::parallel::activations::{self, Activation, RecordOwner};
use crate::parameter::Uses;
use fulgurite_tensor::autograd::{
    GradMode, GraphStart, copy, function, functions, refuse_variables, refuse_wrong_gradients,
};

/// An output of a unit, and its layout over tensor-parallel ranks.
type Output = (Tensor, Option<Arc<Activation>>);

/// Returns a copy of an output outside of graphs. The output itself may share memory with the input
/// or a parameter, and the memory of an offloaded graph is released.
pub(super) fn detached(unit: &UnitHandle, y: &Tensor) -> Result<Output> {
    // Behind a whole output, the caller's graph leads on to the unit's inputs.
    let activation = match activations::lookup(y, unit.path())? {
        Some(record) => Some(record.activation),
        None => activations::whole(unit.path()),
    };
    Ok((copy(y)?, activation))
}

/// Only floating-point outputs have gradients.
fn has_grad((y, _): &Output) -> bool {
    y.dtype().is_float()
}

/// The tensors of the caller's graph that a call was given, and the outputs of the call.
pub(super) struct GraphEntry {
    inputs: Vec<Tensor>,
    has_token: bool,
    outputs: Vec<Output>,
}

impl GraphEntry {
    /// Creates the entry of a call that was `given` these tensors. The `tracked` ones get
    /// gradients. Aliases continue the graph in their tensors' place.
    pub(super) fn new(
        unit: &UnitHandle,
        (given, tracked): (&[Tensor], &[bool]),
        aliases: &[Option<Arc<Tensor>>],
        outputs: Vec<Output>,
        uses: &Uses,
    ) -> Result<Self> {
        // The token stands for the parameters. It is needed even if an input is tracked: candle
        // tracks casts from integers, but its backward does not follow them.
        let token = uses.any().then(|| unit.token(unit_device(given, &outputs))).transpose()?;
        let in_graph = given.iter().zip(aliases).zip(tracked).filter(|(_, tracked)| **tracked);
        let in_graph = in_graph.map(|((x, alias), _)| alias.as_deref().unwrap_or(x).clone());
        let has_token = token.is_some();
        Ok(Self { inputs: in_graph.chain(token).collect(), has_token, outputs })
    }

    /// Returns whether the call can get gradients and has inputs to pass them on to.
    pub(super) fn has_backward(&self) -> bool {
        !self.inputs.is_empty() && self.outputs.iter().any(has_grad)
    }

    /// Returns the outputs of a call without a backward.
    pub(super) fn without_backward(self) -> Result<Vec<Tensor>> {
        let output = |(y, activation): Output| match activation {
            Some(activation) => activations::mark(y, activation, &RecordOwner::new()),
            None => Ok(y),
        };
        self.outputs.into_iter().map(output).collect()
    }

    /// The device of the first input in the graph.
    pub(super) fn device(&self) -> &Device {
        self.inputs.first().map_or(&Device::Cpu, Tensor::device)
    }

    pub(super) fn outputs(&self) -> &[Output] {
        &self.outputs
    }

    /// Enters the outputs into the caller's graph. The graph does not hold their memory if they are
    /// `offloaded`.
    ///
    /// `backward` gets gradients of some outputs by index, and returns the gradients of the inputs
    /// that get one.
    pub(super) fn enter(
        self,
        unit: &UnitHandle,
        hooks: Option<Arc<dyn UnitHooks>>,
        uses: Uses,
        offloaded: bool,
        backward: impl Fn(&Uses, Vec<(usize, Tensor)>) -> Result<Vec<Option<Tensor>>>
        + Send
        + Sync
        + 'static,
    ) -> Result<Vec<Tensor>> {
        uses.begin_tensor_uses();
        let Self { inputs, has_token, outputs } = self;
        let inputs: Vec<&Tensor> = inputs.iter().collect();
        let with_grad = || outputs.iter().enumerate().filter(|(_, output)| has_grad(output));
        let indices: Vec<usize> = with_grad().map(|(i, _)| i).collect();
        let of_graph = with_grad().map(|(_, (y, _))| y.clone()).collect();
        let (unit, owner) = (unit.clone(), RecordOwner::new());
        let held = owner.clone();
        let of_graph = functions(&inputs, of_graph, move |grads| {
            let _held = &held;
            if let Some(hooks) = &hooks {
                hooks.pre_backward(&unit)?;
            }
            let grads = indices.iter().copied().zip(grads);
            let grads = grads.filter_map(|(i, grad)| Some((i, grad.clone()?))).collect();
            let of_inputs = backward(&uses, grads);
            let mut of_inputs = of_inputs.map_err(|error| error.in_module(unit.path()))?;
            uses.end_tensor_uses()?;
            of_inputs.extend(has_token.then_some(None));
            Ok(of_inputs)
        })?;
        let mut of_graph = of_graph.into_iter();
        let give = |output: Output| {
            let has_grad = has_grad(&output);
            let (output, activation) = output;
            let y = match has_grad {
                true => of_graph.next().expect("one for each that has a gradient"),
                false => output,
            };
            let y = if offloaded && has_grad { graph_alias::detach_storage(y)? } else { y };
            match activation {
                Some(activation) => activations::mark(y, activation, &owner),
                None => Ok(y),
            }
        };
        outputs.into_iter().map(give).collect()
    }
}

/// The device of the unit's first input tensor, or else of its first output.
fn unit_device<'a>(given: &'a [Tensor], outputs: &'a [Output]) -> &'a Device {
    let outputs = outputs.iter().map(|(output, _)| output);
    given.iter().chain(outputs).next().map_or(&Device::Cpu, Tensor::device)
}

/// Runs the backward of a unit's own graph, given gradients of some outputs by index. Returns the
/// gradient of each of `inputs`, with zeros for inputs that get none.
pub(super) fn backward_of(
    unit: &UnitHandle,
    outputs: Vec<Tensor>,
    grads: Vec<(usize, Tensor)>,
    inputs: &[&GraphStart],
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
    if let Some(seed) = seed {
        let grads = seed.backward()?;
        if unit.checks_variables() {
            refuse_variables(&seed, &grads)?;
            if GradMode::current().recomputes() {
                refuse_wrong_gradients(&seed).map_err(|error| error.in_module(unit.path()))?;
            }
        }
    }
    let or_zeros = |x: &&GraphStart| -> Result<Option<Tensor>> {
        Ok(Some(x.take_gradient().map_or_else(|| x.tensor().zeros_like(), Ok)?))
    };
    inputs.iter().map(or_zeros).collect()
}
