use candle_core::{D, DType, Device, Tensor};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::functional::{attention, biased_attention, masked_attention};
use fulgurite_core::nn::{
    Documents, MultiHeadAttention, MultiHeadAttentionConfig, RelativePositionBias,
    RelativePositionBiasConfig, Rope,
};
use fulgurite_test_message::assert_says;

use super::harness::{Params, analytic, assert_close, assert_same, builder, check, flat, randn};

fn qkv(b: usize, [h, kv]: [usize; 2], [tq, tk]: [usize; 2], d: usize) -> [Tensor; 3] {
    [randn("q", &[b, h, tq, d]), randn("k", &[b, kv, tk, d]), randn("v", &[b, kv, tk, d])]
}

/// A mask of this shape that hides some keys, but never the first.
fn mask(dims: &[usize]) -> Tensor {
    let keys = *dims.last().unwrap();
    let n: usize = dims.iter().product();
    let seen: Vec<u8> = (0..n).map(|i| u8::from(i % keys == 0 || (i * 7) % 3 != 0)).collect();
    Tensor::from_vec(seen, dims, &Device::Cpu).unwrap()
}

/// The definition in candle's operations, with the mask as a term of the scores.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: &Tensor) -> Tensor {
    biased_reference([q, k, v], scale, None, mask)
}

fn biased_reference(
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    bias: Option<&Tensor>,
    mask: &Tensor,
) -> Tensor {
    let (b, h, tq, d) = q.dims4().unwrap();
    let (_, kv, tk, _) = k.dims4().unwrap();
    let repeat = |x: &Tensor| {
        let x = x.unsqueeze(2).unwrap().broadcast_as((b, kv, h / kv, tk, d)).unwrap();
        x.contiguous().unwrap().reshape((b, h, tk, d)).unwrap()
    };
    let mut scores = (q.matmul(&repeat(k).t().unwrap()).unwrap() * scale).unwrap();
    if let Some(bias) = bias {
        scores = scores.broadcast_add(bias).unwrap();
    }
    let mask = mask.broadcast_as((b, h, tq, tk)).unwrap();
    let hidden = Tensor::new(f64::NEG_INFINITY, q.device()).unwrap().broadcast_as((b, h, tq, tk));
    let scores = mask.where_cond(&scores, &hidden.unwrap()).unwrap();
    candle_nn::ops::softmax(&scores, D::Minus1).unwrap().matmul(&repeat(v)).unwrap()
}

#[test]
fn finite_differences_with_a_mask() {
    for (heads, times, dims) in [
        ([1, 1], [3, 4], &[2, 1, 1, 4][..]),
        ([4, 2], [3, 3], &[1, 1, 3, 3]),
        ([2, 1], [4, 3], &[2, 2, 4, 3]),
    ] {
        let (inputs, mask) = (qkv(2, heads, times, 3), mask(dims));
        let f = |x: &[Tensor]| masked_attention(&x[0], &x[1], &x[2], 0.7, &mask);
        let run = check(&inputs, &Params::none(), &f);
        let [q, k, v] = &inputs;
        assert_close("definition", &run.output, &flat(&reference(q, k, v, 0.7, &mask)), 1e-12);
    }
}

#[test]
fn finite_differences_with_a_bias() {
    for (heads, times, of_bias) in [
        ([1, 1], [3, 4], [2, 1, 1, 4]),
        ([4, 2], [3, 3], [1, 4, 3, 3]),
        ([2, 1], [4, 3], [2, 2, 4, 3]),
    ] {
        let [q, k, v] = qkv(2, heads, times, 3);
        let inputs = [q, k, v, randn("bias", &of_bias)];
        let hidden = mask(&[2, times[1]]);
        for mask in [None, Some(&hidden)] {
            let f = |x: &[Tensor]| biased_attention(&x[0], &x[1], &x[2], 0.7, &x[3], mask);
            let run = check(&inputs, &Params::none(), &f);
            let [q, k, v, bias] = &inputs;
            let seen = Tensor::ones((2, times[1]), DType::U8, &Device::Cpu).unwrap();
            let mask = mask.unwrap_or(&seen).reshape((2, 1, 1, times[1])).unwrap();
            let wanted = biased_reference([q, k, v], 0.7, Some(bias), &mask);
            assert_close("definition", &run.output, &flat(&wanted), 1e-12);
        }
    }
}

/// A term of minus infinity hides keys as a mask does.
#[test]
fn infinite_terms_hide_keys() {
    let [q, k, v] = qkv(1, [1, 1], [2, 3], 2);
    let inf = f64::NEG_INFINITY;
    let bias = Tensor::new(&[[[[inf, inf, 0.0], [0.0, inf, 0.0]]]], &Device::Cpu).unwrap();
    let mask = Tensor::new(&[[1u8, 1, 0]], &Device::Cpu).unwrap();
    let y = flat(&biased_attention(&q, &k, &v, 0.7, &bias, Some(&mask)).unwrap());
    assert_eq!(y[..2], [0.0, 0.0]);
    assert_close("the one key that is left", &y[2..], &flat(&v)[..2], 1e-12);
}

