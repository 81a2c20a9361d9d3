//! Softmax of scores with a mask or a bias, in f32.

use super::attention::small;
use crate::{In, Out, Plan, table};

/// The address of a mask (u8) or a bias (f32), 0 for none, and its strides over sequences, heads
/// and queries: 0 where one value is for all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Broadcast {
    /// The address.
    pub address: u64,
    /// The strides in elements.
    pub strides: [u32; 3],
}

/// Replaces scores, `[batch, heads, queries, keys]`, by probabilities: one launch. A query sees
/// keys whose mask is not 0. Without any its row becomes zeros.
pub fn masked_softmax(scores: u64, sizes: [usize; 4], mask: Broadcast, bias: Broadcast) -> Plan {
    let mut plan = Plan::default();
    let [batch, heads, queries, keys] = sizes;
    let ([mask_batch, mask_head, mask_query], [bias_batch, bias_head, bias_query]) =
        (mask.strides, bias.strides);
    plan.call(table::masked_softmax(
        small(batch * heads * queries),
        Out::at(scores),
        In::at(mask.address),
        In::at(bias.address),
        small(heads),
        small(queries),
        small(keys),
        mask_batch,
        mask_head,
        mask_query,
        bias_batch,
        bias_head,
        bias_query,
    ));
    plan
}

/// Replaces the gradient of probabilities, `[rows, keys]`, by the gradient of scores, times
/// `scale`: one launch.
pub fn masked_softmax_backward(
    probabilities: u64,
    grad: u64,
    [rows, keys]: [usize; 2],
    scale: f32,
) -> Plan {
    let mut plan = Plan::default();
    let call = table::masked_softmax_backward(
        small(rows),
        In::at(probabilities),
        Out::at(grad),
        small(keys),
        scale,
    );
    plan.call(call);
    plan
}
