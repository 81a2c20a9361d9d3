//! Softmax of the scores of attention.

use super::with_element;
use crate::{Float, In, Out, Plan, table};

/// Scores, `[heads, queries, keys]`, where heads are those of all sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scores {
    /// dtype of scores, probabilities and their gradients.
    pub dtype: Float,
    /// Heads of all sequences.
    pub heads: u32,
    /// Queries of a head.
    pub queries: u32,
    /// Keys of a head; for a causal softmax not fewer than queries, and the last query is at the last key.
    pub keys: u32,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
    /// Factor of the scores.
    pub scale: f32,
}

impl Scores {
    fn blocks(&self) -> u32 {
        assert!(!self.causal || self.queries <= self.keys, "a causal query needs its own key");
        let rows = self.heads.checked_mul(self.queries).expect("less than 2^32 rows");
        if self.keys == 0 { 0 } else { rows }
    }
}

/// The probabilities, which may take the place of the scores, and the log-sum-exp of each row (f32): one launch.
pub fn attention_softmax(of: Scores, scores: u64, probabilities: u64, lse: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(of.dtype, T => table::attention_softmax::<T>(
        of.blocks(),
        In::at(scores),
        Out::at(probabilities),
        Out::at(lse),
        of.queries,
        of.keys,
        u32::from(of.causal),
        of.scale,
    )));
    plan
}

/// The gradient of the scores, which may take the place of that of the probabilities: one launch.
pub fn attention_softmax_backward(of: Scores, probabilities: u64, grad: u64, dscores: u64) -> Plan {
    let mut plan = Plan::default();
    plan.call(with_element!(of.dtype, T => table::attention_softmax_backward::<T>(
        of.blocks(),
        In::at(probabilities),
        In::at(grad),
        Out::at(dscores),
        of.queries,
        of.keys,
        u32::from(of.causal),
        of.scale,
    )));
    plan
}
