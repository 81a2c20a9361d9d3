//! Cross entropy, and the gradient of an embedding.

use super::{COLUMNS, blocks, with_element};
use crate::{Float, In, Out, Plan, table};

/// The target of a row without a target.
pub const IGNORED: u32 = u32::MAX;

/// Rows of logits with their targets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// dtype of the logits.
    pub dtype: Float,
    /// `[rows, classes]`.
    pub logits: u64,
    /// Target classes, or [`IGNORED`]; u32 `[rows]`.
    pub targets: u64,
    /// The log-sum-exp of each row over all classes, f32 `[rows]`. The forward writes it, with 0
    /// for ignored rows.
    pub lse: u64,
    /// Number of rows.
    pub rows: u32,
    /// Columns of the logits.
    pub classes: u32,
    /// Label smoothing.
    pub smoothing: f64,
}

/// Writes the sum of the rows' losses to `total` (f64): two launches. Summation order depends on
/// the row count alone.
pub fn cross_entropy(of: CrossEntropy, total: u64) -> Plan {
    let mut plan = Plan::default();
    let losses = plan.scratch::<f64>(of.rows as usize);
    plan.call(with_element!(of.dtype, T => table::cross_entropy::<T>(
        of.rows,
        In::at(of.logits),
        In::at(of.targets),
        losses,
        Out::at(of.lse),
        of.classes,
        of.smoothing as f32,
    )));
    plan.call(table::sum_f64(1, losses.read(), of.rows, Out::at(total)));
    plan
}

/// Replaces the logits by their gradient: one launch. `grad` is the address of the gradient of the
/// sum of losses (f32). The columns are the classes from `first` on, out of `all_classes`; there
/// are fewer columns if classes are sharded over ranks.
pub fn cross_entropy_backward(of: CrossEntropy, grad: u64, first: u32, all_classes: u32) -> Plan {
    let mut plan = Plan::default();
    let rows = if of.classes == 0 { 0 } else { of.rows };
    plan.call(with_element!(of.dtype, T => table::cross_entropy_backward::<T>(
        rows,
        Out::at(of.logits),
        In::at(of.targets),
        In::at(of.lse),
        In::at(grad),
        first,
        of.classes,
        of.smoothing as f32,
        (of.smoothing / f64::from(all_classes.max(1))) as f32,
    )));
    plan
}

/// Adds each row of `grad` (`[ids.len(), width]`) to the row of its id in `out` (f32,
/// `[.., width]`): one launch. Rows of one id are added in their order. Rows whose id is
/// [`IGNORED`] are skipped.
pub fn embedding_grad(dtype: Float, grad: u64, ids: &[u32], width: u32, out: u64) -> Plan {
    let has_id = |row: &u32| ids[*row as usize] != IGNORED;
    let mut order: Vec<u32> = (0..ids.len() as u32).filter(has_id).collect();
    order.sort_by_key(|&row| ids[row as usize]); // stable: rows of one id stay in order
    let (mut unique, mut starts) = (Vec::new(), Vec::new());
    for (i, &row) in order.iter().enumerate() {
        let id = ids[row as usize];
        if unique.last() != Some(&id) {
            unique.push(id);
            starts.push(i as u32);
        }
    }
    starts.push(order.len() as u32);
    let mut plan = Plan::default();
    let launched = unique.len() as u64 * u64::from(width).div_ceil(COLUMNS);
    let [unique, starts, order] = [&unique, &starts, &order].map(|list| plan.numbers(list));
    plan.call(with_element!(dtype, T => table::embedding_grad::<T>(
        blocks(launched, 1),
        In::at(grad),
        unique,
        starts,
        order,
        width,
        Out::at(out),
    )));
    plan
}
