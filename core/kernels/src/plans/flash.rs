//! Attention without scores in memory.

use super::attention::small;
use super::{Attention, blocks, with_element, with_half};
use crate::table::{self, Launch, Width};
use crate::{Float, In, Out, Plan};

/// How a kernel divides its rows, as `DEFINE`d in the kernels.
#[derive(Clone, Copy)]
struct Tiles {
    /// Warps of a block.
    warps: usize,
    /// Rows that a block keeps.
    kept: usize,
    /// The other rows that are in shared memory at a time.
    tile: usize,
}

/// The kernels for a head width.
struct Kernels {
    width: Width,
    /// Width after padding.
    padded: usize,
    forward: Tiles,
    /// For the gradient of queries.
    queries: Tiles,
    /// Whether registers hold the queries and their gradients.
    in_registers: bool,
    /// For the gradients of keys and values.
    keys: Tiles,
}

const TO_64: Kernels = Kernels {
    width: Width::To64,
    padded: 64,
    forward: Tiles { warps: 4, kept: 64, tile: 64 },
    queries: Tiles { warps: 4, kept: 128, tile: 64 },
    in_registers: true,
    keys: Tiles { warps: 4, kept: 128, tile: 64 },
};
const TO_128: Kernels = Kernels {
    width: Width::To128,
    padded: 128,
    forward: Tiles { warps: 4, kept: 64, tile: 64 },
    queries: Tiles { warps: 4, kept: 128, tile: 32 },
    in_registers: false,
    keys: Tiles { warps: 4, kept: 64, tile: 32 },
};
const TO_256: Kernels = Kernels {
    width: Width::To256,
    padded: 256,
    forward: Tiles { warps: 8, kept: 128, tile: 32 },
    queries: Tiles { warps: 8, kept: 64, tile: 16 },
    in_registers: false,
    keys: Tiles { warps: 8, kept: 64, tile: 16 },
};

impl Kernels {
    fn row(&self) -> usize {
        self.padded * ELEMENT
    }

    /// Shared memory of forward: queries, and a tile of keys and values.
    fn forward_bytes(&self) -> usize {
        (self.forward.kept + 2 * self.forward.tile) * self.row()
    }

    /// Shared memory of the queries' gradient: queries and their gradients, and two tiles of keys
    /// and values. The tiles reuse the memory of queries and gradients if registers hold these.
    fn queries_bytes(&self) -> usize {
        let (kept, tiles) = (2 * self.queries.kept, 4 * self.queries.tile);
        let rows = if self.in_registers { kept.max(tiles) } else { kept + tiles };
        rows * self.row()
    }

    /// Shared memory of the keys' gradients: keys and values, and two tiles of queries with their
    /// gradients and statistics.
    fn keys_bytes(&self) -> usize {
        2 * self.keys.kept * self.row() + 2 * self.keys.tile * (2 * self.row() + BESIDE)
    }
}

impl Tiles {
    /// The launch for `rows` rows of each head.
    fn launch(self, heads: usize, rows: usize, shared_bytes: usize) -> Launch {
        Launch {
            blocks: small(heads * rows.div_ceil(self.kept)),
            threads: small(self.warps * 32),
            shared_bytes: small(shared_bytes),
        }
    }
}

/// Rows of a block of `flash_level`, as in the kernel.
const LEVEL_ROWS: u64 = 32;

/// Bytes of an element in shared memory, and of the statistics of each query of a tile.
const ELEMENT: usize = 2;
const BESIDE: usize = 16;

impl Attention {
    /// Whether [`flash_attention`] supports it: bf16 or f16, a width that is a multiple of 8 up to
    /// 256, a positive scale, and no cap or a normal one.
    pub fn is_flash(&self) -> bool {
        let is_half = matches!(self.dtype, Float::Bf16 | Float::F16);
        let is_scaled = self.scale > 0.0 && self.scale.is_finite();
        let is_capped =
            self.softcap.is_none() || self.cap_by_scale().iter().all(|x| x.is_normal() && *x > 0.0);
        is_half
            && is_scaled
            && is_capped
            && self.width > 0
            && self.width <= 256
            && self.width.is_multiple_of(8)
    }

