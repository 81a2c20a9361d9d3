//! Attention by matrix products with a softmax between them, over some queries at a time.

use std::ops::Range;

use super::with_element;
use crate::{Float, In, Matrix, Out, Plan, Product, Start, table};

/// The sizes of queries, keys and values, and how they attend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// dtype of queries, keys, values and outputs. Scores and sums are always in f32.
    pub dtype: Float,
    /// Number of sequences.
    pub batch: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Heads of queries for each head of keys.
    pub group: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head, at least one. With `causal`, every query has a key at its position.
    pub keys: usize,
    /// Elements of a query, key or value.
    pub width: usize,
    /// The position of the first query among the keys; `None` if the last query is at the last
    /// key's position, or if there are more queries than keys and the first is at the first.
    pub first_query: Option<usize>,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// The bound `c` of the scores, which become `c * tanh(score / c)`.
    pub softcap: Option<f32>,
    /// Address of the first key that each query sees, u32 `[batch, queries]`; 0 if all see key 0.
    pub firsts: u64,
    /// Address of the end of the keys that each query sees, u32 `[batch, queries]`; 0 if all see
    /// the last key. Neither first keys nor ends decrease from query to query.
    pub ends: u64,
    /// With `causal`: the most keys that a query sees, including its own; at least one. Otherwise
    /// the largest distance to a key on each side.
    pub window: Option<usize>,
}

/// Block sizes are multiples of this where possible, for the sake of tensor cores.
pub const TILE: usize = 16;

/// With a window, at most this many queries are computed at once, or as many as the window has keys
/// if these are more. Scores cover the queries and the window before them.
const IN_WINDOW: usize = 512;

/// A block of queries, of every head.
struct Block {
    start: usize,
    queries: usize,
    /// The first key that any of the queries sees.
    base: usize,
    keys: usize,
    /// Products per group: one for each head, or 1 if the queries of all heads are one matrix.
    pieces: usize,
}

/// A function from queries to the keys of their documents, from the first key of any of them to the
/// last.
pub type Seen<'a> = dyn Fn(Range<usize>) -> Range<usize> + 'a;

impl Attention {
    /// Returns how many queries to compute at once so that the buffers of [`attention_backward`]
    /// for their scores fit in `bytes`. The result is all queries, or a multiple of [`TILE`] and at
    /// least `TILE`. With a window it is at most about the window or 512, whichever is
    /// larger, because every query has scores for all keys of the block.
    pub fn queries_within(&self, bytes: usize) -> usize {
        // Scores and the probabilities' gradient in f32; probabilities and the scores' gradient in
        // the dtype.
        let of_score = 2 * (Float::F32.size() + self.dtype.size());
        let most = match self.window {
            Some(window) => window.max(IN_WINDOW).next_multiple_of(TILE).min(self.queries),
            None => self.queries,
        };
        let keys = match self.window {
            // A block's first key is a multiple of `TILE`.
            Some(window) => {
                let sides = if self.causal { 1 } else { 2 };
                let around = window.saturating_mul(sides).saturating_add(TILE);
                self.keys.min(most.saturating_add(around))
            }
            None => self.keys,
        };
        let queries = bytes / of_score / (self.heads() * keys).max(1);
        (queries / TILE * TILE).clamp(TILE.min(self.queries), most)
    }

    fn position(&self) -> usize {
        self.first_query.unwrap_or(self.keys.saturating_sub(self.queries))
    }

    /// Returns the position of the first query.
    pub(super) fn place(&self) -> u32 {
        small(self.position())
    }

    /// Returns how many keys before its own a query sees; `u32::MAX` for all.
    pub(super) fn before(&self) -> u32 {
        let of_window = |window: usize| u32::try_from(window - usize::from(self.causal));
        self.window.map_or(u32::MAX, |window| of_window(window).unwrap_or(u32::MAX))
    }

    /// Returns how many keys behind its own a query sees; `u32::MAX` for all.
    pub(super) fn after(&self) -> u32 {
        if self.causal { 0 } else { self.before() }
    }

    /// Returns the cap as kernels take it: 0 for none.
    pub(super) fn cap(&self) -> f32 {
        self.softcap.unwrap_or(0.0)
    }

    /// Returns the number of query heads of all sequences.
    pub(super) fn heads(&self) -> usize {
        self.batch * self.kv_heads * self.group
    }

