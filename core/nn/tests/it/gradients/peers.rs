//! Results of `transformers`, written by `fixtures/make_attention.py`.

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::module::Module as _;
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Documents, QkNorm, QkNormScope, RmsNorm, Rope,
    RopeConfig, RopeScaling,
};
use fulgurite_test_message::assert_says;

use super::harness::{Params, assert_close, builder, flat};
use super::recorded::{numbers, read, values};

const BATCH: usize = 2;
const TIME: usize = 7;

const ORDER: [&str; 6] = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"];

fn cases() -> Vec<(&'static str, AttentionConfig)> {
    let rope = |rotary_dim| {
        Rope::with_config(&RopeConfig { rotary_dim, ..RopeConfig::new(4, 100.0) }).ok()
    };
    let norm = |scope, unit_offset, eps| Some(QkNorm { eps, scope, unit_offset });
    let base = |hidden_size| AttentionConfig {
        num_kv_heads: 2,
        head_dim: 4,
        rope: rope(4),
        ..AttentionConfig::new(hidden_size, 4)
    };
    vec![
        ("qwen3", AttentionConfig { qk_norm: norm(QkNormScope::Head, false, 1e-6), ..base(12) }),
        (
            "gemma2",
            AttentionConfig {
                scale: Some(5f64.powf(-0.5)),
                softcap: Some(0.8),
                window: Some(3),
                ..base(12)
            },
        ),
        (
            "gemma3",
            AttentionConfig {
                scale: Some(7f64.powf(-0.5)),
                qk_norm: norm(QkNormScope::Head, true, 1e-6),
                window: Some(3),
                ..base(12)
            },
        ),
        (
            "olmo2",
            AttentionConfig { qk_norm: norm(QkNormScope::Projection, false, 1e-5), ..base(16) },
        ),
        ("phi", AttentionConfig { qkv_bias: true, output_bias: true, rope: rope(2), ..base(16) }),
        (
            "modernbert",
            AttentionConfig { causal: false, window: Some(2), num_kv_heads: 4, ..base(16) },
        ),
    ]
}

#[test]
fn attention_is_that_of_transformers() {
    let recorded = read(include_str!("../../fixtures/attention.toml"));
    for (name, config) in cases() {
        let case = recorded[name].as_table().unwrap();
        let b = builder(DType::F64);
        let layer = CausalSelfAttention::new(&b.pp("attn"), &config).unwrap();
        let params = Params::new(&b);
        for slot in &params.slots {
            let (path, kind) = slot.fqn().rsplit_once('.').unwrap();
            let layer = path.strip_prefix("attn.").unwrap();
            let index = ORDER.iter().position(|name| *name == layer).unwrap();
            let seed = index * 2 + usize::from(kind == "bias");
            let offset = if layer.ends_with("norm") { 1.0 } else { 0.0 };
            let values = (values(seed as f64, slot.global_shape()) + offset).unwrap();
            storage::copy_from(slot.compute().unwrap(), &values).unwrap();
        }
        let shape = [BATCH, TIME, config.hidden_size];
        let mut seen = vec![1u8; BATCH * TIME];
        if name == "modernbert" {
            seen[5..9].fill(0);
        }
        let seen = Tensor::from_vec(seen, (BATCH, TIME), &Device::Cpu).unwrap();
        let documents = (name == "modernbert").then(|| Documents::of_mask(&seen).unwrap());
        let seen = seen.to_dtype(DType::F64).unwrap().unsqueeze(2).unwrap();
        let x = candle_core::Var::from_tensor(&values(20.0, &shape)).unwrap();
        let y = {
            let _documents = documents.as_ref().map(Documents::enter);
            layer.forward(x.as_tensor()).unwrap()
        };
        let cotangent = values(21.0, &shape).broadcast_mul(&seen).unwrap();
        let grads = (&y * cotangent).unwrap().sum_all().unwrap().backward().unwrap();
        let tokens = |t: &Tensor| flat(&t.broadcast_mul(&seen).unwrap());
        let close = |key: &str, got: &[f64]| {
            assert_close(&format!("{name} {key}"), got, &numbers(case, key), 2e-6);
        };
        close("output", &tokens(&y));
        close("input", &tokens(grads.get(&x).unwrap()));
        for slot in &params.slots {
            let key = slot.fqn().strip_prefix("attn.").unwrap();
            close(key, &params.take(slot).unwrap());
        }
        assert_eq!(case.len(), 2 + params.slots.len(), "{name}");
    }
}

