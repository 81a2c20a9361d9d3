//! Steps of a GRU or an LSTM without their matrix products, in f32.

use super::{CHUNK, blocks};
use crate::{Call, In, Out, Plan, table};

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

/// Addresses of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// The inputs' product, `[batch, gates, width]`. The step replaces it by the gates.
    pub gates: u64,
    /// The hidden state's product, `[batch, gates, width]`.
    pub product: u64,
    /// The bias of that product, `[gates, width]`; 0 for none.
    pub bias: u64,
    /// The state before, `[batch, width]`: an LSTM's cell state, or a GRU's hidden state.
    pub before: u64,
    /// Written, `[batch, width]`: an LSTM's cell state, or a GRU's product for the new gate.
    pub kept: u64,
    /// Written, `[batch, width]`: the hidden state.
    pub hidden: u64,
}

/// Addresses of a step's backward.
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
    /// The gradient of the hidden state from later steps. A GRU replaces it by the gradient of the
    /// state before, to which the caller adds the product's part.
    pub of_hidden: u64,
    /// The gradient of the inputs' product.
    pub inputs: u64,
    /// A GRU writes the gradient of the hidden state's product here. An LSTM has the gradient of
    /// the cell state here, and replaces it by the gradient of the cell state before.
    pub other: u64,
}

/// A kernel of a step: gates, product, bias, state before, kept, hidden state, and sizes.
type StepKernel =
    fn(u32, Out<f32>, In<f32>, In<f32>, In<f32>, Out<f32>, Out<f32>, u64, u64) -> Call;

fn launch(of: States, step: Step, kernel: StepKernel) -> Plan {
    let (mut plan, n) = (Plan::default(), of.elements());
    plan.call(kernel(
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

/// One step of a GRU: one launch.
pub fn gru_step(of: States, step: Step) -> Plan {
    launch(of, step, table::gru_step)
}

/// One step of an LSTM: one launch.
pub fn lstm_step(of: States, step: Step) -> Plan {
    launch(of, step, table::lstm_step)
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
