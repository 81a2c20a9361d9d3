//! Causal attention with a cache of keys and values.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::no_grad;
use fulgurite_core::module::{ForwardScope, Module};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Documents, KvCache, MultiHeadAttention,
    MultiHeadAttentionConfig, Rope, RowTokens, force_portable,
};
use fulgurite_test_message::assert_says;

use crate::gradients::harness::{Params, builder, flat, randn};

fn config() -> AttentionConfig {
    AttentionConfig {
        num_kv_heads: 2,
        rope: Some(Rope::new(8, 1e4).unwrap()),
        window: Some(7),
        softcap: Some(3.0),
        sinks: true,
        ..AttentionConfig::new(32, 4)
    }
}

fn attention(config: &AttentionConfig, dtype: DType) -> (CausalSelfAttention, Params) {
    let b = builder(dtype);
    let attention = CausalSelfAttention::new(&b.pp("attn"), config).unwrap();
    (attention, Params::new(&b))
}

fn row(row: usize, count: usize) -> RowTokens {
    RowTokens { row, count }
}

/// Sequences of 12 and 9 tokens come in parts of several lengths.
const PARTS: [[usize; 2]; 5] = [[5, 3], [0, 1], [1, 4], [4, 1], [2, 0]];

fn assert_parts_equal_the_whole(dtype: DType, tolerance: f64) {
    let (attention, _params) = attention(&config(), dtype);
    let _no_grad = no_grad();
    let sequences = [("a", 12), ("b", 9)]
        .map(|(name, n)| (randn(name, &[1, n, 32]) * 0.5).unwrap().to_dtype(dtype).unwrap());
    let mut cache = KvCache::new(&[12, 10]).unwrap();
    let mut found = [Vec::new(), Vec::new()];
    for counts in PARTS {
        let mut inputs = Vec::new();
        let mut tokens = Vec::new();
        for (i, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            inputs.push(sequences[i].narrow(1, cache.length(i), count).unwrap());
            tokens.push(row(i, count));
        }
        let padding = Tensor::zeros((1, 1, 32), dtype, &Device::Cpu).unwrap();
        inputs.push(padding);
        let x = Tensor::cat(&inputs, 1).unwrap();
        let y = cache.forward(&tokens, 1, || attention.forward(&x)).unwrap();
        let mut at = 0;
        for RowTokens { row, count } in tokens {
            found[row].push(y.narrow(1, at, count).unwrap());
            at += count;
        }
    }
    for (x, found) in sequences.iter().zip(found) {
        let whole = flat(&attention.forward(x).unwrap());
        let found = flat(&Tensor::cat(&found, 1).unwrap());
        let scale = whole.iter().fold(0f64, |max, x| max.max(x.abs()));
        for (found, whole) in found.iter().zip(&whole) {
            assert!((found - whole).abs() < tolerance * scale, "{dtype:?}: {found}, not {whole}");
        }
    }
    let bytes = 2 * (12 + 10) * 2 * 8 * dtype.size_in_bytes();
    assert_eq!(cache.bytes(), bytes);
}

#[test]
fn parts_of_sequences_equal_the_whole() {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::BF16, 0.03)] {
        assert_parts_equal_the_whole(dtype, tolerance);
        let _portable = force_portable();
        assert_parts_equal_the_whole(dtype, tolerance);
    }
}