/// 1 + weight would lose the weights in bf16.
#[test]
fn unit_offset_norm_has_gemmas_bf16_bits() {
    let recorded = read(include_str!("../../fixtures/attention.toml"));
    let case = recorded["gemma_norm_bf16"].as_table().unwrap();
    let b = builder(DType::BF16);
    let norm = RmsNorm::with_unit_offset(&b.pp("norm"), 8, 1e-6).unwrap();
    let params = Params::new(&b);
    let half = |t: Tensor| t.to_dtype(DType::BF16).unwrap();
    let weight = half((values(4.0, &[8]) * 2f64.powi(-8)).unwrap());
    storage::copy_from(params.slots[0].compute().unwrap(), &weight).unwrap();
    let x = candle_core::Var::from_tensor(&half(values(5.0, &[3, 8]))).unwrap();
    let y = norm.forward(x.as_tensor()).unwrap();
    assert_eq!(flat(&y), numbers(case, "output"));
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_close("input", &flat(grads.get(&x).unwrap()), &numbers(case, "input"), 8e-3);
    assert_close("weight", &params.take(&params.slots[0]).unwrap(), &numbers(case, "weight"), 2e-2);
}

fn scalings() -> Vec<(&'static str, RopeScaling)> {
    let yarn = |original_max_positions, beta_fast, beta_slow| RopeScaling::Yarn {
        factor: 4.0,
        original_max_positions,
        beta_fast,
        beta_slow,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
        truncate: true,
    };
    let with = |change: fn(&mut RopeScaling)| {
        let mut scaling = yarn(256, 32.0, 1.0);
        change(&mut scaling);
        scaling
    };
    let dynamic = RopeScaling::Dynamic { factor: 3.0, max_positions: 256 };
    let long = |factor| RopeScaling::LongRope {
        short_factor: (0..8).map(|i| 1.0 + 0.05 * f64::from(i)).collect(),
        long_factor: (0..8).map(|i| 1.0 + 0.5 * f64::from(i)).collect(),
        factor,
        max_positions: 1024,
        original_max_positions: 256,
        attention_factor: None,
    };
    vec![
        ("default", RopeScaling::None),
        ("partial", RopeScaling::None),
        ("linear", RopeScaling::Linear { factor: 4.0 }),
        ("dynamic_within", dynamic.clone()),
        ("dynamic_beyond", dynamic),
        ("yarn", yarn(256, 32.0, 1.0)),
        (
            "yarn_exact_corners",
            with(|scaling| {
                if let RopeScaling::Yarn { truncate, beta_fast, beta_slow, .. } = scaling {
                    (*truncate, *beta_fast, *beta_slow) = (false, 20.0, 2.0);
                }
            }),
        ),
        ("yarn_zero_corner", yarn(16, 32.0, 2.0)),
        ("yarn_equal_corners", yarn(16, 32.0, 8.0)),
        ("yarn_negative_corners", yarn(16, 32.0, 30.0)),
        (
            "yarn_mscale",
            with(|scaling| {
                if let RopeScaling::Yarn { mscale, mscale_all_dim, .. } = scaling {
                    (*mscale, *mscale_all_dim) = (Some(1.0), Some(0.7));
                }
            }),
        ),
        (
            "yarn_attention_factor",
            with(|scaling| {
                if let RopeScaling::Yarn { attention_factor, .. } = scaling {
                    *attention_factor = Some(1.5);
                }
            }),
        ),
        (
            "llama3",
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 256,
            },
        ),
        ("longrope_short", long(None)),
        ("longrope_long", long(None)),
        ("longrope_factor", long(Some(2.0))),
    ]
}

