//! Dropout.

use super::{CHUNK, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// The random choice of elements to drop, from a random stream and the elements' positions in the
/// whole batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout<'a> {
    /// The stream's key.
    pub key: [u32; 2],
    /// The upper half of the stream's counter.
    pub high: [u32; 2],
    /// Elements of a row. A row is contiguous in the whole batch.
    pub width: u64,
    /// The beginning of each row in the whole batch.
    pub starts: &'a [u64],
    /// The probability of dropping an element, in `[0, 1)`.
    pub p: f64,
}

/// Multiplies each of the `n` elements of `x` by 0 or `1 / (1 - p)`: one launch. `y` may be `x`.
pub fn dropout(dtype: Float, x: u64, y: u64, n: u64, of: Dropout<'_>) -> Plan {
    let mut plan = Plan::default();
    let starts = plan.numbers(of.starts);
    // A word w stands for w / 2^32. Comparing w with p * 2^32 is exact.
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
