//! Dropout.

use super::{CHUNK, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// What is dropped: a function of a stream of random numbers and the elements' places in the whole batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout<'a> {
    /// The stream's key.
    pub key: [u32; 2],
    /// The upper half of its counter.
    pub high: [u32; 2],
    /// Elements of a row, which is contiguous in the whole batch.
    pub width: u64,
    /// Where each row begins there.
    pub starts: &'a [u64],
    /// The probability, in `[0, 1)`.
    pub p: f64,
}

/// `y` is `x`, times 0 or `1 / (1 - p)`; `n` elements, as many as the rows have. One launch. `y` may be `x`.
pub fn dropout(dtype: Float, x: u64, y: u64, n: u64, of: Dropout<'_>) -> Plan {
    let mut plan = Plan::default();
    let starts = plan.numbers(of.starts);
    // A word w is the number w / 2^32: both sides times 2^32, which is exact.
    let threshold = (of.p * 4_294_967_296.0).ceil() as u64;
    plan.call(with_element!(dtype, T => table::dropout::<T>(
        blocks(n, CHUNK),
        In::at(x),
        Out::at(y),
        n,
        starts,
        of.width,
        of.key[0],
        of.key[1],
        of.high[0],
        of.high[1],
        threshold,
        (1.0 / (1.0 - of.p)) as f32,
    )));
    plan
}
