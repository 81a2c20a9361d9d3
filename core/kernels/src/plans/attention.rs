//! Attention: products of matrices, and the softmax between them, over some queries at a time.

use super::with_element;
use crate::{Float, In, Matrix, Out, Plan, Product, Start, table};

/// The sizes of queries, keys and values, and how they attend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// dtype of queries, keys, values and outputs. Scores and sums are in f32 whatever it is.
    pub dtype: Float,
    /// Number of sequences.
    pub batch: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Heads of queries for each of them.
    pub group: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head, at least one; with `causal` not fewer than queries, and the last query is at the last key.
    pub keys: usize,
    /// Elements of a query, key or value.
    pub width: usize,
    /// Whether a query sees only the keys up to its own position.
    pub causal: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// u32, `[batch, queries]`: the first key that each query sees; 0 if each sees the first.
    pub firsts: u64,
    /// With `causal`: how many keys a query sees at most, its own and those before it. At least one.
    pub window: Option<usize>,
}

/// Rows and columns of blocks are multiples of it where they can be, as products on tensor cores like them.
pub const TILE: usize = 16;

/// Queries of a window that are computed at once, at least: scores are of these and the window before them.
const IN_WINDOW: usize = 512;

/// Some queries of every head.
struct Block {
    start: usize,
    queries: usize,
    /// The first key that any of them sees, and how many from there on.
    base: usize,
    keys: usize,
    /// Heads of the group that are products of their own; 1 if the queries of all are one matrix.
    pieces: usize,
}

impl Attention {
    /// As many queries at once as have what [`attention_backward`] keeps of their scores in so many bytes, but at least [`TILE`],
    /// and a multiple of it. With a window not many more than it has keys, of which each query has the scores.
    pub fn queries_within(&self, bytes: usize) -> usize {
        // Scores and the gradient of the probabilities in f32, probabilities and the gradient of the scores in the dtype.
        let of_score = 2 * (Float::F32.size() + self.dtype.size());
        let most = match self.window {
            Some(window) => window.max(IN_WINDOW).next_multiple_of(TILE).min(self.queries),
            None => self.queries,
        };
        let keys = match self.window {
            // A block's first key is at a multiple of `TILE`.
            Some(window) => self.keys.min(most + window.saturating_add(TILE)),
            None => self.keys,
        };
        let queries = bytes / of_score / (self.heads() * keys).max(1);
        (queries / TILE * TILE).clamp(TILE.min(self.queries), most)
    }

    /// The keys of a window as kernels count them: `u32::MAX` are more than there are.
    pub(super) fn window(&self) -> u32 {
        self.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX))
    }

    /// Heads of queries of all sequences.
    pub(super) fn heads(&self) -> usize {
        self.batch * self.kv_heads * self.group
    }

    /// Panics if they cannot attend.
    pub(super) fn check(&self) {
        assert!(self.keys > 0, "attention needs a key");
        assert!(!self.causal || self.queries <= self.keys, "a causal query needs its own key");
        let has_window = self.window.is_none_or(|window| self.causal && window > 0);
        assert!(has_window, "a window is of causal attention, and has a query's own key");
    }

    fn blocks(&self, at_once: usize, first_key: &dyn Fn(usize) -> usize) -> Vec<Block> {
        self.check();
        let starts = (0..self.queries).step_by(at_once.max(1));
        let block = |start: usize| {
            let queries = at_once.min(self.queries - start);
            let position = self.keys - self.queries.min(self.keys) + start;
            let in_window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let base = first_key(start).max(in_window) / TILE * TILE;
            let end = match self.causal {
                true => self.keys - self.queries + start + queries,
                false => self.keys,
            };
            let pieces = if queries == self.queries { 1 } else { self.group };
            Block { start, queries, base, keys: end - base, pieces }
        };
        starts.map(block).collect()
    }

    /// Keys that a block's first query sees, from the block's first key on.
    fn visible(&self, block: &Block) -> usize {
        match self.causal {
            true => self.keys - self.queries + block.start + 1 - block.base,
            false => block.keys,
        }
    }

    /// Elements of the scores of the largest block.
    fn most_scores(&self, blocks: &[Block]) -> usize {
        blocks.iter().map(|b| self.heads() * b.queries * b.keys).max().unwrap_or(0)
    }

    /// The rows of a block in a tensor of all queries, piece `piece` of them.
    fn query_rows(&self, start: Start, block: &Block, piece: usize) -> Matrix {
        let skipped = (piece * self.queries + block.start) * self.width;
        Matrix {
            start: start.plus(skipped, self.dtype),
            row: self.width,
            stride: self.group * self.queries * self.width,
        }
    }

    /// The keys or values of a block, of this dtype.
    fn key_rows(&self, start: Start, block: &Block, dtype: Float) -> Matrix {
        Matrix {
            start: start.plus(block.base * self.width, dtype),
            row: self.width,
            stride: self.keys * self.width,
        }
    }

    /// The scores of a block, or what is as large.
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

/// A number that kernels take as 32 bits.
pub(super) fn small(n: usize) -> u32 {
    u32::try_from(n).expect("less than 2^32 positions, and rows that are launched at once")
}

/// The output (`[batch, heads, queries, width]`, as all tensors), and the log-sum-exp of each query's scores (f32,
/// `[batch, heads, queries]`). The scores of `at_once` queries are in memory at once. `first_key` is the first key that
/// any query from this one on sees.
pub fn attention(
    of: &Attention,
    at_once: usize,
    first_key: &dyn Fn(usize) -> usize,
    [q, k, v]: [u64; 3],
    output: u64,
    lse: u64,
) -> Plan {
    let mut plan = Plan::default();
    let blocks = of.blocks(at_once, first_key);
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
                small(of.kv_heads * of.group),
                small(block.queries),
                small(of.queries),
                small(block.start),
                small(block.keys),
                u32::from(of.causal),
                small(of.visible(block)),
                small(block.base),
                of.window(),
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

/// The gradients of [`attention`]: that of the queries is written to `dq`, in their dtype; those of keys and values are added
/// to `dk` and `dv`, which are f32. `grad` is that of the output. Scores are computed again.
pub fn attention_backward(
    of: &Attention,
    at_once: usize,
    first_key: &dyn Fn(usize) -> usize,
    [q, k, v]: [u64; 3],
    [grad, lse]: [u64; 2],
    [dq, dk, dv]: [u64; 3],
) -> Plan {
    let mut plan = Plan::default();
    let blocks = of.blocks(at_once, first_key);
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
                probabilities,
                dscores,
                small(of.kv_heads * of.group),
                small(block.queries),
                small(of.queries),
                small(block.start),
                small(block.keys),
                u32::from(of.causal),
                small(of.visible(block)),
                small(block.base),
                of.window(),
                of.scale,
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