/// Returns cosines and sines of these positions in a sequence of `length`: the rotation of (1, 0).
fn angles(rope: &Rope, pairs: usize, length: usize, dtype: DType, at: &[usize]) -> [Vec<f64>; 2] {
    let dim = rope.head_dim();
    let row: Vec<f64> = (0..dim).map(|i| if i < pairs { 1.0 } else { 0.0 }).collect();
    let x = Tensor::from_vec(row, (1, dim), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let y = rope.forward(&x.repeat((length, 1)).unwrap(), 0).unwrap();
    let y: Vec<Vec<f64>> = y.to_dtype(DType::F64).unwrap().to_vec2().unwrap();
    let part = |start| at.iter().flat_map(|&p| y[p][start..start + pairs].to_vec()).collect();
    [part(0), part(pairs)]
}

#[test]
fn rope_frequencies_are_those_of_transformers() {
    let recorded = read(include_str!("../../fixtures/rope.toml"));
    let scalings = scalings();
    assert_eq!(recorded.len(), scalings.len());
    for (name, scaling) in scalings {
        let case = recorded[name].as_table().unwrap();
        let (want, length) =
            (numbers(case, "frequencies"), case["length"].as_integer().unwrap() as usize);
        let pairs = want.len();
        let config = RopeConfig { rotary_dim: 2 * pairs, scaling, ..RopeConfig::new(16, 1e4) };
        let rope = Rope::with_config(&config).unwrap();
        // Another length before must leave no trace.
        angles(&rope, pairs, 1024, DType::F32, &[0]);
        let [cos, sin] = angles(&rope, pairs, length, DType::F64, &[1]);
        for (i, want) in want.iter().enumerate() {
            let got = sin[i].atan2(cos[i]);
            assert!((got / want - 1.0).abs() < 1e-6, "{name}: frequency {i} is {got}, not {want}");
        }
        let positions: Vec<usize> =
            numbers(case, "positions").into_iter().map(|p| p as usize).collect();
        let ours = angles(&rope, pairs, length, DType::F32, &positions);
        for (ours, key) in ours.iter().zip(["cosines", "sines"]) {
            for (i, (got, want)) in ours.iter().zip(numbers(case, key)).enumerate() {
                // The angle is a rounded frequency times the position.
                let angle = positions[i / pairs] as f64 * numbers(case, "frequencies")[i % pairs];
                let tolerance = 1e-6 * (1.0 + angle);
                assert!((got - want).abs() < tolerance, "{name} {key}[{i}]: {got} is not {want}");
            }
        }
    }
}

#[test]
fn dynamic_rope_depends_on_the_length_alone() {
    let scaling = RopeScaling::Dynamic { factor: 2.0, max_positions: 16 };
    let config = RopeConfig { scaling, ..RopeConfig::new(8, 1e4) };
    let new = || Rope::with_config(&config).unwrap();
    let used = new();
    for length in [10, 40, 17, 16, 41, 3] {
        let got = angles(&used, 4, length, DType::F64, &[length - 1]);
        assert_eq!(got, angles(&new(), 4, length, DType::F64, &[length - 1]), "{length}");
    }
    assert_ne!(angles(&used, 4, 40, DType::F64, &[9]), angles(&used, 4, 10, DType::F64, &[9]));
}

#[test]
fn unusable_ropes_are_refused() {
    let config = |scaling| RopeConfig { scaling, ..RopeConfig::new(8, 1e4) };
    let new = |config: &RopeConfig| Rope::with_config(config).map(drop).unwrap_err();
    assert_says!(
        new(&RopeConfig { rotary_dim: 10, ..RopeConfig::new(8, 1e4) }),
        "rotary embedding … even rotary_dim of at most head_dim, 8, got 10"
    );
    assert_says!(
        new(&config(RopeScaling::Linear { factor: 0.5 })),
        "rope scaling: factor must be at least 1, got 0.5"
    );
    let long = RopeScaling::LongRope {
        short_factor: vec![1.0; 4],
        long_factor: vec![1.0; 3],
        factor: None,
        max_positions: 64,
        original_max_positions: 16,
        attention_factor: None,
    };
    assert_says!(new(&config(long)), "rope scaling: long_factor must have 4 numbers … got 3");
    let llama = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 4.0,
        high_freq_factor: 4.0,
        original_max_positions: 16,
    };
    assert_says!(new(&config(llama)), "rope scaling: high_freq_factor must be above … got 4 and 4");
}
