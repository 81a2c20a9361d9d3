//! Layers that compute in f32 among bf16 layers.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::autograd::storage;
use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit};
use fulgurite_core::nn::layer_table::LAYERS;
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, GroupNorm, LayerNorm, Linear, QkNorm, QkNormScope,
    RmsNorm, SwiGluMlp, linear_cross_entropy, residual,
};
use fulgurite_core::parameter::LocalGrads;
use fulgurite_core::strategy::materialize;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{Decoder, DecoderTraining, Run, Variant};
use fulgurite_transports::run_ranks;

fn init(keep: &[&str]) -> ModuleInit {
    let keep_in_fp32 = keep.iter().map(|&pattern| pattern.to_owned()).collect();
    ModuleInit { compute_dtype: DType::BF16, keep_in_fp32, ..ModuleInit::default() }
}

fn train(ranks: usize, config: &str, variant: Variant, keep: &[&str]) -> Run {
    let mut runs = run_ranks(ranks, |world| {
        DecoderTraining::with_init(world, config, variant, 1, init(keep))?.run()
    })
    .unwrap_or_else(|error| panic!("{config}, {variant:?}: {error}"));
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "{config}: ranks differ");
    run
}

const KEEP: [&str; 5] = ["norm", "post_norm", "self_attn", "mlp.up", "mlp.down"];