/// Equal terms change nothing, however low.
#[test]
fn lowest_finite_terms_hide_nothing() {
    let [q, k, v] = qkv(1, [1, 1], [2, 3], 2).map(|x| x.to_dtype(DType::F32).unwrap());
    let of = |term: f32| {
        let bias = Tensor::full(term, (1, 1, 2, 3), &Device::Cpu).unwrap();
        flat(&biased_attention(&q, &k, &v, 0.0, &bias, None).unwrap().to_dtype(DType::F64).unwrap())
    };
    assert_eq!(of(f32::MIN), of(0.0));
}

/// The first distances of buckets, which `T5Attention._relative_position_bucket` of transformers
/// 5.24 gives.
#[test]
fn buckets_equal_those_of_transformers() {
    for (both_sides, num_buckets, max_distance, starts) in [
        (true, 32, 128, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91][..]),
        (true, 12, 20, &[0, 1, 2, 3, 6, 11]),
        (false, 12, 20, &[0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 14, 17]),
        (
            false,
            32,
            128,
            &[
                0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 19, 21, 24, 27, 31, 35,
                40, 46, 52, 59, 67, 77, 87, 99, 113,
            ],
        ),
    ] {
        let b = builder(DType::F64);
        let config = RelativePositionBiasConfig {
            num_buckets,
            max_distance,
            ..RelativePositionBiasConfig::new(1, both_sides)
        };
        let bias = RelativePositionBias::new(&b.pp("bias"), &config).unwrap();
        let params = Params::new(&b);
        let table = flat(params.slots[0].compute().unwrap());
        let found = flat(&bias.forward(139..140, 279).unwrap());
        let ahead = if both_sides { num_buckets / 2 } else { 0 };
        for distance in 0..140 {
            let bucket = starts.iter().rposition(|start| *start <= distance).unwrap();
            assert_eq!(found[139 - distance], table[bucket], "{config:?} at {distance}");
            let bucket = if both_sides && distance > 0 { ahead + bucket } else { 0 };
            assert_eq!(found[139 + distance], table[bucket], "{config:?} at -{distance}");
        }
    }
}

#[test]
fn kept_keys_equal_the_whole() {
    let b = builder(DType::F64);
    let config = MultiHeadAttentionConfig {
        head_dim: Some(3),
        scale: Some(1.0),
        bias: false,
        num_kv_heads: 2,
        ..MultiHeadAttentionConfig::new(6, 4)
    };
    let attn = MultiHeadAttention::new(&b.pp("attn"), &config).unwrap();
    let bias = RelativePositionBiasConfig {
        num_buckets: 4,
        max_distance: 3,
        ..RelativePositionBiasConfig::new(4, false)
    };
    let bias = RelativePositionBias::new(&b.pp("bias"), &bias).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[2, 5, 6]);
    let causal: Vec<u8> = (0..25).map(|i| u8::from(i % 5 <= i / 5)).collect();
    let causal = Tensor::from_vec(causal, (1, 5, 5), &Device::Cpu).unwrap();
    let attend = |x: &[Tensor]| {
        let keys = attn.keys_values(&x[0])?;
        attn.attend_to(&x[0], &keys, Some(&bias.forward(0..5, 5)?), Some(&causal))
    };
    let whole = check(std::slice::from_ref(&x), &params, &attend).output;
    let part = |range: std::ops::Range<usize>| x.narrow(1, range.start, range.len()).unwrap();
    let first = attn.keys_values(&part(0..4)).unwrap();
    let keys = first.followed_by(&attn.keys_values(&part(4..5)).unwrap()).unwrap();
    assert_eq!(keys.count(), 5);
    let terms = bias.forward(4..5, 5).unwrap();
    let last = attn.attend_to(&part(4..5), &keys, Some(&terms), None).unwrap();
    let wanted: Vec<f64> = [&whole[4 * 6..5 * 6], &whole[9 * 6..]].concat();
    assert_close("the last position", &flat(&last), &wanted, 1e-12);
}

#[test]
fn full_mask_equals_no_mask() {
    let inputs = qkv(2, [4, 2], [5, 70], 3);
    let seen = Tensor::ones((2, 70), DType::U8, &Device::Cpu).unwrap();
    let with = |x: &[Tensor]| masked_attention(&x[0], &x[1], &x[2], 0.5, &seen);
    let without = |x: &[Tensor]| attention(&x[0], &x[1], &x[2], 0.5, false);
    let [with, without] =
        [analytic(&inputs, &Params::none(), &with), analytic(&inputs, &Params::none(), &without)];
    assert_same("no mask", &with, &without, 1e-10);
}

