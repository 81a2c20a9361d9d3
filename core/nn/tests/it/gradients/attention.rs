use candle_core::{D, DType, Tensor};
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::functional::{attention, sliding_window_attention};
use fulgurite_core::nn::{AttentionConfig, CausalSelfAttention, Documents, Rope};
use fulgurite_test_message::assert_says;
use proptest::prelude::*;

use super::harness::{Params, analytic, assert_close, builder, check, flat, randn};

/// The definition, with every score in memory.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, causal: bool) -> Tensor {
    let (tq, tk) = (q.dim(2).unwrap(), k.dim(2).unwrap());
    masked_reference(q, k, v, scale, |i, j| !causal || j <= i + tk - tq)
}

/// The definition in `transformers`: query `i` sees key `j` if `i - window < j <= i`, by positions.
fn windowed_reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, window: usize) -> Tensor {
    let (tq, tk) = (q.dim(2).unwrap(), k.dim(2).unwrap());
    masked_reference(q, k, v, scale, |i, j| {
        let position = i + tk - tq;
        j <= position && position < j + window
    })
}

/// Attention in which query `i` sees key `j` if `sees` returns true.
fn masked_reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    sees: impl Fn(usize, usize) -> bool,
) -> Tensor {
    let (b, h, tq, d) = q.dims4().unwrap();
    let (_, kv, tk, _) = k.dims4().unwrap();
    let repeat = |x: &Tensor| {
        let x = x.unsqueeze(2).unwrap().broadcast_as((b, kv, h / kv, tk, d)).unwrap();
        x.contiguous().unwrap().reshape((b, h, tk, d)).unwrap()
    };
    let scores = (q.matmul(&repeat(k).t().unwrap()).unwrap() * scale).unwrap();
    let mask: Vec<f64> =
        (0..tq * tk).map(|i| if sees(i / tk, i % tk) { 0.0 } else { f64::NEG_INFINITY }).collect();
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

#[test]
fn windows_have_their_gradients() {
    for (heads, times, window) in [([1, 1], [5, 5], 1), ([4, 2], [5, 5], 2), ([2, 1], [3, 5], 3)] {
        let inputs = qkv(2, heads, times, 3);
        let run = check(&inputs, &Params::none(), &|x| {
            sliding_window_attention(&x[0], &x[1], &x[2], 0.7, window)
        });
        let [q, k, v] = &inputs;
        let want = windowed_reference(q, k, v, 0.7, window);
        assert_close("definition", &run.output, &flat(&want), 1e-12);
    }
}

/// Compares outputs and gradients of both implementations, to the bit.
#[test]
fn long_windows_are_causal_attention() {
    let inputs = qkv(2, [4, 2], [150, 160], 6);
    for portable in [false, true] {
        let _portable = portable.then(fulgurite_core::nn::force_portable);
        let causal =
            analytic(&inputs, &Params::none(), &|x| attention(&x[0], &x[1], &x[2], 0.5, true));
        for window in [160, 161, usize::MAX] {
            let windowed = analytic(&inputs, &Params::none(), &|x| {
                sliding_window_attention(&x[0], &x[1], &x[2], 0.5, window)
            });
            super::harness::assert_same("causal", &windowed, &causal, 0.0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn windows_equal_the_definition(
        kv in 1usize..3, group in 1usize..3, tq in 1usize..300, more in 0usize..40,
        d in 1usize..6, window in 1usize..330, portable: bool,
    ) {
        let _portable = portable.then(fulgurite_core::nn::force_portable);
        let inputs = qkv(1, [kv * group, kv], [tq, tq + more], d);
        let ours = analytic(&inputs, &Params::none(), &|x| {
            sliding_window_attention(&x[0], &x[1], &x[2], 0.5, window)
        });
        let want = analytic(&inputs, &Params::none(), &|x| {
            Ok(windowed_reference(&x[0], &x[1], &x[2], 0.5, window))
        });
        super::harness::assert_same("definition", &ours, &want, 1e-10);
    }

    /// Sizes around and beyond the kernels' blocks, against the definition with candle's gradients.
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
    let agree = |f: &dyn Fn(&[Tensor]) -> fulgurite_core::Result<Tensor>| {
        let host = analytic(&inputs, &Params::none(), f);
        let _portable = fulgurite_core::nn::force_portable();
        super::harness::assert_same(
            "portable",
            &analytic(&inputs, &Params::none(), f),
            &host,
            1e-9,
        );
    };
    agree(&|x| attention(&x[0], &x[1], &x[2], 0.5, true));
    agree(&|x| sliding_window_attention(&x[0], &x[1], &x[2], 0.5, 100));
}

fn config(heads: [usize; 2], head_dim: usize, rope: bool) -> AttentionConfig {
    AttentionConfig {
        num_kv_heads: heads[1],
        head_dim,
        qkv_bias: rope,
        rope: rope.then(|| Rope::new(head_dim, 100.0).unwrap()),
        ..AttentionConfig::new(5, heads[0])
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

/// Compares the fused module with the same computation by separate layers.
#[test]
fn the_fused_module_equals_its_parts() {
    equals_its_parts(None);
}

#[test]
fn windows_equal_their_parts() {
    equals_its_parts(Some(9));
}

fn equals_its_parts(window: Option<usize>) {
    let b = builder(DType::F64);
    let config = AttentionConfig { window, ..config([4, 2], 6, true) };
    let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
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
        let (v, scale) = (heads("v_proj", 2)?, 1.0 / 6f64.sqrt());
        let y = match window {
            None => attention(&q, &k, &v, scale, true)?,
            Some(window) => sliding_window_attention(&q, &k, &v, scale, window)?,
        };
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
    assert_says!(attention(&q, &k, &v, 1.0, true).unwrap_err(), "attention: 3 … into 2 groups …");
    let b = builder(DType::F64);
    assert_says!(
        CausalSelfAttention::new(&b.pp("attn"), &config([3, 2], 4, false)).unwrap_err(),
        "module `attn`: 3 attention heads cannot share 2 key and value heads …"
    );
    assert_says!(
        CausalSelfAttention::new(
            &b.pp("attn"),
            &AttentionConfig { window: Some(0), ..config([1, 1], 4, false) }
        )
        .unwrap_err(),
        "module `attn`: window must be at least 1, got 0"
    );
    assert_says!(
        sliding_window_attention(&q, &k, &v, 1.0, 0).unwrap_err(),
        "a sliding window of 0 keys … at least 1"
    );
    assert_says!(Rope::new(3, 1e4).unwrap_err(), "rotary embedding needs an even head_dim, got 3");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Compares documents packed into sequences with each document alone: outputs and all
    /// gradients.
    #[test]
    fn packed_documents_are_computed_as_if_alone(
        lengths in prop::collection::vec(1usize..170, 1..6), other_cut in 1usize..50, portable: bool,
        window in prop::option::of(1usize..90),
    ) {
        let _portable = portable.then(fulgurite_core::nn::force_portable);
        let time: usize = lengths.iter().sum();
        let second = match other_cut.min(time) {
            cut if cut == time => vec![time],
            cut => vec![time - cut, cut],
        };
        let packed = [lengths, second];
        let b = builder(DType::F64);
        let config = AttentionConfig { window, ..config([4, 2], 6, true) };
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, time, 5]);
        let documents = Documents::of_lengths(&packed).unwrap();
        let together = analytic(std::slice::from_ref(&x), &params, &|x| {
            documents.run(|| layer.forward(&x[0]))
        });
        let alone = analytic(&[x], &params, &|x| {
            let sequences = packed.iter().enumerate().map(|(i, lengths)| {
                let mut start = 0;
                let outputs = lengths.iter().map(|&length| {
                    let document = x[0].narrow(0, i, 1)?.narrow(1, start, length)?;
                    start += length;
                    layer.forward(&document)
                });
                Ok(Tensor::cat(&outputs.collect::<fulgurite_core::Result<Vec<_>>>()?, 1)?)
            });
            Ok(Tensor::cat(&sequences.collect::<fulgurite_core::Result<Vec<_>>>()?, 0)?)
        });
        super::harness::assert_same("alone", &together, &alone, 1e-9);
    }
}

#[test]
fn packed_documents_in_several_portable_blocks() {
    let b = builder(DType::F64);
    let layer = CausalSelfAttention::new(&b.pp("attn"), &config([2, 1], 2, true)).unwrap();
    let params = Params::new(&b);
    let x = randn("x", &[1, 1200, 5]);
    let documents = Documents::of_lengths(&[[700, 30, 470]]).unwrap();
    let f = |x: &[Tensor]| documents.run(|| layer.forward(&x[0]));
    let host = analytic(std::slice::from_ref(&x), &params, &f);
    let _portable = fulgurite_core::nn::force_portable();
    super::harness::assert_same("portable", &analytic(&[x], &params, &f), &host, 1e-9);
}

#[test]
fn documents_of_another_batch_are_refused() {
    let b = builder(DType::F64);
    let layer = CausalSelfAttention::new(&b.pp("attn"), &config([1, 1], 2, false)).unwrap();
    let _params = Params::new(&b);
    let documents = Documents::of_lengths(&[[2, 3]]).unwrap();
    let error = documents.run(|| layer.forward(&randn("x", &[1, 4, 5]))).unwrap_err();
    assert_says!(error, "module `attn`: the documents … of 1 sequences of 5 tokens … for 1 of 4");
    assert_says!(
        Documents::of_lengths(&[vec![2, 3], vec![4]]).unwrap_err(),
        "the documents of sequence 1 … lengths [4] … at least 1 and add up to 5 …"
    );
}
