//! Steps of a GRU or an LSTM without their matrix products, in f32.

use super::{CHUNK, blocks};
use crate::{In, Out, Plan, table};

/// The states of a step, `[batch, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct States {
    /// Number of sequences.
    pub batch: u64,
    /// Elements of a state.
    pub width: u64,
}

impl States {
    fn elements(self) -> u64 {
        self.batch * self.width
    }
}

/// Addresses of a step: the gates, which hold the inputs' product before; the hidden state's
/// product, and its bias or 0; the state before, of an LSTM the cell state; what is kept, of an LSTM
/// the cell state, and of a GRU the product for the new gate; and the hidden state behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// `[batch, gates, width]`.
    pub gates: u64,
    /// `[batch, gates, width]`.
    pub product: u64,
    /// `[gates, width]`.
    pub bias: u64,
    /// `[batch, width]`.
    pub before: u64,
    /// `[batch, width]`.
    pub kept: u64,
    /// `[batch, width]`.
    pub hidden: u64,
}

/// Addresses of a step's backward: what the step kept, and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepBackward {
    /// The gates.
    pub gates: u64,
    /// The state before, of an LSTM the cell state.
    pub before: u64,
    /// What was kept.
    pub kept: u64,
    /// The gradient of the hidden state, from the output.
    pub grad: u64,
    /// The gradient of the hidden state from later steps. A GRU replaces it by that of the state
    /// before, without the product's part.
    pub of_hidden: u64,
    /// The gradient of the inputs' product.
    pub inputs: u64,
    /// Of a GRU the gradient of the hidden state's product; of an LSTM that of the cell state,
    /// which is replaced by that of the state before.
    pub other: u64,
}

/// One step of a GRU: one launch.
pub fn gru_step(of: States, step: Step) -> Plan {
    let (mut plan, n) = (Plan::default(), of.elements());
    plan.call(table::gru_step(
        blocks(n, CHUNK),
        Out::at(step.gates),
        In::at(step.product),
        In::at(step.bias),
        In::at(step.before),
        Out::at(step.kept),
        Out::at(step.hidden),
        n,
        of.width,
    ));
    plan
}

/// One step of an LSTM: one launch.
pub fn lstm_step(of: States, step: Step) -> Plan {
    let (mut plan, n) = (Plan::default(), of.elements());
    plan.call(table::lstm_step(
        blocks(n, CHUNK),
        Out::at(step.gates),
        In::at(step.product),
        In::at(step.bias),
        In::at(step.before),
        Out::at(step.kept),
        Out::at(step.hidden),
        n,
        of.width,
    ));
    plan
}

/// The gradients of a step of a GRU: one launch.
pub fn gru_step_backward(of: States, step: StepBackward) -> Plan {
    let (mut plan, n) = (Plan::default(), of.elements());
    plan.call(table::gru_step_backward(
        blocks(n, CHUNK),
        In::at(step.gates),
        In::at(step.before),
        In::at(step.kept),
        In::at(step.grad),
        Out::at(step.of_hidden),
        Out::at(step.inputs),
        Out::at(step.other),
        n,
        of.width,
    ));
    plan
}

/// The gradients of a step of an LSTM: one launch.
pub fn lstm_step_backward(of: States, step: StepBackward) -> Plan {
    let (mut plan, n) = (Plan::default(), of.elements());
    plan.call(table::lstm_step_backward(
        blocks(n, CHUNK),
        In::at(step.gates),
        In::at(step.before),
        In::at(step.kept),
        In::at(step.grad),
        In::at(step.of_hidden),
        Out::at(step.other),
        Out::at(step.inputs),
        n,
        of.width,
    ));
    plan
}
