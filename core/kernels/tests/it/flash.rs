//! Attention on tensor cores against its formula in f64.

use fulgurite_kernels::Float;
use fulgurite_kernels::plans::{Attention, flash_attention, flash_attention_backward};
use half::{bf16, f16};

use crate::attention::{Case, close, expected, wide};
use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// What the softmax's backward subtracts is of outputs that were rounded, as in FlashAttention-2.
const ROUNDINGS: f64 = 4.0;

/// Rows of `width` elements, `[batch, a, b]` of them, in the order of `[batch, b, a]`.
fn exchanged<T: Copy>(values: &[T], [a, b, width]: [usize; 3]) -> Vec<T> {
    let sequence = (a * b * width).max(1);
    let rows = values.chunks(sequence).flat_map(|x| {
        let row = move |i, j| &x[(i * b + j) * width..][..width];
        (0..b).flat_map(move |j| (0..a).flat_map(move |i| row(i, j)))
    });
    rows.copied().collect()
}

fn has_its_formula_and_gradient<T: Dtype>(case: &Case) {
    let mut of = case.of;
    let mut m = Machine::default();
    let (heads, width) = (of.kv_heads * of.group, of.width);
    let (rows, pairs) = (of.batch * heads * of.queries, of.batch * of.kv_heads * of.keys);
    // The formula has heads first.
    let [q, grad] = ["q", "grad"].map(|what| normal::<T>(what, rows * width));
    let [k, v] = ["k", "v"].map(|what| normal::<T>(what, pairs * width));
    let [q_at, grad_at] = [&q, &grad].map(|x| m.put(&exchanged(x, [heads, of.queries, width])));
    let [k_at, v_at] = [&k, &v].map(|x| m.put(&exchanged(x, [of.kv_heads, of.keys, width])));
    let [output, dq] = [(); 2].map(|()| m.garbage::<T>(rows * width));
    let [dk, dv] = [(); 2].map(|()| m.garbage::<T>(pairs * width));
    let lse = m.garbage::<f32>(rows);
    if case.documents.is_some() {
        of.firsts = m.put(&case.firsts());
    }
    let qkv = [q_at, k_at, v_at];
    m.run(&flash_attention(&of, qkv, output, lse));
    m.run(&flash_attention_backward(&of, qkv, [output, lse, grad_at], [dq, dk, dv]));

    let [y, z, want_dq, want_dk, want_dv] = expected(case, [&q, &k, &v, &grad]);
    close::<f32>("lse", &wide(&m.get::<f32>(lse)), &z, 2.0);
    for (what, at, want, heads, time) in [
        ("output", output, y, heads, of.queries),
        ("dq", dq, want_dq, heads, of.queries),
        ("dk", dk, want_dk, of.kv_heads, of.keys),
        ("dv", dv, want_dv, of.kv_heads, of.keys),
    ] {
        close::<T>(
            what,
            &wide(&exchanged(&m.get::<T>(at), [time, heads, width])),
            &want,
            ROUNDINGS,
        );
    }
}

/// `sizes`: batch, key heads, group, queries, keys, width.
fn check<T: Dtype>(sizes: [usize; 6], causal: bool, documents: Option<Vec<Vec<usize>>>) {
    let [batch, kv_heads, group, queries, keys, width] = sizes;
    let sizes = [batch, kv_heads, group, queries, keys, width, 0];
    has_its_formula_and_gradient::<T>(&Case::new::<T>(sizes, causal, documents));
}

#[test]
fn heads_and_sequences_have_places_of_their_own() {
    check::<bf16>([2, 2, 2, 5, 7, 8], true, None);
    check::<f16>([1, 2, 2, 5, 7, 8], true, None);
    check::<f16>([1, 1, 1, 3, 90, 104], true, None);
    check::<bf16>([0, 2, 2, 5, 7, 8], true, None);
}

#[test]
fn causal_queries_of_several_tiles_have_their_formula_and_gradient() {
    check::<bf16>([1, 1, 2, 140, 200, 64], true, None);
    check::<bf16>([1, 1, 1, 140, 140, 128], true, None);
}

#[test]
fn every_key_is_seen_without_an_order() {
    check::<bf16>([1, 1, 2, 130, 131, 40], false, None);
    check::<bf16>([1, 1, 1, 3, 200, 104], false, None);
}

#[test]
fn a_query_sees_its_document() {
    // Documents that begin and end within tiles, and tiles that nothing sees.
    let documents = vec![vec![0, 3, 130, 131, 290], vec![0, 200]];
    check::<bf16>([2, 1, 1, 300, 300, 16], true, Some(documents));
}

#[test]
fn what_it_does_not_take_is_said() {
    let of = Case::new::<bf16>([1, 1, 1, 3, 3, 8, 0], true, None).of;
    let is_flash = |of: Attention| of.is_flash();
    assert!(is_flash(of) && is_flash(Attention { width: 128, dtype: Float::F16, ..of }));
    for other in [
        Attention { dtype: Float::F32, ..of },
        Attention { width: 12, ..of },
        Attention { width: 136, ..of },
        Attention { scale: -0.1, ..of },
        Attention { scale: f32::NAN, ..of },
    ] {
        assert!(!is_flash(other), "{other:?}");
    }
}
