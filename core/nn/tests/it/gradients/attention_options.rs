//! Options of [`CausalSelfAttention`] that models of `transformers` have.

use candle_core::{D, DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Documents, QkNorm, QkNormScope, Rope, RopeConfig,
    RopeScaling, force_portable,
};
use fulgurite_test_message::assert_says;
use proptest::prelude::*;

use super::harness::{Params, analytic, assert_same, builder, check, randn};

const EPS: f64 = 1e-3;

fn norm(scope: QkNormScope, unit_offset: bool) -> Option<QkNorm> {
    Some(QkNorm { eps: EPS, scope, unit_offset })
}

/// A rotation of a part of each head, with changed frequencies and lengths.
fn partial_rope(head_dim: usize) -> Rope {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions: 16,
        beta_fast: 4.0,
        beta_slow: 1.0,
        attention_factor: Some(1.3),
        mscale: None,
        mscale_all_dim: None,
        truncate: false,
    };
    let rotary_dim = head_dim - 2;
    Rope::with_config(&RopeConfig { rotary_dim, scaling, ..RopeConfig::new(head_dim, 100.0) })
        .unwrap()
}

fn base() -> AttentionConfig {
    AttentionConfig { num_kv_heads: 2, head_dim: 4, ..AttentionConfig::new(5, 4) }
}

/// Every option alone, then combinations.
fn options() -> Vec<(&'static str, AttentionConfig)> {
    let rope = Some(partial_rope(4));
    vec![
        ("not causal", AttentionConfig { causal: false, ..base() }),
        ("window on both sides", AttentionConfig { causal: false, window: Some(1), ..base() }),
        ("output bias", AttentionConfig { output_bias: true, ..base() }),
        ("scale", AttentionConfig { scale: Some(1.3), ..base() }),
        ("softcap", AttentionConfig { softcap: Some(0.6), ..base() }),
        ("norm of heads", AttentionConfig { qk_norm: norm(QkNormScope::Head, false), ..base() }),
        (
            "norm of projections",
            AttentionConfig { qk_norm: norm(QkNormScope::Projection, false), ..base() },
        ),
        ("unit offset", AttentionConfig { qk_norm: norm(QkNormScope::Head, true), ..base() }),
        ("sinks", AttentionConfig { sinks: true, ..base() }),
        ("partial rope", AttentionConfig { rope: rope.clone(), ..base() }),
        (
            "all, causal",
            AttentionConfig {
                qkv_bias: true,
                output_bias: true,
                rope: rope.clone(),
                scale: Some(0.4),
                softcap: Some(1.5),
                qk_norm: norm(QkNormScope::Head, true),
                window: Some(2),
                sinks: true,
                ..base()
            },
        ),
        (
            "all, not causal",
            AttentionConfig {
                causal: false,
                qkv_bias: true,
                output_bias: true,
                rope,
                scale: Some(2.0),
                softcap: Some(0.9),
                qk_norm: norm(QkNormScope::Projection, true),
                window: Some(1),
                ..base()
            },
        ),
    ]
}

#[test]
fn finite_differences_of_every_option() {
    for (name, config) in options() {
        println!("{name}");
        let b = builder(DType::F64);
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        check(&[randn("x", &[2, 4, 5])], &params, &|x| layer.forward(&x[0]));
        let documents = Documents::of_lengths(&[vec![1, 3], vec![2, 2]]).unwrap();
        check(&[randn("x", &[2, 4, 5])], &params, &|x| documents.run(|| layer.forward(&x[0])));
    }
}