/// The layers in between compute in bf16, and round differently where they are cut.
// checklist: PyTorch: _override_module_mixed_precision
#[test]
fn as_on_one_device_with_layers_in_f32() {
    let single = r#"{"type": "single_device"}"#;
    let kept = train(1, single, Variant::default(), &KEEP);
    let all = train(1, single, Variant::default(), &[]);
    assert_ne!(kept.losses, all.losses);
    let mesh = |shard, tensor| {
        format!(
            r#"{{"type": "model_parallel", "data_parallel_replicate_size": 1, "data_parallel_shard_size": {shard},
                "context_parallel_size": 1, "tensor_parallel_size": {tensor}}}"#
        )
    };
    let mut runs = vec![(2, r#"{"type": "ddp"}"#.to_owned(), Variant::default())];
    runs.push((2, r#"{"type": "fsdp"}"#.to_owned(), Variant::default()));
    runs.push((
        2,
        r#"{"type": "fsdp", "activation_checkpointing": "full"}"#.to_owned(),
        Variant::default(),
    ));
    runs.extend(Variant::ALL.map(|variant| (2, mesh(1, 2), variant)));
    runs.push((4, mesh(2, 2), Variant::ALL[1]));
    for (ranks, config, variant) in runs {
        let run = train(ranks, &config, variant, &KEEP);
        for (i, (a, b)) in run.losses.iter().zip(&kept.losses).enumerate() {
            assert!((a - b).abs() <= 1e-3 * b, "{config}, {variant:?}: step {i}: {a} and {b}");
        }
    }
}

/// A model on one rank, with its values.
fn build<M>(keep: &[&str], model: impl FnOnce(&ModuleBuilder) -> Result<M>) -> M {
    build_in(DType::BF16, keep, model)
}

fn build_in<M>(
    compute_dtype: DType,
    keep: &[&str],
    model: impl FnOnce(&ModuleBuilder) -> Result<M>,
) -> M {
    let b = ModuleBuilder::new(ModuleInit { compute_dtype, ..init(keep) });
    let model = model(&b).unwrap();
    let mut tree = b.finish().unwrap();
    materialize::replicate(&tree.slots(), 3).unwrap();
    materialize::refresh_compute(&tree.slots()).unwrap();
    materialize::buffers(&tree, 3).unwrap();
    let grads = Arc::new(LocalGrads::default());
    tree.slots().iter().for_each(|slot| slot.set_reducer(grads.clone()));
    model
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn input() -> Tensor {
    let values = (0..24).map(|i| (i * 37 % 101) as f32 * 0.02 - 1.0).collect();
    let x = Tensor::from_vec(values, (2, 3, 4), &candle_core::Device::Cpu).unwrap();
    x.to_dtype(DType::BF16).unwrap()
}

/// A weight that bf16 would round away counts in f32; inputs and outputs keep their dtype and
/// gradient.
// checklist: PyTorch: _override_module_mixed_precision
#[test]
fn kept_layers_compute_in_f32() {
    let x = candle_core::Var::from_tensor(&input()).unwrap();
    let of = |keep: &[&str]| {
        let norm = build(keep, |b| RmsNorm::new(&b.pp("norm"), 4, 1e-6));
        let fine = Tensor::new(&[1.0 + 3.0 / 1024.0; 4], x.device()).unwrap();
        let value = norm.weight().value().unwrap();
        storage::copy_from(&value, &fine.to_dtype(value.dtype()).unwrap()).unwrap();
        let y = norm.forward(x.as_tensor()).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(x.as_tensor()).unwrap().dtype(), DType::BF16);
        (norm.weight().compute_dtype(), floats(&value), floats(&y))
    };
    let (dtype, value, kept) = of(&["norm"]);
    assert_eq!((dtype, value), (DType::F32, vec![1.0 + 3.0 / 1024.0; 4]));
    let (dtype, value, half) = of(&[]);
    assert_eq!((dtype, value), (DType::BF16, vec![1.0; 4]));
    assert_ne!(kept, half);
}

/// A kept layer has parameters in f32, and input, output and their gradients in bf16.
#[test]
fn every_layer_is_kept_or_refused() {
    let scope = ForwardScope { training: true, ..ForwardScope::default() };
    for row in LAYERS.iter().filter(|row| row.has_parameters()) {
        let b = ModuleBuilder::new(init(&["layer"]));
        row.build(&b.pp("layer")).unwrap();
        let finished = b.finish();
        assert_eq!(finished.is_ok(), row.keeps_fp32, "{}: {:?}", row.layer, finished.err());
        if !row.keeps_fp32 {
            continue;
        }
        let layer = build(&["layer"], |b| row.build(&b.pp("layer")));
        let values: usize = row.shape.iter().product();
        let x = Tensor::arange(0f32, values as f32, &candle_core::Device::Cpu).unwrap();
        let x = x.sin().unwrap().reshape(row.shape).unwrap().to_dtype(DType::BF16).unwrap();
        let x = candle_core::Var::from_tensor(&x).unwrap();
        let y = scope.clone().run(|| layer.forward(x.as_tensor())).unwrap();
        assert_eq!(y.dtype(), DType::BF16, "{}", row.layer);
        let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(x.as_tensor()).unwrap().dtype(), DType::BF16, "{}", row.layer);
        // The same as in f32, rounded to bf16; some attention is several operations, which round
        // in between.
        let wide = build_in(DType::F32, &[], |b| row.build(&b.pp("layer")));
        let wide_x = x.to_dtype(DType::F32).unwrap();
        let wide = scope.clone().run(|| wide.forward(&wide_x)).unwrap();
        let wide = floats(&wide.to_dtype(DType::BF16).unwrap());
        let largest = wide.iter().fold(0f32, |most, y| most.max(y.abs()));
        let several = ["MultiHeadAttention", "RelativePositionBias", "LatentAttention"];
        let several = several.contains(&row.layer);
        let allowed = if several { 0.01 * largest } else { 0.0 };
        for (kept, wide) in floats(&y).iter().zip(&wide) {
            assert!((kept - wide).abs() <= allowed, "{}: {kept} and {wide}", row.layer);
        }
    }
}

#[test]
fn every_kind_that_can_be_kept_computes() {
    let x = input();
    let build_all = |keep: &[&str]| {
        build(keep, |b| {
            Ok((
                Linear::with_bias(&b.pp("linear"), 4, 4)?,
                LayerNorm::new(&b.pp("norm"), 4, 1e-6)?,
                SwiGluMlp::new(&b.pp("mlp"), 4, 6)?,
                GroupNorm::new(&b.pp("groups"), 1, 3, 1e-6)?,
                Linear::new(&b.pp("head"), 4, 5)?,
            ))
        })
    };
    let compute = |keep: &[&str]| {
        let (linear, norm, mlp, groups, head) = build_all(keep);
        let y = linear.forward(&x).unwrap();
        let y = residual(&y, &norm, &mlp).unwrap();
        let y = groups.forward(&y).unwrap();
        assert_eq!(y.dtype(), DType::BF16);
        let targets = Tensor::new(&[[0i64, 1, 2], [3, 4, 0]], x.device()).unwrap();
        linear_cross_entropy(&head, &y, &targets).unwrap().mean().unwrap()
    };
    let half = compute(&[]);
    // Norms, whose weights are ones here, compute the same: they always sum in f32.
    for (name, differs) in
        [("linear", true), ("norm", false), ("mlp", true), ("groups", false), ("head", true)]
    {
        let kept = compute(&[name]);
        assert_eq!(kept != half, differs, "{name}: {kept} {half}");
        assert!((kept - half).abs() < 0.02 * half, "{name}: {kept} {half}");
    }
}

/// Norms of queries and keys are parts of a block, and their weights are kept in f32.
#[test]
fn norms_inside_attention_are_kept() {
    for scope in [QkNormScope::Head, QkNormScope::Projection] {
        let compute = |dtype: DType, keep: &[&str]| {
            let attention = build_in(dtype, keep, |b| {
                let qk_norm = Some(QkNorm { eps: 1e-6, scope, unit_offset: false });
                let config = AttentionConfig { qk_norm, ..AttentionConfig::new(8, 2) };
                CausalSelfAttention::new(&b.pp("self_attn"), &config)
            });
            let x = Tensor::arange(0f32, 48.0, &candle_core::Device::Cpu).unwrap();
            let x = x.sin().unwrap().reshape((2, 3, 8)).unwrap().to_dtype(dtype).unwrap();
            let y = attention.forward(&x).unwrap();
            assert_eq!(y.dtype(), dtype);
            y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            floats(&y)
        };
        let kept = compute(DType::BF16, &["*norm*"]);
        let exact = compute(DType::F32, &[]);
        let largest = exact.iter().fold(0f32, |most, y| most.max(y.abs()));
        for (kept, exact) in kept.iter().zip(&exact) {
            assert!((kept - exact).abs() < 0.02 * largest, "{scope:?}: {kept} and {exact}");
        }
    }
}

#[test]
fn wrong_patterns_say_which_layers_can() {
    let error = |keep: &str| {
        let b = ModuleBuilder::new(init(&[keep]));
        Decoder::new(&b).unwrap();
        b.finish().unwrap_err().to_string()
    };
    assert_says!(error("norms"), "`trainer.keep_in_fp32`: no layer … matches `norms` …");
    assert_says!(
        error("q_proj"),
        "module `layers.0.self_attn.q_proj` … `trainer.keep_in_fp32` … computed as a part of \
         `layers.0.self_attn`; name that instead"
    );
    assert_says!(
        error("embedding"),
        "module `embedding` … `trainer.keep_in_fp32` … cannot cast … kind Embedding. Norms, \
         convolutions, linear layers … attention and feed-forward blocks of `nn` can"
    );
    assert_says!(
        error("lm_head"),
        "module `lm_head` … `trainer.keep_in_fp32` … cannot cast … kind Linear. Norms, \
         convolutions, linear layers … attention and feed-forward blocks of `nn` can"
    );
    // Without half precision the patterns have no effect, but are still checked.
    let b = ModuleBuilder::new(ModuleInit { compute_dtype: DType::F32, ..init(&["norms"]) });
    Decoder::new(&b).unwrap();
    assert!(b.finish().unwrap_err().to_string().contains("no layer of the model"));
}
