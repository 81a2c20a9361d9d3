//! Only the matrix products of a training step: a lower bound of the step's time with this library
//! for matrix products.

use fulgurite_core::nn::gemm::{Mat, Threads, gemm};
use rayon::prelude::*;

use super::DecoderSize;

/// Query block size of attention. Causal attention multiplies a block with the keys up to the
/// block's end.
const BLOCK: usize = 128;

/// The products of one rank's micro-batch, with memory to run them on.
pub(super) struct Floor {
    tokens: usize,
    /// Input and output width of each linear layer.
    linears: Vec<[usize; 2]>,
    /// Number of (sequence, head) pairs in all layers.
    heads: usize,
    head_dim: usize,
    seq: usize,
    x: Vec<f32>,
    y: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f32>,
}

impl Floor {
    /// The products of a rank that shares the layers with `tensor_parallel - 1` others.
    pub(super) fn new(
        size: &DecoderSize,
        batch: usize,
        seq: usize,
        tensor_parallel: usize,
    ) -> Self {
        let DecoderSize { vocab, dim, layers, heads, kv_heads, ffn } = *size;
        let head_dim = dim / heads;
        let part = |n: usize| n.div_ceil(tensor_parallel);
        let (q, kv) = (part(heads) * head_dim, part(kv_heads) * head_dim);
        let layer = [
            [dim, q],
            [dim, kv],
            [dim, kv],
            [q, dim],
            [dim, part(ffn)],
            [dim, part(ffn)],
            [part(ffn), dim],
        ];
        let mut linears: Vec<[usize; 2]> = (0..layers).flat_map(|_| layer).collect();
        linears.push([dim, part(vocab)]);
        let tokens = batch * seq;
        let widest = |i: usize| linears.iter().map(|linear| linear[i]).max().unwrap_or(0);
        let largest = linears.iter().map(|[inputs, outputs]| inputs * outputs).max().unwrap_or(0);
        Self {
            tokens,
            x: vec![0.01; tokens * widest(0)],
            y: vec![0.01; tokens * widest(1)],
            weight: vec![0.01; largest],
            out: vec![0.0; largest.max(tokens * widest(0)).max(tokens * widest(1))],
            linears,
            heads: layers * batch * part(heads),
            head_dim,
            seq,
        }
    }

    /// Computes all products once, with the layers' threads.
    pub(super) fn run(&mut self) {
        let n = self.tokens;
        for &[inputs, outputs] in &self.linears {
            let (x, y) = (Mat::new(&self.x, n, inputs), Mat::new(&self.y, n, outputs));
            let weight = Mat::new(&self.weight, outputs, inputs);
            gemm(&mut self.out, x, weight.t(), false, Threads::All);
            gemm(&mut self.out, y, weight, false, Threads::All);
            gemm(&mut self.out, y.t(), x, false, Threads::All);
        }
        let each = self.heads.div_ceil(rayon::current_num_threads());
        let parts: Vec<usize> =
            (0..self.heads).step_by(each.max(1)).map(|at| each.min(self.heads - at)).collect();
        parts.into_par_iter().for_each(|heads| self.attend(heads));
    }

    /// The products of attention. Forward: scores, output. Backward: scores, gradients of scores,
    /// values, queries and keys.
    fn attend(&self, heads: usize) {
        let (d, block) = (self.head_dim, BLOCK.min(self.seq));
        let rows = vec![0.01f32; self.seq * d];
        let mut sums = vec![0.01f32; self.seq * d];
        let mut scores = vec![0.01f32; block * self.seq];
        for _ in 0..heads {
            for start in (0..self.seq).step_by(block) {
                let n = block.min(self.seq - start);
                let seen = start + n;
                let one = Threads::One;
                let (queries, keys) = (Mat::new(&rows, n, d), Mat::new(&rows, seen, d));
                for _ in 0..3 {
                    gemm(&mut scores, queries, keys.t(), false, one);
                }
                for _ in 0..2 {
                    gemm(&mut sums, Mat::new(&scores, n, seen), keys, false, one);
                    gemm(&mut sums, Mat::new(&scores, n, seen).t(), queries, true, one);
                }
            }
        }
    }
}
