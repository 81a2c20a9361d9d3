//! Attention against its formula in f64, with products as cuBLAS documents them.

use std::ops::Range;

use fulgurite_kernels::Plan;
use fulgurite_kernels::plans::{Attention, attention, attention_backward};
use half::{bf16, f16};

use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// An attention, and the beginnings of the documents in each sequence.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) of: Attention,
    at_once: usize,
    pub(crate) documents: Option<Vec<Vec<usize>>>,
}

impl Case {
    /// `sizes`: batch, key heads, group, queries, keys, width, queries at once.
    pub(crate) fn new<T: Dtype>(
        sizes: [usize; 7],
        causal: bool,
        documents: Option<Vec<Vec<usize>>>,
    ) -> Self {
        let [batch, kv_heads, group, queries, keys, width, at_once] = sizes;
        let (dtype, scale, firsts) = (T::FLOAT, 0.4, 0);
        let of = Attention {
            dtype,
            batch,
            kv_heads,
            group,
            queries,
            keys,
            width,
            causal,
            scale,
            firsts,
            ends: 0,
            window: None,
            first_query: None,
            softcap: None,
        };
        Self { of, at_once, documents }
    }

    /// Adds a window.
    pub(crate) fn within(self, window: usize) -> Self {
        Self { of: Attention { window: Some(window), ..self.of }, ..self }
    }

    /// Bounds the scores.
    pub(crate) fn capped(self, softcap: f32) -> Self {
        Self { of: Attention { softcap: Some(softcap), ..self.of }, ..self }
    }

    /// Places the first query.
    pub(crate) fn from(self, first_query: usize) -> Self {
        Self { of: Attention { first_query: Some(first_query), ..self.of }, ..self }
    }

    /// The first key of each query's document.
    fn first(&self, sequence: usize, query: usize) -> usize {
        let begins = |documents: &Vec<Vec<usize>>| {
            documents[sequence].iter().copied().filter(|&begin| begin <= query).max()
        };
        self.documents.as_ref().and_then(begins).unwrap_or(0)
    }

    /// Returns the first key of every query, `[batch, queries]`.
    pub(crate) fn firsts(&self) -> Vec<u32> {
        let of = self.of;
        (0..of.batch * of.queries)
            .map(|i| self.first(i / of.queries, i % of.queries) as u32)
            .collect()
    }

    /// The end of each query's document.
    fn end(&self, sequence: usize, query: usize) -> usize {
        let ends = |documents: &Vec<Vec<usize>>| {
            documents[sequence].iter().copied().filter(|&begin| begin > query).min()
        };
        self.documents.as_ref().and_then(ends).unwrap_or(self.of.keys)
    }

    /// Returns the end of the keys of every query, `[batch, queries]`.
    pub(crate) fn ends(&self) -> Vec<u32> {
        let of = self.of;
        (0..of.batch * of.queries)
            .map(|i| self.end(i / of.queries, i % of.queries) as u32)
            .collect()
    }

    /// The keys of the documents of some queries of all sequences.
    fn seen(&self, queries: Range<usize>) -> Range<usize> {
        let sequences = 0..self.of.batch;
        let first = sequences.clone().map(|i| self.first(i, queries.start)).min().unwrap_or(0);
        first..sequences.map(|i| self.end(i, queries.end - 1)).max().unwrap_or(self.of.keys)
    }

    /// The keys that a query sees, by the definition.
    fn keys_of(&self, sequence: usize, query: usize) -> Vec<usize> {
        let of = self.of;
        let position = query + of.first_query.unwrap_or(of.keys.saturating_sub(of.queries));
        let document = self.first(sequence, query)..self.end(sequence, query);
        let is_seen = |&key: &usize| {
            let is_near = of.window.is_none_or(|window| match of.causal {
                true => position < key + window,
                false => position.abs_diff(key) <= window,
            });
            document.contains(&key) && is_near && (!of.causal || key <= position)
        };
        (0..of.keys).filter(is_seen).collect()
    }
}

