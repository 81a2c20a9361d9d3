//! Attention without scores in memory.

use super::attention::small;
use super::{Attention, blocks, with_element, with_half};
use crate::table::{self, Width};
use crate::{Float, In, Out, Plan};

/// Queries that a block keeps in forward: `ROWS` in `kernels/flash.cu`.
const ROWS: usize = 128;

/// Tile sizes for a head width, as `DEFINE`d in the kernels.
struct Tiles {
    width: Width,
    /// Width after padding.
    padded: usize,
    /// Keys in a tile of forward.
    keys: usize,
    /// Rows that a block keeps in backward.
    kept: usize,
    /// Keys in a tile, for the gradient of queries.
    dq_keys: usize,
    /// Queries in a tile, for the gradients of keys and values.
    dk_queries: usize,
}

const TO_64: Tiles =
    Tiles { width: Width::To64, padded: 64, keys: 64, kept: 128, dq_keys: 64, dk_queries: 64 };
const TO_128: Tiles =
    Tiles { width: Width::To128, padded: 128, keys: 64, kept: 128, dq_keys: 64, dk_queries: 32 };
const TO_256: Tiles =
    Tiles { width: Width::To256, padded: 256, keys: 32, kept: 64, dq_keys: 16, dk_queries: 16 };

impl Tiles {
    fn row(&self) -> usize {
        self.padded * ELEMENT
    }

    /// Shared memory of forward: queries, and a tile of keys and values.
    fn forward_bytes(&self) -> usize {
        (ROWS + 2 * self.keys) * self.row()
    }

    /// Shared memory of the queries' gradient: queries and their gradients, and two tiles of keys
    /// and values. The tiles reuse the memory of queries and gradients if registers hold these.
    fn queries_bytes(&self) -> usize {
        let (kept, tiles) = (2 * self.kept, 4 * self.dq_keys);
        let rows = if self.kept == ROWS { kept.max(tiles) } else { kept + tiles };
        rows * self.row()
    }

    /// Shared memory of the keys' gradients: keys and values, and two tiles of queries with their
    /// gradients and statistics.
    fn keys_bytes(&self) -> usize {
        2 * self.kept * self.row() + 2 * self.dk_queries * (2 * self.row() + BESIDE)
    }
}

/// Warps of a block.
const WARPS: u64 = 8;

/// Bytes of an element in shared memory, and of the statistics of each query of a tile.
const ELEMENT: usize = 2;
const BESIDE: usize = 16;

impl Attention {
    /// Whether [`flash_attention`] supports it: bf16 or f16, a width that is a multiple of 8 up to
    /// 256, and a positive scale.
    pub fn is_flash(&self) -> bool {
        let is_half = matches!(self.dtype, Float::Bf16 | Float::F16);
        let is_scaled = self.scale > 0.0 && self.scale.is_finite();
        is_half && is_scaled && self.width > 0 && self.width <= 256 && self.width.is_multiple_of(8)
    }

    /// Returns the most shared memory that a kernel of [`flash_attention`] or its backward needs,
    /// in bytes.
    pub fn flash_shared_bytes(&self) -> usize {
        let tiles = self.tiles();
        tiles.forward_bytes().max(tiles.queries_bytes()).max(tiles.keys_bytes())
    }

    fn tiles(&self) -> Tiles {
        assert!(self.is_flash(), "{self:?}");
        match self.width {
            ..=64 => TO_64,
            65..=128 => TO_128,
            _ => TO_256,
        }
    }
}

/// Returns the number of blocks of `kept` rows for `rows` rows of each head.
fn blocks_of(heads: usize, rows: usize, kept: usize) -> u32 {
    small(heads * rows.div_ceil(kept))
}

/// Computes the output and the log-sum-exp of each query's scores (f32, `[batch, heads, queries]`):
/// one launch. Tensors are `[batch, time, heads, width]`, and are aligned to 16 bytes.
pub fn flash_attention(of: &Attention, [q, k, v]: [u64; 3], output: u64, lse: u64) -> Plan {
    of.check();
    let mut plan = Plan::default();
    let tiles = of.tiles();
    plan.call(with_half!(of.dtype, T => table::flash_forward::<T>(
        blocks_of(of.heads(), of.queries, ROWS),
        tiles.width,
        small(tiles.forward_bytes()),
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
        of.window(),
        of.scale,
    )));
    plan
}

/// Computes the gradients of [`flash_attention`]'s queries, keys and values, in their dtype: three
/// launches. `output` and `lse` are the results of `flash_attention`; `grad` is the gradient of the
/// output.
pub fn flash_attention_backward(
    of: &Attention,
    [q, k, v]: [u64; 3],
    [output, lse, grad]: [u64; 3],
    [dq, dk, dv]: [u64; 3],
) -> Plan {
    of.check();
    let mut plan = Plan::default();
    let tiles = of.tiles();
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
        plan.call(table::flash_queries::<T>(
            blocks_of(of.heads(), of.queries, tiles.kept),
            tiles.width,
            small(tiles.queries_bytes()),
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
            of.window(),
            of.scale,
        ));
        plan.call(table::flash_keys::<T>(
            blocks_of(of.batch * of.kv_heads, of.keys, tiles.kept),
            tiles.width,
            small(tiles.keys_bytes()),
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
            of.window(),
            of.scale,
        ));
    });
    plan
}