/// The definition, by candle's operations and gradients.
fn definition(
    params: &Params,
    config: &AttentionConfig,
    x: &Tensor,
    sees: &dyn Fn(usize, usize, usize) -> bool,
) -> Result<Tensor> {
    let (batch, time, _) = x.dims3()?;
    let (heads, dim) = (config.num_heads, config.head_dim);
    let get =
        |name: &str| params.tree.parameter(&format!("attn.{name}")).map(|p| p.tensor()).transpose();
    let project = |x: &Tensor, name: &str| -> Result<Tensor> {
        let weight = get(&format!("{name}.weight"))?.unwrap();
        let y = x.broadcast_matmul(&weight.t()?)?;
        Ok(match get(&format!("{name}.bias"))? {
            Some(bias) => y.broadcast_add(&bias)?,
            None => y,
        })
    };
    let split = |x: Tensor| x.reshape((batch, time, (), dim));
    let normed = |x: Tensor, name: &str| -> Result<Tensor> {
        let Some(norm) = config.qk_norm else { return Ok(split(x)?) };
        let weight = get(&format!("{name}.weight"))?.unwrap();
        let weight = if norm.unit_offset { (weight + 1.0)? } else { weight };
        let x = if norm.scope == QkNormScope::Head { split(x)? } else { x };
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + norm.eps)?.sqrt()?;
        Ok(split(x.broadcast_div(&rms)?.broadcast_mul(&weight)?)?)
    };
    let turned = |x: Tensor| -> Result<Tensor> {
        let x = x.transpose(1, 2)?.contiguous()?;
        config.rope.as_ref().map_or(Ok(x.clone()), |rope| rope.forward(&x, 0))
    };
    let repeated = |x: Tensor| -> Result<Tensor> {
        let (b, kv, t, d) = x.dims4()?;
        let x = x.unsqueeze(2)?.broadcast_as((b, kv, heads / kv, t, d))?.contiguous()?;
        Ok(x.reshape((b, heads, t, d))?)
    };
    let q = turned(normed(project(x, "q_proj")?, "q_norm")?)?;
    let k = repeated(turned(normed(project(x, "k_proj")?, "k_norm")?)?)?;
    let v = repeated(split(project(x, "v_proj")?)?.transpose(1, 2)?.contiguous()?)?;
    let scale = config.scale.unwrap_or(1.0 / (dim as f64).sqrt());
    let mut scores = (q.matmul(&k.t()?)? * scale)?;
    if let Some(cap) = config.softcap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let mask: Vec<f64> = (0..batch * time * time)
        .map(|i| match sees(i / (time * time), i / time % time, i % time) {
            true => 0.0,
            false => f64::NEG_INFINITY,
        })
        .collect();
    let mask = Tensor::from_vec(mask, (batch, 1, time, time), &Device::Cpu)?;
    let mut scores = scores.broadcast_add(&mask)?;
    if let Some(sinks) = get("sinks")? {
        let sinks = sinks.reshape((1, heads, 1, 1))?.broadcast_as((batch, heads, time, 1))?;
        scores = Tensor::cat(&[scores, sinks], D::Minus1)?;
    }
    let p = candle_nn::ops::softmax(&scores, D::Minus1)?;
    let p = p.narrow(D::Minus1, 0, time)?.contiguous()?;
    let y = p.matmul(&v)?.transpose(1, 2)?.contiguous()?.flatten_from(2)?;
    project(&y, "o_proj")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Around and beyond the kernels' blocks, against the definition with candle's gradients.
    #[test]
    fn options_equal_the_definition(
        lengths in prop::collection::vec(1usize..170, 1..5), packed: bool, causal: bool,
        window in prop::option::of(1usize..180), softcap in prop::option::of(0.3f64..3.0),
        scope in prop::option::of(prop::sample::select(vec![
            QkNormScope::Head, QkNormScope::Projection,
        ])),
        unit_offset: bool, rope: bool, kv_heads in prop::sample::select(vec![1usize, 2, 4]),
        portable: bool, sinks: bool,
    ) {
        let _portable = portable.then(force_portable);
        let time: usize = lengths.iter().sum();
        let reversed: Vec<usize> = lengths.iter().rev().copied().collect();
        let lengths = [lengths, reversed];
        let config = AttentionConfig {
            causal,
            window,
            softcap,
            sinks,
            num_kv_heads: kv_heads,
            qk_norm: scope.map(|scope| QkNorm { eps: EPS, scope, unit_offset }),
            rope: rope.then(|| partial_rope(4)),
            ..base()
        };
        let b = builder(DType::F64);
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let document = |sequence: usize, position: usize| {
            let mut end = 0;
            lengths[sequence].iter().position(|n| { end += n; position < end })
        };
        let sees = |sequence: usize, i: usize, j: usize| {
            let near = match config.window {
                None => true,
                Some(window) if causal => i < j + window,
                Some(window) => i.abs_diff(j) <= window,
            };
            let together = !packed || document(sequence, i) == document(sequence, j);
            near && together && (!causal || j <= i)
        };
        let documents = packed.then(|| Documents::of_lengths(&lengths).unwrap());
        let x = randn("x", &[2, time, 5]);
        let ours = analytic(std::slice::from_ref(&x), &params, &|x| {
            let _documents = documents.as_ref().map(Documents::enter);
            layer.forward(&x[0])
        });
        let want = analytic(&[x], &params, &|x| definition(&params, &config, &x[0], &sees));
        assert_same("definition", &ours, &want, 1e-9);
    }
}

