//! Activation functions, of one tensor or as the gate of another.

use super::{CHUNK, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// An elementwise function, with its number in `kernels/rows.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu = 0,
    /// `x` times the normal distribution function at `x`.
    Gelu = 1,
    /// The tanh approximation of [`Gelu`](Self::Gelu).
    GeluTanh = 2,
    /// `max(x, 0)`; its slope at 0 is 0.
    Relu = 3,
}

/// The activation of `n` elements: one launch.
pub fn activation(dtype: Float, function: Activation, x: u64, y: u64, n: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::activation::<T>(
        blocks(n, CHUNK),
        In::at(x),
        Out::at(y),
        n,
        function as u32,
    )));
    plan
}

/// The gradient of the activation's input: one launch.
pub fn activation_backward(
    dtype: Float,
    function: Activation,
    [x, grad]: [u64; 2],
    dx: u64,
    n: u64,
) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::activation_backward::<T>(
        blocks(n, CHUNK),
        In::at(x),
        In::at(grad),
        Out::at(dx),
        n,
        function as u32,
    )));
    plan
}

/// The activation of `n` elements of `gate`, times those of `up`: one launch.
pub fn gated(dtype: Float, function: Activation, [gate, up]: [u64; 2], y: u64, n: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::gated::<T>(
        blocks(n, CHUNK),
        In::at(gate),
        In::at(up),
        Out::at(y),
        n,
        function as u32,
    )));
    plan
}

/// The gradients of `gate` and `up`: one launch.
pub fn gated_backward(
    dtype: Float,
    function: Activation,
    [gate, up, grad]: [u64; 3],
    [dgate, dup]: [u64; 2],
    n: u64,
) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(dtype, T => table::gated_backward::<T>(
        blocks(n, CHUNK),
        In::at(gate),
        In::at(up),
        In::at(grad),
        Out::at(dgate),
        Out::at(dup),
        n,
        function as u32,
    )));
    plan
}
