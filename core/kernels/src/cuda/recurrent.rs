//! Steps of a GRU or an LSTM without their matrix products, in f32.

use candle_core::{CudaDevice, Tensor};
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::{carry_out, taken};
use crate::plans::{self, States, Step, StepBackward};
use crate::{Float, Plan};

/// The tensors of a step; contiguous parts of larger ones, too. Gates and product are
/// `[batch, gates * width]`, states `[batch, width]`.
#[derive(Debug)]
pub struct RecurrentStep<'a> {
    /// The inputs' product, which becomes the gates.
    pub gates: &'a Tensor,
    /// The hidden state's product.
    pub product: &'a Tensor,
    /// Its bias, `[gates * width]`.
    pub bias: Option<&'a Tensor>,
    /// The state before; of an LSTM the cell state.
    pub before: &'a Tensor,
    /// Overwritten: of an LSTM the cell state, and of a GRU the product for the new gate.
    pub kept: &'a Tensor,
    /// Overwritten: the hidden state.
    pub hidden: &'a Tensor,
}

/// The tensors of a step's backward.
#[derive(Debug)]
pub struct RecurrentStepBackward<'a> {
    /// The gates.
    pub gates: &'a Tensor,
    /// The state before; of an LSTM the cell state.
    pub before: &'a Tensor,
    /// What was kept.
    pub kept: &'a Tensor,
    /// The gradient of the hidden state from the output.
    pub grad: &'a Tensor,
    /// The gradient of the hidden state from later steps. A GRU replaces it by the gradient of the
    /// state before, to which the caller adds the product's part.
    pub of_hidden: &'a Tensor,
    /// Overwritten: the gradient of the inputs' product.
    pub inputs: &'a Tensor,
    /// A GRU writes the gradient of the hidden state's product here. An LSTM has the gradient of
    /// the cell state here, and replaces it by the gradient of the cell state before.
    pub other: &'a Tensor,
}

/// Whether the kernels of recurrent steps support this tensor: on a GPU, not empty, in f32.
pub fn takes_recurrent(tensor: &Tensor) -> bool {
    matches!(taken(tensor), Some((_, Float::F32)))
}

/// Checks shapes, and returns the device and the sizes of the states.
fn checked<'a>(
    states: &[&'a Tensor],
    of_gates: &[&Tensor],
    gates: usize,
) -> Result<(&'a CudaDevice, States)> {
    let (batch, width) = states[0].dims2()?;
    let all =
        states.iter().map(|x| (*x, width)).chain(of_gates.iter().map(|x| (*x, gates * width)));
    for (x, columns) in all {
        let is_taken = matches!(taken(x), Some((_, Float::F32))) && x.is_contiguous();
        if x.dims() != [batch, columns] || !is_taken {
            return Err(Error::other(format!(
                "a recurrent step takes contiguous f32 of [{batch}, {columns}] on a GPU, got {x:?}"
            )));
        }
    }
    match taken(states[0]) {
        Some((device, _)) => Ok((device, States { batch: batch as u64, width: width as u64 })),
        None => Err(Error::other("a recurrent step takes tensors on a GPU")),
    }
}

fn forward(step: &RecurrentStep<'_>, gates: usize, plan: fn(States, Step) -> Plan) -> Result<()> {
    let states = [step.before, step.kept, step.hidden];
    let (device, of) = checked(&states, &[step.gates, step.product], gates)?;
    let width = gates * of.width as usize;
    if let Some(bias) = step.bias.filter(|bias| bias.dims() != [width] || !takes_recurrent(bias)) {
        return Err(Error::other(format!("a recurrent step takes {width} biases, got {bias:?}")));
    }
    let addresses = Step {
        gates: address(step.gates)?,
        product: address(step.product)?,
        bias: step.bias.map_or(Ok(0), address)?,
        before: address(step.before)?,
        kept: address(step.kept)?,
        hidden: address(step.hidden)?,
    };
    let held = [step.gates, step.product, step.before, step.kept, step.hidden];
    carry_out(&plan(of, addresses), device, &held)
}

fn backward(
    step: &RecurrentStepBackward<'_>,
    (gates, other_has_gates): (usize, bool),
    plan: fn(States, StepBackward) -> Plan,
) -> Result<()> {
    let mut states = vec![step.before, step.kept, step.grad, step.of_hidden];
    let mut of_gates = vec![step.gates, step.inputs];
    if other_has_gates { &mut of_gates } else { &mut states }.push(step.other);
    let (device, of) = checked(&states, &of_gates, gates)?;
    let addresses = StepBackward {
        gates: address(step.gates)?,
        before: address(step.before)?,
        kept: address(step.kept)?,
        grad: address(step.grad)?,
        of_hidden: address(step.of_hidden)?,
        inputs: address(step.inputs)?,
        other: address(step.other)?,
    };
    let held: Vec<&Tensor> = states.into_iter().chain(of_gates).collect();
    carry_out(&plan(of, addresses), device, &held)
}

/// Computes one step of a GRU: one launch.
///
/// # Errors
/// If a tensor is of another shape, dtype or device, or the launch fails.
pub fn gru_step(step: &RecurrentStep<'_>) -> Result<()> {
    forward(step, 3, plans::gru_step)
}

/// Computes the gradients of one step of a GRU: one launch.
///
/// # Errors
/// As [`gru_step`].
pub fn gru_step_backward(step: &RecurrentStepBackward<'_>) -> Result<()> {
    backward(step, (3, true), plans::gru_step_backward)
}

/// Computes one step of an LSTM: one launch.
///
/// # Errors
/// As [`gru_step`].
pub fn lstm_step(step: &RecurrentStep<'_>) -> Result<()> {
    forward(step, 4, plans::lstm_step)
}

/// Computes the gradients of one step of an LSTM: one launch.
///
/// # Errors
/// As [`gru_step`].
pub fn lstm_step_backward(step: &RecurrentStepBackward<'_>) -> Result<()> {
    backward(step, (4, false), plans::lstm_step_backward)
}
