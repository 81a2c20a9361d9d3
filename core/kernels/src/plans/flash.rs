//! Attention without scores in memory.

use super::attention::small;
use super::{Attention, blocks, with_element, with_half};
use crate::table::{self, Width};
use crate::{Float, In, Out, Plan};

/// Rows that a block keeps: `ROWS` in `kernels/flash.cu`.
const ROWS: usize = 128;

/// Keys in a tile: `KEYS` there.
const KEYS: usize = 64;

/// Warps of a block.
const WARPS: u64 = 8;

/// Bytes of an element in shared memory, and of what is there beside each query of a tile.
const ELEMENT: usize = 2;
const BESIDE: usize = 16;

impl Attention {
    /// Whether [`flash_attention`] takes it: in bf16 or f16, with queries of a multiple of 8 elements up to 128, and a positive
    /// factor.
    pub fn is_flash(&self) -> bool {
        let is_half = matches!(self.dtype, Float::Bf16 | Float::F16);
        let is_scaled = self.scale > 0.0 && self.scale.is_finite();
        is_half && is_scaled && self.width > 0 && self.width <= 128 && self.width.is_multiple_of(8)
    }

    /// The width that kernels pad queries to.
    fn padded(&self) -> (Width, usize) {
        assert!(self.is_flash(), "{self:?}");
        if self.width <= 64 { (Width::To64, 64) } else { (Width::To128, 128) }
    }

    /// Blocks for `rows` of each of the heads.
    fn tiles(&self, heads: usize, rows: usize) -> u32 {
        small(heads * rows.div_ceil(ROWS))
    }
}

/// The output, and the log-sum-exp of each query's scores (f32, `[batch, heads, queries]`): one launch. Tensors are
/// `[batch, time, heads, width]` and begin at a multiple of 16 bytes.
pub fn flash_attention(of: &Attention, [q, k, v]: [u64; 3], output: u64, lse: u64) -> Plan {
    of.check();
    let mut plan = Plan::default();
    let (width, padded) = of.padded();
    // The queries, and a tile of keys and values.
    let shared_bytes = small((ROWS + 2 * KEYS) * padded * ELEMENT);
    plan.call(with_half!(of.dtype, T => table::flash_forward::<T>(
        of.tiles(of.heads(), of.queries),
        width,
        shared_bytes,
        In::at(q),
        In::at(k),
        In::at(v),
        Out::at(output),
        Out::at(lse),
        In::at(of.firsts),
        small(of.kv_heads * of.group),
        small(of.group),
        small(of.queries),
        small(of.keys),
        small(of.width),
        u32::from(of.causal),
        of.scale,
    )));
    plan
}

/// The gradients of [`flash_attention`]'s queries, keys and values, in their dtype: three launches. `output` and `lse` are
/// what it wrote, `grad` is the gradient of the output.
pub fn flash_attention_backward(
    of: &Attention,
    [q, k, v]: [u64; 3],
    [output, lse, grad]: [u64; 3],
    [dq, dk, dv]: [u64; 3],
) -> Plan {
    of.check();
    let mut plan = Plan::default();
    let (width, padded) = of.padded();
    let rows = of.heads() * of.queries;
    let (heads, group) = (small(of.kv_heads * of.group), small(of.group));
    let (queries, keys, elements) = (small(of.queries), small(of.keys), small(of.width));
    let (causal, firsts) = (u32::from(of.causal), In::at(of.firsts));
    let level = plan.scratch::<f32>(rows);
    plan.call(with_element!(of.dtype, T => table::flash_level::<T>(
        blocks(rows as u64, WARPS),
        In::at(output),
        In::at(grad),
        level,
        small(rows),
        heads,
        queries,
        elements,
    )));
    with_half!(of.dtype, T => {
        // Queries and their gradients, in whose place two tiles of keys and values come.
        let shared_bytes = small(2 * ROWS * padded * ELEMENT);
        plan.call(table::flash_queries::<T>(
            of.tiles(of.heads(), of.queries),
            width,
            shared_bytes,
            In::at(q),
            In::at(k),
            In::at(v),
            In::at(grad),
            In::at(lse),
            level.read(),
            Out::at(dq),
            firsts,
            heads,
            group,
            queries,
            keys,
            elements,
            causal,
            of.scale,
        ));
        // Keys and values, and two tiles of queries and their gradients with what is beside them.
        let in_tile = match width {
            Width::To64 => 64,
            Width::To128 => 32,
        };
        let shared_bytes = small(2 * ROWS * padded * ELEMENT + 2 * in_tile * (2 * padded * ELEMENT + BESIDE));
        plan.call(table::flash_keys::<T>(
            of.tiles(of.batch * of.kv_heads, of.keys),
            width,
            shared_bytes,
            In::at(q),
            In::at(k),
            In::at(v),
            In::at(grad),
            In::at(lse),
            level.read(),
            Out::at(dk),
            Out::at(dv),
            firsts,
            heads,
            group,
            queries,
            keys,
            elements,
            causal,
            of.scale,
        ));
    });
    plan
}