/// Outputs of two sequences: each alone, both in one batch, and in parts with a cache.
fn invariant_outputs(dtype: DType) -> [Vec<Vec<f64>>; 3] {
    let (attention, _params) = attention(&AttentionConfig { qkv_bias: true, ..config() }, dtype);
    let _no_grad = no_grad();
    let scope = ForwardScope { batch_invariant: true, ..ForwardScope::default() };
    let _scope = scope.enter();
    let x = (randn("a", &[2, 40, 32]) * 0.5).unwrap().to_dtype(dtype).unwrap();
    let split = |y: Tensor| (0..2).map(|i| flat(&y.narrow(0, i, 1).unwrap())).collect();
    let alone = |i: usize| flat(&attention.forward(&x.narrow(0, i, 1).unwrap()).unwrap());
    let together = split(attention.forward(&x).unwrap());
    let mut cache = KvCache::new(&[40, 40]).unwrap();
    let mut parts = [Vec::new(), Vec::new()];
    for (start, count) in [(0, 25), (25, 1), (26, 1), (27, 13)] {
        let part = |i: usize| x.narrow(0, i, 1).unwrap().narrow(1, start, count).unwrap();
        let inputs = Tensor::cat(&[part(0), part(1)], 1).unwrap();
        let tokens = [row(0, count), row(1, count)];
        let y = cache.forward(&tokens, 0, || attention.forward(&inputs)).unwrap();
        assert_eq!(y.dtype(), dtype);
        for (i, found) in parts.iter_mut().enumerate() {
            found.extend(flat(&y.narrow(1, i * count, count).unwrap()));
        }
    }
    [vec![alone(0), alone(1)], together, parts.into()]
}

#[test]
fn batch_invariant_forwards_share_bits() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let [alone, together, parts] = invariant_outputs(dtype);
        assert_eq!(alone, together, "{dtype:?}");
        assert_eq!(alone, parts, "{dtype:?}");
    }
}

#[test]
fn forwards_that_do_not_fit_are_refused() {
    let (attention, _params) = attention(&config(), DType::F32);
    let x = randn("x", &[1, 3, 32]).to_dtype(DType::F32).unwrap();
    let mut cache = KvCache::new(&[4, 4]).unwrap();
    let with_gradients = cache.forward(&[row(0, 3)], 0, || attention.forward(&x));
    let _no_grad = no_grad();
    let mut of = |tokens: &[RowTokens], padding| {
        cache.forward(tokens, padding, || attention.forward(&x)).unwrap_err().to_string()
    };
    assert_says!(with_gradients.unwrap_err(), "a cache … has no backward … `no_grad`");
    assert_says!(of(&[row(2, 3)], 0), "sequence 2 of a cache does not exist; there are 2");
    assert_says!(of(&[row(0, 5)], 0), "sequence 0 … has 0 of at most 4 tokens, and 5 more …");
    assert_says!(of(&[row(0, 2), row(0, 1)], 0), "sequence 0 … is freed, or is named twice …");
    assert_says!(of(&[row(0, 2)], 0), "module `attn` … takes its tokens as [1, 2], got [1, 3]");
    assert_says!(KvCache::new(&[3, 0]).unwrap_err(), "a cache … sequence 1 has a capacity of 0");
    // A forward that fails adds no tokens.
    assert_eq!(cache.length(0), 0);
    cache.free(1);
    let freed = cache.forward(&[row(1, 3)], 0, || attention.forward(&x)).unwrap_err();
    assert_says!(freed, "sequence 1 … is freed, or is named twice …");
    let documents = Documents::of_lengths(&[[3]]).unwrap();
    let packed = cache.forward(&[row(0, 3)], 0, || documents.run(|| attention.forward(&x)));
    assert_says!(packed.unwrap_err(), "module `attn`: a cache … does not go with documents …");
}

#[test]
fn attention_to_later_tokens_is_refused() {
    let (encoder, _params) = attention(&AttentionConfig { causal: false, ..config() }, DType::F32);
    let b = builder(DType::F32);
    let other = MultiHeadAttention::new(&b.pp("heads"), &MultiHeadAttentionConfig::new(32, 4));
    let (other, _others) = (other.unwrap(), Params::new(&b));
    let x = randn("x", &[1, 3, 32]).to_dtype(DType::F32).unwrap();
    let _no_grad = no_grad();
    let refused = |compute: &dyn Fn() -> Result<Tensor>| {
        KvCache::new(&[4]).unwrap().forward(&[row(0, 3)], 0, compute).unwrap_err()
    };
    assert_says!(refused(&|| encoder.forward(&x)), "module `attn`: a cache … that is not causal");
    assert_says!(refused(&|| other.forward(&x)), "module `heads`: a cache … does not know …");
}