/// Computes `[output, lse, dq, dk, dv]` by the formula; tensors are `[batch, heads, time, width]`.
pub(crate) fn expected<T: Dtype>(case: &Case, [q, k, v, grad]: [&[T]; 4]) -> [Vec<f64>; 5] {
    let of = case.of;
    let (heads, width, scale) = (of.kv_heads * of.group, of.width, f64::from(of.scale));
    let mut all =
        [q.len(), q.len() / width.max(1), q.len(), k.len(), v.len()].map(|n| vec![0.0; n]);
    let [output, lse, dq, dk, dv] = &mut all;
    for row in 0..of.batch * heads * of.queries {
        let (head, i) = (row / of.queries, row % of.queries);
        let kv = head / of.group;
        let seen = case.keys_of(head / heads, i);
        let at = |x: &[T], row: usize, d: usize| x[row * width + d].to_f64();
        let dot = |x: &[T], y: &[T], j: usize| -> f64 {
            (0..width).map(|d| at(x, row, d) * at(y, kv * of.keys + j, d)).sum()
        };
        let cap = of.softcap.map_or(f64::INFINITY, f64::from);
        let bounded = |z: f64| if cap.is_finite() { cap * (z / cap).tanh() } else { z };
        let scores: Vec<f64> = seen.iter().map(|&j| bounded(scale * dot(q, k, j))).collect();
        let exp: Vec<f64> = scores.iter().map(|z| z.exp()).collect();
        let sum: f64 = exp.iter().sum();
        lse[row] = sum.ln();
        let p: Vec<f64> = exp.iter().map(|e| e / sum).collect();
        let dp: Vec<f64> = seen.iter().map(|&j| dot(grad, v, j)).collect();
        let level: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for (n, j) in seen.into_iter().enumerate() {
            let slope = 1.0 - (scores[n] / cap).powi(2);
            let ds = scale * p[n] * (dp[n] - level) * slope;
            let key = kv * of.keys + j;
            for d in 0..width {
                output[row * width + d] += p[n] * at(v, key, d);
                dq[row * width + d] += ds * at(k, key, d);
                dk[key * width + d] += ds * at(q, row, d);
                dv[key * width + d] += p[n] * at(grad, row, d);
            }
        }
    }
    all
}

/// Compares with a tolerance of `roundings` roundings, in the dtype, of the largest elements.
pub(crate) fn close<T: Dtype>(what: &str, got: &[f64], expected: &[f64], roundings: f64) {
    let rounding = match T::FLOAT.name() {
        "bf16" => 1.0 / 256.0,
        "f16" => 1.0 / 2048.0,
        _ => 2e-6,
    };
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    assert_eq!(got.len(), expected.len(), "{what}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let off = (got - expected).abs();
        assert!(
            off <= roundings * rounding * largest,
            "{what}, {} element {i}: {got}, not {expected}, of at most {largest}",
            T::FLOAT.name()
        );
    }
}

pub(crate) fn wide<T: Dtype>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

fn has_its_formula_and_gradient<T: Dtype>(case: Case) {
    let mut of = case.of;
    let mut m = Machine::default();
    let rows = of.batch * of.kv_heads * of.group * of.queries;
    let pairs = of.batch * of.kv_heads * of.keys;
    let [q, grad] = ["q", "grad"].map(|what| normal::<T>(what, rows * of.width));
    let [k, v] = ["k", "v"].map(|what| normal::<T>(what, pairs * of.width));
    let [q_at, k_at, v_at, grad_at] = [&q, &k, &v, &grad].map(|x| m.put(x));
    let [output, dq] = [(); 2].map(|()| m.garbage::<T>(rows * of.width));
    let lse = m.garbage::<f32>(rows);
    // Gradients are added to the existing values.
    let start: Vec<f32> = normal("start", pairs * of.width);
    let [dk, dv] = [(); 2].map(|()| m.put(&start));
    if case.documents.is_some() {
        of.firsts = m.put(&case.firsts());
        of.ends = m.put(&case.ends());
    }
    let seen = |queries| case.seen(queries);
    m.run(&attention(&of, case.at_once, &seen, [q_at, k_at, v_at], output, lse));
    let qkv = [q_at, k_at, v_at];
    m.run(&attention_backward(&of, case.at_once, &seen, qkv, [grad_at, lse], [dq, dk, dv]));

    let [y, z, want_dq, want_dk, want_dv] = expected(&case, [&q, &k, &v, &grad]);
    close::<T>("output", &wide(&m.get::<T>(output)), &y, 2.0);
    close::<f32>("lse", &wide(&m.get::<f32>(lse)), &z, 2.0);
    close::<T>("dq", &wide(&m.get::<T>(dq)), &want_dq, 2.0);
    for (what, at, want) in [("dk", dk, want_dk), ("dv", dv, want_dv)] {
        let added: Vec<f64> =
            m.get::<f32>(at).iter().zip(&start).map(|(x, s)| f64::from(x - s)).collect();
        close::<T>(what, &added, &want, 2.0);
    }
}

