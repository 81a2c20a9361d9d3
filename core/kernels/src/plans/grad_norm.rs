//! The squared norm of many tensors.

use super::Blocks;
use crate::plan::{Address, rows};
use crate::{Float, In, Out, Plan, table};

/// Contiguous elements in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Values {
    /// Address of the first element.
    pub address: u64,
    /// Number of elements.
    pub length: u64,
    /// dtype of the elements.
    pub dtype: Float,
}

rows! {
    /// A tensor, as the kernel reads it.
    pub struct NormTensor {
        /// Address of the first element.
        pub values: Address,
        /// Number of elements.
        pub length: u64,
        /// The first block of this tensor.
        pub first_block: u32,
        /// The number of the dtype.
        pub dtype: u32,
    }
}

/// Writes the sum of squares of all elements to `total`, in f64. The order of summation depends on
/// the lengths alone. It takes two launches for any number of tensors; without elements, one launch
/// writes zero.
pub fn squared_norm(tensors: &[Values], total: u64) -> Plan {
    let mut plan = Plan::default();
    let mut blocks = Blocks::default();
    let rows: Vec<NormTensor> = tensors
        .iter()
        .filter(|values| values.length > 0)
        .map(|&Values { address, length, dtype }| NormTensor {
            values: Address(address),
            length,
            first_block: blocks.next(length),
            dtype: dtype as u32,
        })
        .collect();
    let total = Out::at(total);
    if rows.is_empty() {
        plan.call(table::sum_f64(1, In::null(), 0, total));
        return plan;
    }
    let sums = plan.scratch::<f64>(blocks.0 as usize);
    let count = rows.len() as u32;
    let tensors = plan.table(rows);
    plan.call(table::squared_norm_chunks(blocks.0, tensors, count, sums));
    plan.call(table::sum_f64(1, sums.read(), blocks.0, total));
    plan
}
