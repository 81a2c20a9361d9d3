//! Sizes for cuDNN, and the limits of its use.

use super::graph::{Argument, DataType, Graph, Layout, Place, TensorId};
use crate::Float;
use crate::plans::Attention;

/// Head widths that cuDNN is used for.
const WIDTHS: [usize; 3] = [64, 128, 256];

/// Returns the reason why cuDNN is not used for this attention, if there is one.
pub fn unsupported(of: &Attention) -> Option<&'static str> {
    let is_half = matches!(of.dtype, Float::Bf16 | Float::F16);
    let sizes = [of.batch * of.kv_heads * of.group, of.queries, of.keys, of.width];
    let is_counted = sizes.iter().all(|&n| i32::try_from(n).is_ok());
    match () {
        () if !is_half => Some("it takes bf16 and f16 alone"),
        () if of.softcap.is_some() => Some("bounded scores are not given to it"),
        () if of.window.is_some() && !of.causal => {
            Some("windows to both sides are not given to it")
        }
        () if of.first_query.is_some() => {
            Some("the position of the first query is not given to it")
        }
        () if of.firsts != 0 || of.ends != 0 => Some("packed documents are not given to it"),
        () if !WIDTHS.contains(&of.width) => Some("it is asked for heads of 64, 128 and 256 alone"),
        () if of.queries < 2 => Some("it is asked for two queries or more"),
        () if !is_counted => Some("there are more positions than 2^31"),
        () => None,
    }
}

/// The sizes of an attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) half: DataType,
    batch: i64,
    heads: i64,
    kv_heads: i64,
    queries: i64,
    keys: i64,
    width: i64,
}

impl Shape {
    pub(super) fn of(of: &Attention) -> Self {
        let size = |n: usize| i64::try_from(n).expect("sizes below 2^31");
        Self {
            half: DataType::of_half(of.dtype),
            batch: size(of.batch),
            heads: size(of.kv_heads * of.group),
            kv_heads: size(of.kv_heads),
            queries: size(of.queries),
            keys: size(of.keys),
            width: size(of.width),
        }
    }

    /// Whether several query heads share a key head.
    pub(super) fn is_grouped(self) -> bool {
        self.heads != self.kv_heads
    }

    /// `[batch, heads, queries, width]`
    pub(super) fn of_queries(self) -> [i64; 4] {
        [self.batch, self.heads, self.queries, self.width]
    }

    /// `[batch, key heads, keys, width]`
    pub(super) fn of_keys(self) -> [i64; 4] {
        [self.batch, self.kv_heads, self.keys, self.width]
    }

    /// `[batch, heads, keys, width]`: the keys, repeated for each query head.
    pub(super) fn of_repeated_keys(self) -> [i64; 4] {
        [self.batch, self.heads, self.keys, self.width]
    }

    /// Scores, `[batch, heads, queries, keys]`.
    pub(super) fn scores(self) -> Layout {
        Layout::packed([self.batch, self.heads, self.queries, self.keys])
    }

    /// A number for each query, `[batch, heads, queries, 1]`.
    pub(super) fn rows(self) -> Layout {
        Layout::packed([self.batch, self.heads, self.queries, 1])
    }

    /// Adds a tensor of the caller, except the log-sum-exp.
    pub(super) fn argument(
        self,
        graph: &mut Graph,
        argument: Argument,
        dims: [i64; 4],
    ) -> TensorId {
        graph.tensor(self.half, Layout::time_first(dims), Place::Argument(argument))
    }

    /// Adds the log-sum-exp.
    pub(super) fn lse(self, graph: &mut Graph) -> TensorId {
        graph.tensor(DataType::F32, self.rows(), Place::Argument(Argument::Lse))
    }
}