    /// Checks the sizes and the window; panics if they do not fit.
    pub(super) fn check(&self) {
        assert!(self.keys > 0, "attention needs a key");
        let is_own = self.position().saturating_add(self.queries) <= self.keys;
        assert!(!self.causal || is_own, "a causal query needs its own key");
        let has_window = self.window.is_none_or(|window| !self.causal || window > 0);
        assert!(has_window, "a causal window has a query's own key");
    }

    fn blocks(&self, at_once: usize, seen: &Seen<'_>) -> Vec<Block> {
        self.check();
        let starts = (0..self.queries).step_by(at_once.max(1));
        let block = |start: usize| {
            let queries = at_once.min(self.queries - start);
            let of_documents = seen(start..start + queries);
            let (first, last) = (self.position() + start, self.position() + start + queries - 1);
            let in_window = first.saturating_sub(self.before() as usize);
            let base = of_documents.start.max(in_window).min(self.keys - 1) / TILE * TILE;
            let end = self.keys.min(last.saturating_add(self.after() as usize).saturating_add(1));
            let end = end.min(of_documents.end).max(base + 1);
            let pieces = if queries == self.queries { 1 } else { self.group };
            Block { start, queries, base, keys: end - base, pieces }
        };
        starts.map(block).collect()
    }

    /// Returns the position of a block's first query, counted from the block's first key.
    fn position_in(&self, block: &Block) -> usize {
        self.position() + block.start - block.base
    }

    /// Returns the number of scores of the largest block.
    fn most_scores(&self, blocks: &[Block]) -> usize {
        blocks.iter().map(|b| self.heads() * b.queries * b.keys).max().unwrap_or(0)
    }

    /// Returns the rows of a block in a tensor of all queries, for one piece.
    fn query_rows(&self, start: Start, block: &Block, piece: usize) -> Matrix {
        let skipped = (piece * self.queries + block.start) * self.width;
        Matrix {
            start: start.plus(skipped, self.dtype),
            row: self.width,
            stride: self.group * self.queries * self.width,
        }
    }

    /// Returns the keys or values of a block, in this dtype.
    fn key_rows(&self, start: Start, block: &Block, dtype: Float) -> Matrix {
        Matrix {
            start: start.plus(block.base * self.width, dtype),
            row: self.width,
            stride: self.keys * self.width,
        }
    }

    /// Returns the scores of a block, or another matrix of that shape.
    fn score_rows(&self, start: Start, block: &Block, piece: usize, dtype: Float) -> Matrix {
        Matrix {
            start: start.plus(piece * block.queries * block.keys, dtype),
            row: block.keys,
            stride: self.group * block.queries * block.keys,
        }
    }

    fn product(
        &self,
        plan: &mut Plan,
        dtypes: [Float; 2],
        matrices: [Matrix; 3],
        (transposed, alpha, add): ([bool; 2], f32, bool),
        sizes: [usize; 3],
    ) {
        let batch = self.batch * self.kv_heads;
        let product = Product::of_rows(dtypes, matrices, transposed, sizes, batch, add);
        plan.product(Product { alpha, ..product.expect("sizes below 2^31") });
    }
}

/// Converts a size to the 32 bits that kernels take.
pub(super) fn small(n: usize) -> u32 {
    u32::try_from(n).expect("less than 2^32 positions, and rows that are launched at once")
}

/// Computes the output and the log-sum-exp of each query's scores (f32, `[batch, heads, queries]`).
/// Queries and outputs are `[batch, heads, queries, width]`, keys and values
/// `[batch, kv_heads, keys, width]`. The scores of `at_once` queries are in memory at a time.
/// `seen` tells the keys of queries' documents.
pub fn attention(
    of: &Attention,
    at_once: usize,
    seen: &Seen<'_>,
    [q, k, v]: [u64; 3],
    output: u64,
    lse: u64,
) -> Plan {
    let mut plan = Plan::default();
    let blocks = of.blocks(at_once, seen);
    let [q, k, v, output] = [q, k, v, output].map(Start::at);
    with_element!(of.dtype, T => {
        let scores = plan.scratch::<f32>(of.most_scores(&blocks));
        let probabilities = plan.scratch::<T>(of.most_scores(&blocks));
        let [s, p] = [scores.target(), probabilities.target()].map(|target| Start { target, offset: 0 });
        for block in &blocks {
            let (rows, width) = (of.group / block.pieces * block.queries, of.width);
            for piece in 0..block.pieces {
                let matrices = [of.query_rows(q, block, piece), of.key_rows(k, block, of.dtype), of.score_rows(s, block, piece, Float::F32)];
                let how = ([false, true], of.scale, false);
                of.product(&mut plan, [of.dtype, Float::F32], matrices, how, [rows, block.keys, width]);
            }
            plan.call(table::attention_softmax::<T>(
                small(of.heads() * block.queries),
                scores.read(),
                probabilities,
                Out::at(lse),
                In::at(of.firsts),
                In::at(of.ends),
                small(of.kv_heads * of.group),
                small(block.queries),
                small(of.queries),
                small(block.start),
                small(block.keys),
                small(of.position_in(block)),
                of.before(),
                of.after(),
                small(block.base),
                of.cap(),
            ));
            for piece in 0..block.pieces {
                let matrices = [of.score_rows(p, block, piece, of.dtype), of.key_rows(v, block, of.dtype), of.query_rows(output, block, piece)];
                let how = ([false, false], 1.0, false);
                of.product(&mut plan, [of.dtype; 2], matrices, how, [rows, width, block.keys]);
            }
        }
    });
    plan
}

