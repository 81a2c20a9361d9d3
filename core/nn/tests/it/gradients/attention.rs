use candle_core::{D, DType, Tensor};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::functional::attention;
use fulgurite_core::nn::{AttentionConfig, CausalSelfAttention, Rope};
use proptest::prelude::*;

use super::harness::{Params, analytic, assert_close, builder, check, flat, randn};

/// The definition, with every score in memory.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, causal: bool) -> Tensor {
    let (b, h, tq, d) = q.dims4().unwrap();
    let (_, kv, tk, _) = k.dims4().unwrap();
    let repeat = |x: &Tensor| {
        let x = x.unsqueeze(2).unwrap().broadcast_as((b, kv, h / kv, tk, d)).unwrap();
        x.contiguous().unwrap().reshape((b, h, tk, d)).unwrap()
    };
    let scores = (q.matmul(&repeat(k).t().unwrap()).unwrap() * scale).unwrap();
    let mask: Vec<f64> = (0..tq * tk)
        .map(|i| if causal && i % tk > i / tk + tk - tq { f64::NEG_INFINITY } else { 0.0 })
        .collect();
    let mask = Tensor::from_vec(mask, (tq, tk), q.device()).unwrap();
    let p = candle_nn::ops::softmax(&scores.broadcast_add(&mask).unwrap(), D::Minus1).unwrap();
    p.matmul(&repeat(v)).unwrap()
}

fn qkv(b: usize, [h, kv]: [usize; 2], [tq, tk]: [usize; 2], d: usize) -> [Tensor; 3] {
    [randn("q", &[b, h, tq, d]), randn("k", &[b, kv, tk, d]), randn("v", &[b, kv, tk, d])]
}

#[test]
fn finite_differences() {
    for (heads, times, causal) in [
        ([1, 1], [5, 5], true),
        ([4, 2], [3, 3], true),
        ([3, 1], [4, 4], false),
        ([2, 2], [3, 5], true),
        ([2, 1], [5, 3], false),
    ] {
        let inputs = qkv(2, heads, times, 3);
        let run = check(&inputs, &Params::none(), &|x| attention(&x[0], &x[1], &x[2], 0.7, causal));
        let [q, k, v] = &inputs;
        assert_close("definition", &run.output, &flat(&reference(q, k, v, 0.7, causal)), 1e-12);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Sizes around and beyond the kernels' blocks, against the definition differentiated by candle.
    #[test]
    fn equals_the_definition(
        b in 1usize..3, kv in 1usize..3, group in 1usize..4, tq in 1usize..150, more in 0usize..40,
        d in 1usize..9, causal: bool,
    ) {
        let inputs = qkv(b, [kv * group, kv], [tq, tq + more], d);
        let ours = analytic(&inputs, &Params::none(), &|x| attention(&x[0], &x[1], &x[2], 0.5, causal));
        let want = analytic(&inputs, &Params::none(), &|x| {
            Ok(reference(&x[0], &x[1], &x[2], 0.5, causal))
        });
        super::harness::assert_same("definition", &ours, &want, 1e-10);
    }
}

#[test]
fn portable_blocks_agree_beyond_one_block() {
    let inputs = qkv(1, [2, 1], [530, 541], 2);
    let f = |x: &[Tensor]| attention(&x[0], &x[1], &x[2], 0.5, true);
    let host = analytic(&inputs, &Params::none(), &f);
    let _portable = fulgurite_core::nn::force_portable();
    super::harness::assert_same("portable", &analytic(&inputs, &Params::none(), &f), &host, 1e-9);
}

fn config(heads: [usize; 2], head_dim: usize, rope: bool) -> AttentionConfig {
    AttentionConfig {
        hidden_size: 5,
        num_heads: heads[0],
        num_kv_heads: heads[1],
        head_dim,
        qkv_bias: rope,
        rope: rope.then(|| Rope::new(head_dim, 100.0).unwrap()),
        init: None,
    }
}

#[test]
fn the_fused_module() {
    for (heads, head_dim, rope) in [([1, 1], 2, false), ([4, 2], 2, true), ([3, 1], 4, true)] {
        let b = builder(DType::F64);
        let layer =
            CausalSelfAttention::new(&b.pp("attn"), &config(heads, head_dim, rope)).unwrap();
        let params = Params::new(&b);
        check(&[randn("x", &[2, 3, 5])], &params, &|x| layer.forward(&x[0]));
    }
}

/// The fused module against the same mathematics from the parts it is made of.
#[test]
fn the_fused_module_equals_its_parts() {
    let b = builder(DType::F64);
    let layer = CausalSelfAttention::new(&b.pp("attn"), &config([4, 2], 6, true)).unwrap();
    let params = Params::new(&b);
    let rope = Rope::new(6, 100.0).unwrap();
    let x = randn("x", &[2, 70, 5]);
    let fused = analytic(std::slice::from_ref(&x), &params, &|x| layer.forward(&x[0]));
    let project = |x: &Tensor, name: &str| {
        let get = |n: &str| params.tree.parameter(&format!("attn.{name}.{n}"));
        let y = x.broadcast_matmul(&get("weight").unwrap().tensor()?.t()?)?;
        Ok::<_, fulgurite_core::Error>(match get("bias") {
            Some(bias) => y.broadcast_add(&bias.tensor()?)?,
            None => y,
        })
    };
    let parts = analytic(&[x], &params, &|x| {
        let heads = |name: &str, n: usize| {
            let y = project(&x[0], name)?.reshape((2, 70, n, 6))?.transpose(1, 2)?;
            Ok::<_, fulgurite_core::Error>(y.contiguous()?)
        };
        let (q, k) =
            (rope.forward(&heads("q_proj", 4)?, 0)?, rope.forward(&heads("k_proj", 2)?, 0)?);
        let y = attention(&q, &k, &heads("v_proj", 2)?, 1.0 / 6f64.sqrt(), true)?;
        project(&y.transpose(1, 2)?.contiguous()?.reshape((2, 70, 24))?, "o_proj")
    });
    super::harness::assert_same("parts", &fused, &parts, 1e-11);
}

#[test]
fn rope_offsets_continue_a_sequence() {
    let rope = Rope::new(4, 10_000.0).unwrap();
    let x = randn("x", &[1, 2, 7, 4]);
    let whole = rope.forward(&x, 0).unwrap();
    let tail = rope.forward(&x.narrow(2, 3, 4).unwrap(), 3).unwrap();
    assert_eq!(flat(&whole.narrow(2, 3, 4).unwrap()), flat(&tail));
    check(&[x], &Params::none(), &|x| rope.forward(&x[0], 2));
}

#[test]
fn wrong_use_is_explained() {
    let [q, k, v] = qkv(1, [3, 2], [4, 4], 2);
    insta::assert_snapshot!(
        attention(&q, &k, &v, 1.0, true).unwrap_err(),
        @"attention: 3 query heads do not divide into 2 groups; q: batch 1, heads 3, time 4, head_dim 2; k: batch 1, heads 2, time 4, head_dim 2; v: batch 1, heads 2, time 4, head_dim 2"
    );
    let b = builder(DType::F64);
    insta::assert_snapshot!(
        CausalSelfAttention::new(&b.pp("attn"), &config([3, 2], 4, false)).unwrap_err(),
        @"module `attn`: 3 attention heads cannot share 2 key and value heads; the second number must divide the first"
    );
    insta::assert_snapshot!(
        Rope::new(3, 1e4).unwrap_err(),
        @"rotary embedding needs an even head_dim, got 3"
    );
}
