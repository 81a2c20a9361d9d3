//! Pooling over two dimensions, in f32.

use super::{CHUNK, blocks};
use crate::{In, Out, Plan, table};

/// The sizes of a pooling, and its windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooling {
    /// Number of planes.
    pub planes: u64,
    /// Rows and columns of windows.
    pub outputs: [u32; 2],
    /// Height and width of the input.
    pub inputs: [u32; 2],
    /// Address of the windows' ranges, u32: the first rows, the rows behind the last, the first
    /// columns, the columns behind the last. Neither decreases from window to window.
    pub windows: u64,
    /// Address of the ranges of windows that have each row and column of the input, u32, in the
    /// same order.
    pub covers: u64,
}

impl Pooling {
    fn output_elements(&self) -> u64 {
        self.planes * u64::from(self.outputs[0]) * u64::from(self.outputs[1])
    }

    fn input_elements(&self) -> u64 {
        self.planes * u64::from(self.inputs[0]) * u64::from(self.inputs[1])
    }
}

/// The largest element of each window, and its place in the plane (u32): one launch.
pub fn max_pool(of: &Pooling, x: u64, y: u64, picked: u64) -> Plan {
    let (mut plan, n) = (Plan::default(), of.output_elements());
    let ([rows, columns], [height, width]) = (of.outputs, of.inputs);
    plan.call(table::max_pool(
        blocks(n, CHUNK),
        In::at(x),
        In::at(of.windows),
        Out::at(y),
        Out::at(picked),
        n,
        rows,
        columns,
        height,
        width,
    ));
    plan
}

/// The gradient of the input of [`max_pool`]: one launch.
pub fn max_pool_backward(of: &Pooling, picked: u64, grad: u64, dx: u64) -> Plan {
    let (mut plan, n) = (Plan::default(), of.input_elements());
    let ([rows, columns], [height, width]) = (of.outputs, of.inputs);
    plan.call(table::max_pool_backward(
        blocks(n, CHUNK),
        In::at(picked),
        In::at(grad),
        In::at(of.covers),
        Out::at(dx),
        n,
        rows,
        columns,
        height,
        width,
    ));
    plan
}

/// The sum of each window by `divisor`, or without one by its elements: one launch.
pub fn mean_pool(of: &Pooling, divisor: Option<u32>, x: u64, y: u64) -> Plan {
    let (mut plan, n) = (Plan::default(), of.output_elements());
    let ([rows, columns], [height, width]) = (of.outputs, of.inputs);
    plan.call(table::mean_pool(
        blocks(n, CHUNK),
        In::at(x),
        In::at(of.windows),
        Out::at(y),
        n,
        rows,
        columns,
        height,
        width,
        divisor.unwrap_or(0),
    ));
    plan
}

/// The gradient of the input of [`mean_pool`]: one launch.
pub fn mean_pool_backward(of: &Pooling, divisor: Option<u32>, grad: u64, dx: u64) -> Plan {
    let (mut plan, n) = (Plan::default(), of.input_elements());
    let ([rows, columns], [height, width]) = (of.outputs, of.inputs);
    plan.call(table::mean_pool_backward(
        blocks(n, CHUNK),
        In::at(grad),
        In::at(of.windows),
        In::at(of.covers),
        Out::at(dx),
        n,
        rows,
        columns,
        height,
        width,
        divisor.unwrap_or(0),
    ));
    plan
}