fn in_all_shapes<T: Dtype>() {
    let documents = Some(vec![vec![0, 3, 29, 30], vec![0, 22]]);
    let packed = documents.clone();
    for case in [
        // All queries at once, so the heads of a group are one matrix, and in blocks, so they are
        // not.
        Case::new::<T>([2, 2, 3, 5, 5, 4, 5], true, None),
        Case::new::<T>([1, 2, 2, 19, 19, 3, 16], true, None),
        Case::new::<T>([1, 1, 1, 3, 300, 8, 2], true, None),
        Case::new::<T>([3, 1, 2, 4, 257, 5, 3], false, None),
        Case::new::<T>([2, 1, 2, 34, 34, 4, 16], true, documents),
        Case::new::<T>([0, 2, 1, 4, 4, 4, 4], true, None),
        // Windows within a block, over several blocks, and larger than some queries need.
        Case::new::<T>([1, 2, 2, 19, 21, 3, 16], true, None).within(2),
        Case::new::<T>([2, 1, 1, 70, 90, 4, 16], true, None).within(20),
        Case::new::<T>([2, 1, 2, 34, 34, 4, 16], true, packed.clone()).within(9),
        // Windows to both sides, and documents without order.
        Case::new::<T>([1, 2, 2, 70, 70, 3, 16], false, None).within(9),
        Case::new::<T>([1, 1, 1, 5, 40, 4, 5], false, None).within(0),
        Case::new::<T>([2, 1, 2, 34, 34, 4, 16], false, packed.clone()),
        Case::new::<T>([2, 1, 2, 34, 34, 4, 16], false, packed.clone()).within(3),
        // Queries in the middle of the keys, and more queries than keys.
        Case::new::<T>([1, 1, 2, 20, 90, 4, 16], true, None).from(30).within(11),
        Case::new::<T>([1, 1, 2, 20, 90, 4, 16], false, None).from(30).within(11),
        Case::new::<T>([2, 1, 1, 9, 4, 4, 3], false, None),
        // Bounded scores.
        Case::new::<T>([1, 2, 2, 19, 21, 3, 16], true, None).capped(1.5),
        Case::new::<T>([2, 1, 2, 34, 34, 4, 16], false, packed).within(9).capped(0.5),
    ] {
        has_its_formula_and_gradient::<T>(case);
    }
}

#[test]
fn attention_in_f32_matches_its_formula() {
    in_all_shapes::<f32>();
}

#[test]
fn attention_in_bf16_matches_its_formula() {
    in_all_shapes::<bf16>();
}

#[test]
fn attention_in_f16_matches_its_formula() {
    in_all_shapes::<f16>();
}

#[test]
fn scores_in_memory_are_bounded() {
    fn in_memory<T: Dtype>(keys: usize, limit: usize) -> (usize, usize) {
        let of = Case::new::<T>([8, 8, 4, keys, keys, 64, 0], true, None).of;
        let at_once = of.queries_within(limit);
        let bytes = |plan: Plan| plan.scratch_bytes().iter().sum::<usize>();
        let forward = bytes(attention(&of, at_once, &|_| 0..usize::MAX, [1; 3], 1, 1));
        let backward =
            bytes(attention_backward(&of, at_once, &|_| 0..usize::MAX, [1; 3], [1; 2], [1; 3]));
        assert!(2 * forward == backward, "{forward} {backward}");
        (at_once, backward)
    }
    let limit = 768 << 20;
    for (at_once, bytes) in [in_memory::<bf16>(8192, limit), in_memory::<f32>(8192, limit)] {
        // Within the limit, and at least half of it.
        assert!(at_once % 16 == 0 && bytes <= limit && 2 * bytes > limit, "{at_once} {bytes}");
    }
    // The scores of a window do not grow with the sequence.
    let within = |keys: usize, window| {
        let of = Case::new::<bf16>([1, 8, 4, keys, keys, 64, 0], true, None).within(window).of;
        let at_once = of.queries_within(limit);
        let plan = attention_backward(&of, at_once, &|_| 0..usize::MAX, [1; 3], [1; 2], [1; 3]);
        (at_once, plan.scratch_bytes().iter().sum::<usize>())
    };
    let (at_once, bytes) = within(1 << 16, 4096);
    assert!(at_once % 16 == 0 && bytes <= limit && 4 * bytes > limit, "{at_once} {bytes}");
    assert_eq!(within(1 << 16, 512), within(1 << 20, 512));
    assert_eq!(within(1 << 16, 512).0, 512);
    // 16 queries for very long sequences, even beyond the limit; all queries for short ones.
    assert_eq!(in_memory::<bf16>(1 << 20, limit).0, 16);
    assert_eq!(in_memory::<bf16>(7, limit).0, 7);
}