/// Blocks of queries start and end in the middle of documents and windows.
#[test]
fn portable_blocks_of_encoders_agree() {
    for window in [None, Some(40)] {
        let b = builder(DType::F64);
        let config = AttentionConfig { causal: false, window, softcap: Some(2.0), ..base() };
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[1, 1200, 5]);
        let documents = Documents::of_lengths(&[[700, 30, 470]]).unwrap();
        let f = |x: &[Tensor]| documents.run(|| layer.forward(&x[0]));
        let host = analytic(std::slice::from_ref(&x), &params, &f);
        let _portable = force_portable();
        assert_same("portable", &analytic(&[x], &params, &f), &host, 1e-9);
    }
}

#[test]
fn portable_heads_turn_in_part() {
    for time in [1, 2, 5] {
        let b = builder(DType::F64);
        let config = AttentionConfig { rope: Some(partial_rope(4)), ..base() };
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[2, time, 5]);
        let f = |x: &[Tensor]| layer.forward(&x[0]);
        let host = analytic(std::slice::from_ref(&x), &params, &f);
        let _portable = force_portable();
        assert_same("portable", &analytic(&[x], &params, &f), &host, 1e-9);
    }
}

/// Compares padded sequences with each sequence alone.
#[test]
fn padding_changes_nothing() {
    for causal in [true, false] {
        let b = builder(DType::F64);
        let rope = Some(Rope::new(4, 100.0).unwrap());
        let config = AttentionConfig { causal, rope, ..base() };
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        let x = randn("x", &[3, 6, 5]);
        let spans = [(0, 4), (3, 3), (1, 4)];
        let mask = Tensor::new(
            &[[1u32, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]],
            &Device::Cpu,
        );
        let mask = mask.unwrap();
        let documents = Documents::of_mask(&mask).unwrap();
        let tokens = |y: &Tensor, alone: bool| -> Result<Tensor> {
            let rows = spans.iter().enumerate().map(|(i, &(start, n))| {
                let start = if alone { 0 } else { start };
                Ok(y.get(i)?.narrow(0, start, n)?)
            });
            Ok(Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?)
        };
        let padded = analytic(std::slice::from_ref(&x), &params, &|x| {
            tokens(&documents.run(|| layer.forward(&x[0]))?, false)
        });
        let alone = analytic(&[x], &params, &|x| {
            let ys = spans.iter().enumerate().map(|(i, &(start, n))| {
                Ok(layer.forward(&x[0].narrow(0, i, 1)?.narrow(1, start, n)?)?.squeeze(0)?)
            });
            Ok(Tensor::cat(&ys.collect::<Result<Vec<_>>>()?, 0)?)
        });
        assert_same("alone", &padded, &alone, 1e-11);
    }
}

#[test]
fn masks_are_checked() {
    let new = |mask: &Tensor| Documents::of_mask(mask).unwrap_err();
    let mask = |rows: &[[i64; 4]]| {
        Tensor::new(rows.concat(), &Device::Cpu).unwrap().reshape(((), 4)).unwrap()
    };
    assert_says!(new(&mask(&[[1, 1, 0, 0], [1, 0, 0, 1]])), "… sequence 1 has padding between …");
    assert_says!(new(&mask(&[[1, 2, 0, 0]])), "an attention mask … padding, got 2 in sequence 0");
    assert_says!(
        new(&mask(&[[1, 1, 0, 0]]).to_dtype(DType::F32).unwrap()),
        "an attention mask is u8, u32 or i64, got F32"
    );
    assert_says!(
        new(&mask(&[[1, 1, 0, 0]]).flatten_all().unwrap()),
        "an attention mask is [batch, time], got [4]"
    );
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let mask = mask(&[[0, 0, 1, 0], [0, 0, 0, 0]]).to_dtype(dtype).unwrap();
        let positions = Documents::of_mask(&mask).unwrap().positions(&Device::Cpu).unwrap();
        assert_eq!(positions.to_vec2::<u32>().unwrap(), [[0, 1, 0, 0], [0, 1, 2, 3]]);
    }
}

#[test]
fn unusable_options_are_refused() {
    let b = builder(DType::F64);
    let new = |config: AttentionConfig| {
        CausalSelfAttention::new(&b.pp("attn"), &config).map(drop).unwrap_err()
    };
    assert_says!(
        new(AttentionConfig { softcap: Some(0.0), ..base() }),
        "module `attn`: softcap … positive number, got 0.0"
    );
    assert_says!(
        new(AttentionConfig { scale: Some(f64::NAN), ..base() }),
        "module `attn`: scale … positive number, got NaN"
    );
    let qk_norm = Some(QkNorm { eps: -1.0, scope: QkNormScope::Head, unit_offset: false });
    assert_says!(
        new(AttentionConfig { qk_norm, ..base() }),
        "module `attn.q_norm` … epsilon … -1.0"
    );
}