#[test]
fn a_query_without_a_key_gets_zeros() {
    let inputs = qkv(1, [1, 1], [2, 3], 2);
    let mask = Tensor::new(&[[[0u8, 0, 0], [1, 0, 1]]], &Device::Cpu).unwrap();
    let run =
        check(&inputs, &Params::none(), &|x| masked_attention(&x[0], &x[1], &x[2], 0.7, &mask));
    assert_eq!(run.output[..2], [0.0, 0.0]);
    assert!(run.inputs[0].as_ref().unwrap()[..2].iter().all(|g| *g == 0.0));
}

#[test]
fn the_module() {
    let config = MultiHeadAttentionConfig::new(6, 3);
    let turned = MultiHeadAttentionConfig {
        num_kv_heads: 1,
        bias: false,
        rope: Some(Rope::new(2, 100.0).unwrap()),
        ..config.clone()
    };
    for config in [config.clone(), turned] {
        let b = builder(DType::F64);
        let attn = MultiHeadAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, 4, 6]);
        check(std::slice::from_ref(&x), &params, &|x| attn.forward(&x[0]));
        let mask = mask(&[2, 4, 4]);
        check(&[x], &params, &|x| attn.attend(&x[0], &x[0], Some(&mask)));
    }
    let b = builder(DType::F64);
    let config = MultiHeadAttentionConfig { context_size: 5, num_kv_heads: 1, ..config };
    let attn = MultiHeadAttention::new(&b.pp("attn"), &config).unwrap();
    let params = Params::new(&b);
    let inputs = [randn("x", &[2, 2, 6]), randn("context", &[2, 3, 5])];
    check(&inputs, &params, &|x| attn.attend(&x[0], &x[1], None));
    let padding = Tensor::new(&[[1u8, 1, 0], [1, 1, 1]], &Device::Cpu).unwrap();
    let padded = check(&inputs, &params, &|x| attn.attend(&x[0], &x[1], Some(&padding)));
    // The content of the padding has no effect.
    let of_padding = &padded.inputs[1].as_ref().unwrap()[2 * 5..3 * 5];
    assert!(of_padding.iter().all(|g| *g == 0.0), "{of_padding:?}");
}

#[test]
fn wrong_use_is_explained() {
    let b = builder(DType::F64);
    let config = MultiHeadAttentionConfig::new(6, 3);
    let new = |config: &MultiHeadAttentionConfig| {
        MultiHeadAttention::new(&b.pp("no"), config).map(drop).unwrap_err()
    };
    assert_says!(new(&MultiHeadAttentionConfig::new(6, 4)), "module `no`: 4 … not divide … of 6");
    assert_says!(
        new(&MultiHeadAttentionConfig { num_kv_heads: 2, ..config.clone() }),
        "module `no`: 3 attention heads cannot share 2 key and value heads …"
    );
    let rope = Some(Rope::new(2, 100.0).unwrap());
    assert_says!(
        new(&MultiHeadAttentionConfig { rope, context_size: 5, ..config.clone() }),
        "module `no`: a rotary embedding … to itself … 6 elements and keys of 5"
    );
    let attn = MultiHeadAttention::new(&b.pp("attn"), &config).unwrap();
    let _params = Params::new(&b);
    let x = randn("x", &[2, 4, 6]);
    let error = |x: &Tensor, context: &Tensor, mask: Option<&Tensor>| {
        attn.attend(x, context, mask).unwrap_err()
    };
    assert_says!(error(&x, &randn("c", &[2, 4, 5]), None), "module `attn.k_proj` … got [2, 4, 5]");
    assert_says!(error(&x, &randn("c", &[3, 4, 6]), None), "module `attn` … must agree in batch …");
    assert_says!(error(&randn("c", &[4, 6]), &x, None), "module `attn` … inputs of shape … [4, 6]");
    assert_says!(error(&x, &x, Some(&mask(&[2, 3]))), "module `attn` … a mask … got [2, 3] in U8");
    assert_says!(error(&x, &x, Some(&randn("m", &[2, 4]))), "module `attn` … mask … [2, 4] in F64");
    let keys = attn.keys_values(&x).unwrap();
    let bias = randn("b", &[1, 2, 4, 4]);
    let error = attn.attend_to(&x, &keys, Some(&bias), None).unwrap_err().to_string();
    assert!(error.contains("bias of shape") && error.contains("[1, 2, 4, 4]"), "{error}");
    let documents = Documents::of_lengths(&[[2usize, 2], [3, 1]]).unwrap();
    let error = |x: &Tensor, context: &Tensor, mask: Option<&Tensor>| {
        attn.attend(x, context, mask).unwrap_err()
    };
    assert_says!(documents.run(|| error(&x, &x, None)), "module `attn`: documents … not know …");
}
