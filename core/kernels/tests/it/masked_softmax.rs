//! Softmax with a mask or a bias against its formula in f64.

use fulgurite_kernels::plans::{Broadcast, masked_softmax, masked_softmax_backward};

use crate::numbers::normal;
use crate::shim::Machine;

/// Strides of contiguous values of which some dimensions have one value.
fn strides(sizes: [usize; 4], is_whole: [bool; 3]) -> ([u32; 3], usize) {
    let (mut strides, mut step) = ([0; 3], sizes[3]);
    for dim in (0..3).rev() {
        if is_whole[dim] {
            strides[dim] = step as u32;
            step *= sizes[dim];
        }
    }
    (strides, step)
}

#[test]
fn probabilities_and_their_gradients() {
    for sizes in [[2, 3, 4, 5], [1, 2, 3, 600], [2, 1, 5, 257]] {
        for (of_mask, of_bias) in [
            (None, Some([false, true, true])),
            (Some([true, false, false]), None),
            (Some([false, true, true]), Some([true, true, false])),
            (Some([true, true, true]), Some([false, false, false])),
            (None, None),
        ] {
            check(sizes, of_mask, of_bias);
        }
    }
}

#[test]
fn a_nan_stays_and_no_key_gives_zeros() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut m = Machine::default();
    let scores = m.put(&[nan, 1.0, 2.0, -inf, -inf, -inf, 0.0, -inf, 0.0]);
    m.run(&masked_softmax(scores, [1, 1, 3, 3], Broadcast::default(), Broadcast::default()));
    let found = m.get::<f32>(scores);
    assert!(found[..3].iter().all(|p| p.is_nan()), "{found:?}");
    assert_eq!(found[3..], [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]);
}

fn check(sizes: [usize; 4], of_mask: Option<[bool; 3]>, of_bias: Option<[bool; 3]>) {
    let [batch, heads, queries, keys] = sizes;
    let (rows, n) = (batch * heads * queries, batch * heads * queries * keys);
    let [scores, grad] = ["scores", "grad"].map(|what| normal::<f32>(what, n));
    let mut m = Machine::default();
    let (mut mask, mut bias) = (Vec::new(), Vec::new());
    let of = |is_whole: Option<[bool; 3]>| is_whole.map_or(([0; 3], 0), |w| strides(sizes, w));
    let ((mask_strides, mask_len), (bias_strides, bias_len)) = (of(of_mask), of(of_bias));
    if of_mask.is_some() {
        // The first row of the mask has no key at all.
        mask = (0..mask_len).map(|i| u8::from(i >= keys && i * 7 % 3 != 0)).collect();
    }
    if of_bias.is_some() {
        bias = normal::<f32>("bias", bias_len);
    }
    let place = |is_there: bool, address, strides| match is_there {
        true => Broadcast { address, strides },
        false => Broadcast::default(),
    };
    let at_mask = place(of_mask.is_some(), m.put(&mask), mask_strides);
    let at_bias = place(of_bias.is_some(), m.put(&bias), bias_strides);
    let (at, of_probabilities) = (m.put(&scores), m.put(&grad));
    m.run(&masked_softmax(at, sizes, at_mask, at_bias));
    m.run(&masked_softmax_backward(at, of_probabilities, [rows, keys], 0.3));
    let (mut expected, mut expected_grad) = (vec![0.0; n], vec![0.0; n]);
    for row in 0..rows {
        let places = [row / queries / heads, row / queries % heads, row % queries];
        let begin = |strides: [u32; 3]| -> usize {
            places.iter().zip(strides).map(|(place, stride)| place * stride as usize).sum()
        };
        let (mask_row, bias_row) = (begin(mask_strides), begin(bias_strides));
        let seen: Vec<usize> =
            (0..keys).filter(|key| mask.is_empty() || mask[mask_row + key] != 0).collect();
        let score = |key: usize| {
            let own = f64::from(scores[row * keys + key]);
            if bias.is_empty() { own } else { own + f64::from(bias[bias_row + key]) }
        };
        let sum: f64 = seen.iter().map(|key| score(*key).exp()).sum();
        let p = |key: usize| score(key).exp() / sum;
        let of = |key: usize| f64::from(grad[row * keys + key]);
        let level: f64 = seen.iter().map(|key| p(*key) * of(*key)).sum();
        for key in seen {
            expected[row * keys + key] = p(key);
            expected_grad[row * keys + key] = 0.3 * p(key) * (of(key) - level);
        }
    }
    let close = |name: &str, found: Vec<f32>, expected: &[f64]| {
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= 1e-6, "{name}[{i}] is {found}, not {expected}: {sizes:?}");
        }
    };
    close("probabilities", m.get(at), &expected);
    close("gradient", m.get(of_probabilities), &expected_grad);
}