    /// Returns the most shared memory that a kernel of [`flash_attention`] or its backward needs,
    /// in bytes.
    pub fn flash_shared_bytes(&self) -> usize {
        let kernels = self.kernels();
        kernels.forward_bytes().max(kernels.queries_bytes()).max(kernels.keys_bytes())
    }

    /// Returns the scale divided by the cap and its reciprocal, or zeros for no cap.
    fn cap_by_scale(&self) -> [f32; 2] {
        self.softcap.map_or([0.0; 2], |cap| [self.scale / cap, cap / self.scale])
    }

    /// Whether only the general kernels support it.
    fn is_general(&self) -> bool {
        let is_around = self.window.is_some() && !self.causal;
        self.softcap.is_some() || self.ends != 0 || is_around
    }

    fn kernels(&self) -> Kernels {
        assert!(self.is_flash(), "{self:?}");
        match self.width {
            ..=64 => TO_64,
            65..=128 => TO_128,
            _ => TO_256,
        }
    }
}

/// Computes the output and the log-sum-exp of each query's scores (f32, `[batch, heads, queries]`):
/// one launch. Tensors are `[batch, time, heads, width]`, and are aligned to 16 bytes.
pub fn flash_attention(of: &Attention, [q, k, v]: [u64; 3], output: u64, lse: u64) -> Plan {
    of.check();
    let mut plan = Plan::default();
    let kernels = of.kernels();
    plan.call(with_half!(of.dtype, T => table::flash_forward::<T>(
        kernels.forward.launch(of.heads(), of.queries, kernels.forward_bytes()),
        (kernels.width, of.is_general()),
        In::at(q),
        In::at(k),
        In::at(v),
        Out::at(output),
        Out::at(lse),
        In::at(of.firsts),
        In::at(of.ends),
        small(of.kv_heads * of.group),
        small(of.group),
        small(of.queries),
        small(of.keys),
        small(of.width),
        of.place(),
        of.before(),
        of.after(),
        of.scale,
        of.cap_by_scale()[0],
        of.cap_by_scale()[1],
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
    let kernels = of.kernels();
    let rows = of.heads() * of.queries;
    let (heads, group) = (small(of.kv_heads * of.group), small(of.group));
    let (queries, keys, elements) = (small(of.queries), small(of.keys), small(of.width));
    let [firsts, ends] = [of.firsts, of.ends].map(In::at);
    let level = plan.scratch::<f32>(rows);
    plan.call(with_element!(of.dtype, T => table::flash_level::<T>(
        blocks(rows as u64, LEVEL_ROWS),
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
            kernels.queries.launch(of.heads(), of.queries, kernels.queries_bytes()),
            (kernels.width, of.is_general()),
            In::at(q),
            In::at(k),
            In::at(v),
            In::at(grad),
            In::at(lse),
            level.read(),
            Out::at(dq),
            firsts,
            ends,
            heads,
            group,
            queries,
            keys,
            elements,
            of.place(),
            of.before(),
            of.after(),
            of.scale,
            of.cap_by_scale()[0],
        of.cap_by_scale()[1],
        ));
        plan.call(table::flash_keys::<T>(
            kernels.keys.launch(of.batch * of.kv_heads, of.keys, kernels.keys_bytes()),
            (kernels.width, of.is_general()),
            In::at(q),
            In::at(k),
            In::at(v),
            In::at(grad),
            In::at(lse),
            level.read(),
            Out::at(dk),
            Out::at(dv),
            firsts,
            ends,
            heads,
            group,
            queries,
            keys,
            elements,
            of.place(),
            of.before(),
            of.after(),
            of.scale,
            of.cap_by_scale()[0],
        of.cap_by_scale()[1],
        ));
    });
    plan
}