/// Computes the gradients of [`attention`]. The gradient of the queries is written to `dq` in their
/// dtype; the gradients of keys and values are added to `dk` and `dv` in f32. `grad` is the
/// gradient of the output. Scores are recomputed.
pub fn attention_backward(
    of: &Attention,
    at_once: usize,
    seen: &Seen<'_>,
    [q, k, v]: [u64; 3],
    [grad, lse]: [u64; 2],
    [dq, dk, dv]: [u64; 3],
) -> Plan {
    let mut plan = Plan::default();
    let blocks = of.blocks(at_once, seen);
    let [q, k, v, grad] = [q, k, v, grad].map(Start::at);
    let [dq, dk, dv] = [dq, dk, dv].map(Start::at);
    let (dtype, wide) = (of.dtype, Float::F32);
    with_element!(dtype, T => {
        let [scores, grads] = [(); 2].map(|()| plan.scratch::<f32>(of.most_scores(&blocks)));
        let [probabilities, dscores] = [(); 2].map(|()| plan.scratch::<T>(of.most_scores(&blocks)));
        let [s, dp, p, ds] = [scores.target(), grads.target(), probabilities.target(), dscores.target()]
            .map(|target| Start { target, offset: 0 });
        for block in &blocks {
            let (rows, width) = (of.group / block.pieces * block.queries, of.width);
            let (keys, values) = (of.key_rows(k, block, dtype), of.key_rows(v, block, dtype));
            for piece in 0..block.pieces {
                let how = |alpha| ([false, true], alpha, false);
                let sizes = [rows, block.keys, width];
                let matrices = [of.query_rows(q, block, piece), keys, of.score_rows(s, block, piece, wide)];
                of.product(&mut plan, [dtype, wide], matrices, how(of.scale), sizes);
                let matrices = [of.query_rows(grad, block, piece), values, of.score_rows(dp, block, piece, wide)];
                of.product(&mut plan, [dtype, wide], matrices, how(1.0), sizes);
            }
            plan.call(table::attention_softmax_backward::<T>(
                small(of.heads() * block.queries),
                scores.read(),
                grads.read(),
                In::at(lse),
                In::at(of.firsts),
                In::at(of.ends),
                probabilities,
                dscores,
                small(of.kv_heads * of.group),
                small(block.queries),
                small(of.queries),
                small(block.start),
                small(block.keys),
                small(of.position_in(block)),
                of.before(),
                of.after(),
                small(block.base),
                of.scale,
                of.cap(),
            ));
            for piece in 0..block.pieces {
                let of_scores = |start| of.score_rows(start, block, piece, dtype);
                let matrices = [of_scores(ds), keys, of.query_rows(dq, block, piece)];
                of.product(&mut plan, [dtype; 2], matrices, ([false, false], 1.0, false), [rows, width, block.keys]);
                let (how, sizes) = (([true, false], 1.0, true), [block.keys, width, rows]);
                let matrices = [of_scores(ds), of.query_rows(q, block, piece), of.key_rows(dk, block, wide)];
                of.product(&mut plan, [dtype, wide], matrices, how, sizes);
                let matrices = [of_scores(p), of.query_rows(grad, block, piece), of.key_rows(dv, block, wide)];
                of.product(&mut plan, [dtype, wide], matrices, how, sizes);
            }
        }
    });
    plan
}
