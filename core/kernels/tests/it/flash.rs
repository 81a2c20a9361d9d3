//! Attention on tensor cores against its formula in f64.

use fulgurite_kernels::plans::{Attention, flash_attention, flash_attention_backward};
use fulgurite_kernels::{Float, Plan};
use half::{bf16, f16};

use crate::attention::{Case, close, expected, wide};
use crate::numbers::{Dtype, normal};
use crate::shim::Machine;

/// The softmax's backward subtracts sums of rounded outputs, as in FlashAttention-2.
const ROUNDINGS: f64 = 4.0;

/// Reorders rows of `width` elements from `[batch, a, b]` to `[batch, b, a]`.
pub(crate) fn exchanged<T: Copy>(values: &[T], [a, b, width]: [usize; 3]) -> Vec<T> {
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
    // The formula has heads before time.
    let [q, grad] = ["q", "grad"].map(|what| normal::<T>(what, rows * width));
    let [k, v] = ["k", "v"].map(|what| normal::<T>(what, pairs * width));
    let [q_at, grad_at] = [&q, &grad].map(|x| m.put(&exchanged(x, [heads, of.queries, width])));
    let [k_at, v_at] = [&k, &v].map(|x| m.put(&exchanged(x, [of.kv_heads, of.keys, width])));
    let [output, dq] = [(); 2].map(|()| m.garbage::<T>(rows * width));
    let [dk, dv] = [(); 2].map(|()| m.garbage::<T>(pairs * width));
    let lse = m.garbage::<f32>(rows);
    if case.documents.is_some() {
        of.firsts = m.put(&case.firsts());
        of.ends = m.put(&case.ends());
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
fn case<T: Dtype>(sizes: [usize; 6], causal: bool, documents: Option<Vec<Vec<usize>>>) -> Case {
    let [batch, kv_heads, group, queries, keys, width] = sizes;
    Case::new::<T>([batch, kv_heads, group, queries, keys, width, 0], causal, documents)
}

fn check<T: Dtype>(sizes: [usize; 6], causal: bool, documents: Option<Vec<Vec<usize>>>) {
    has_its_formula_and_gradient::<T>(&case::<T>(sizes, causal, documents));
}

fn check_within<T: Dtype>(sizes: [usize; 6], window: usize, documents: Option<Vec<Vec<usize>>>) {
    has_its_formula_and_gradient::<T>(&case::<T>(sizes, true, documents).within(window));
}

#[test]
fn heads_and_sequences_have_places_of_their_own() {
    check::<bf16>([2, 2, 2, 5, 7, 8], true, None);
    check::<f16>([1, 2, 2, 5, 7, 8], true, None);
    check::<f16>([1, 1, 1, 3, 90, 104], true, None);
    check::<bf16>([0, 2, 2, 5, 7, 8], true, None);
}

#[test]
fn causal_queries_of_several_tiles() {
    check::<bf16>([1, 1, 2, 140, 200, 64], true, None);
    check::<bf16>([1, 1, 1, 140, 140, 128], true, None);
}

#[test]
fn all_keys_are_seen_without_causal() {
    check::<bf16>([1, 1, 2, 130, 131, 40], false, None);
    check::<bf16>([1, 1, 1, 3, 200, 104], false, None);
}

#[test]
fn a_query_sees_its_document() {
    // Documents that begin and end within tiles, and tiles that no query sees.
    let documents = vec![vec![0, 3, 130, 131, 290], vec![0, 200]];
    check::<bf16>([2, 1, 1, 300, 300, 16], true, Some(documents));
}

#[test]
fn heads_of_256_have_their_formula_and_gradient() {
    check::<bf16>([1, 1, 2, 70, 140, 256], true, None);
    check::<f16>([1, 2, 1, 67, 65, 200], false, None);
    let documents = vec![vec![0, 3, 67, 68], vec![0, 40]];
    check::<bf16>([2, 1, 1, 70, 70, 136], true, Some(documents));
}

#[test]
fn a_query_sees_its_window() {
    // Windows of two keys, of less than a tile, across tiles, and larger than some queries need.
    check_within::<bf16>([2, 1, 2, 5, 7, 8], 2, None);
    check_within::<f16>([1, 1, 1, 140, 200, 64], 17, None);
    check_within::<bf16>([1, 1, 2, 260, 300, 16], 130, None);
    check_within::<bf16>([1, 1, 1, 140, 140, 128], 100, None);
    check_within::<bf16>([1, 1, 2, 70, 140, 256], 33, None);
}

#[test]
fn documents_end_windows() {
    let documents = vec![vec![0, 3, 130, 131, 290], vec![0, 200]];
    check_within::<bf16>([2, 1, 1, 300, 300, 16], 70, Some(documents));
}

/// Attention without causal order.
fn around<T: Dtype>(sizes: [usize; 6], documents: Option<Vec<Vec<usize>>>) -> Case {
    case::<T>(sizes, false, documents)
}

#[test]
fn windows_reach_to_both_sides() {
    has_its_formula_and_gradient::<f16>(&around::<f16>([2, 1, 2, 7, 7, 8], None).within(0));
    has_its_formula_and_gradient::<bf16>(&around::<bf16>([1, 1, 2, 300, 300, 16], None).within(40));
    has_its_formula_and_gradient::<bf16>(
        &around::<bf16>([1, 1, 1, 140, 140, 128], None).within(64),
    );
    has_its_formula_and_gradient::<bf16>(&around::<bf16>([1, 1, 1, 70, 70, 256], None).within(20));
}

#[test]
fn documents_have_ends_without_order() {
    let documents = vec![vec![0, 3, 130, 131, 290], vec![0, 200]];
    let of = around::<bf16>([2, 1, 1, 300, 300, 16], Some(documents));
    has_its_formula_and_gradient::<bf16>(&of);
    has_its_formula_and_gradient::<bf16>(&of.clone().within(50));
    let documents = vec![vec![0, 3, 67, 68], vec![0, 40]];
    has_its_formula_and_gradient::<bf16>(&around::<bf16>([2, 1, 1, 70, 70, 136], Some(documents)));
}

#[test]
fn queries_in_the_middle_of_the_keys() {
    for causal in [true, false] {
        let of = case::<bf16>([1, 1, 2, 100, 300, 16], causal, None).from(130);
        has_its_formula_and_gradient::<bf16>(&of);
        has_its_formula_and_gradient::<bf16>(&of.clone().within(70));
    }
    has_its_formula_and_gradient::<bf16>(&around::<bf16>([1, 1, 1, 90, 7, 16], None));
}

#[test]
fn scores_are_bounded() {
    // Standard normal scores times 0.4 times the root of the width are far beyond a cap of 2.
    has_its_formula_and_gradient::<f16>(&case::<f16>([2, 2, 2, 5, 7, 8], true, None).capped(2.0));
    has_its_formula_and_gradient::<bf16>(
        &around::<bf16>([1, 1, 2, 130, 131, 40], None).capped(2.0),
    );
    let windowed = case::<bf16>([1, 1, 1, 140, 140, 128], true, None).within(100);
    has_its_formula_and_gradient::<bf16>(&windowed.capped(2.0));
    has_its_formula_and_gradient::<bf16>(
        &case::<bf16>([1, 1, 2, 70, 80, 256], true, None).capped(5.0),
    );
    let documents = vec![vec![0, 3, 67, 68], vec![0, 40]];
    let packed = around::<bf16>([2, 1, 1, 70, 70, 16], Some(documents)).within(30);
    has_its_formula_and_gradient::<bf16>(&packed.capped(1.0));
}

/// Keys before the first block that a window reaches have no effect, even if they are NaN.
#[test]
fn keys_before_windows_are_not_read() {
    for width in [64, 128, 256] {
        let mut of = case::<bf16>([1, 1, 1, 128, 640, width], true, None).within(130).of;
        // The first query sees the keys from 383 on, in the block of 128 keys that begins at 256.
        let (unread, seen) = (256 * width, 640 * width);
        let mut m = Machine::default();
        let [q, grad] = ["q", "grad"].map(|what| m.put(&normal::<bf16>(what, 128 * width)));
        let [k, v] = ["k", "v"].map(|what| {
            let mut rows = normal::<bf16>(what, seen);
            rows[..unread].fill(bf16::NAN);
            m.put(&rows)
        });
        let [y, dq] = [(); 2].map(|()| m.garbage::<bf16>(128 * width));
        let [dk, dv] = [(); 2].map(|()| m.garbage::<bf16>(seen));
        let lse = m.garbage::<f32>(128);
        of.firsts = 0;
        m.run(&flash_attention(&of, [q, k, v], y, lse));
        m.run(&flash_attention_backward(&of, [q, k, v], [y, lse, grad], [dq, dk, dv]));
        for at in [y, dq, dk, dv] {
            assert!(m.get::<bf16>(at).iter().all(|x| x.is_finite()), "width {width}");
        }
        for at in [dk, dv] {
            assert!(m.get::<bf16>(at)[..unread].iter().all(|x| *x == bf16::ZERO), "width {width}");
        }
    }
}

/// The GPUs with bf16 tensor cores have at least 99 KiB per block (compute capability 8.6 and 8.9).
#[test]
fn shared_memory_fits_every_gpu() {
    for width in [64, 128, 256] {
        let of = case::<bf16>([1, 1, 1, 3, 3, width], true, None).of;
        let asked = |plan: Plan| plan.calls().iter().map(|call| call.shared_bytes).max();
        let forward = asked(flash_attention(&of, [16; 3], 16, 16));
        let backward = asked(flash_attention_backward(&of, [16; 3], [16; 3], [16; 3]));
        let most = forward.max(backward).unwrap() as usize;
        assert!(most == of.flash_shared_bytes() && most <= 99 << 10, "{width}: {most}");
    }
}

#[test]
fn unsupported_shapes_are_refused() {
    let of = Case::new::<bf16>([1, 1, 1, 3, 3, 8, 0], true, None).of;
    let is_flash = |of: Attention| of.is_flash();
    assert!(is_flash(of) && is_flash(Attention { width: 256, dtype: Float::F16, ..of }));
    for other in [
        Attention { dtype: Float::F32, ..of },
        Attention { width: 12, ..of },
        Attention { width: 264, ..of },
        Attention { scale: -0.1, ..of },
        Attention { scale: f32::NAN, ..of },
        Attention { softcap: Some(0.0), ..of },
        Attention { softcap: Some(f32::INFINITY), ..of },
    ] {
        assert!(!is_flash(other), "{other:?}");
    }
}
