//! Unmodified layers of candle_nn train under every strategy, and gradients they lose are reported.

use std::sync::Arc;

use candle_core::{DType, Device, Module as _, Tensor};
use candle_nn::Linear;
use fulgurite_core::Result;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::fabric::UnusedParameters;
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{
    self, Conv2d, Conv2dConfig, Loss, MaxPool2d, MaxPool2dConfig, cross_entropy,
};
use fulgurite_core::optim::AdamW;
use fulgurite_core::parameter::{Init, Parameter};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{
    Classifier, Run, checkpointed, gather_weights, images, init, strategy,
};
use fulgurite_transports::run_ranks;

const CONFIGS: &[&str] = &[
    r#"{"type": "ddp"}"#,
    r#"{"type": "ddp", "first_bucket_mb": 0, "bucket_cap_mb": 0.0003}"#,
    r#"{"type": "fsdp"}"#,
    r#"{"type": "fsdp", "reshard_after_forward": false, "prefetch": 0}"#,
    r#"{"type": "ddp", "activation_checkpointing": "full"}"#,
    r#"{"type": "ddp", "bucket_cap_mb": 0.0003, "activation_checkpointing": "full"}"#,
    r#"{"type": "fsdp", "activation_checkpointing": "full"}"#,
];

fn train(world: Arc<dyn ProcessGroup>, config: &str) -> Result<Run> {
    let (rank, size) = (world.rank(), world.size());
    let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
    let optimizer = AdamW { lr: 0.01, eps: 1e-5, ..AdamW::default() };
    let (model, mut optimizer) = fabric.setup(Classifier::new, &optimizer)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..10 {
        let (images, labels) = images(step, rank, size)?;
        fabric.backward(&model.loss(&images, &labels)?)?;
        losses.push(fabric.step_totals(&[])?.mean());
        norms.push(fabric.clip_gradients_norm(&mut optimizer, 1.0)?);
        optimizer.step()?;
    }
    let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
    Ok(Run { losses, norms, weights, averages: std::collections::BTreeMap::new() })
}

#[test]
fn a_model_of_candle_nn_trains_alike_everywhere() {
    let single = run_ranks(1, |world| train(world, r#"{"type": "single_device"}"#)).unwrap();
    let single = &single[0];
    assert!(single.losses[9] < 0.9 * single.losses[0], "{:?}", single.losses);
    assert_eq!(single.weights.len(), 9);
    for ranks in [2, 3] {
        let runs: Vec<Run> = CONFIGS
            .iter()
            .map(|config| run_ranks(ranks, |world| train(world, config)).unwrap().swap_remove(0))
            .collect();
        for (run, config) in runs.iter().zip(CONFIGS) {
            assert_eq!(*run, runs[0], "{config} and ddp on {ranks} ranks");
        }
        let close = |a: f64, b: f64, tolerance: f64| (a - b).abs() <= tolerance * b.abs().max(1.0);
        for i in 0..10 {
            let (run, what) = (&runs[0], format!("step {i}, {ranks} ranks"));
            assert!(close(run.losses[i], single.losses[i], 1e-5), "{what}: loss");
            assert!(close(run.norms[i], single.norms[i], 1e-5), "{what}: norm");
        }
        for (fqn, weights) in &single.weights {
            for (a, b) in runs[0].weights[fqn].iter().zip(weights) {
                assert!(close((*a).into(), (*b).into(), 1e-4), "{fqn}: {a} and {b}");
            }
        }
    }
}

/// A parameter requested by two units under one name belongs to the root.
// checklist: PyTorch: _is_fsdp_flattened
#[test]
fn a_name_asked_for_twice_ties_across_units() {
    for config in CONFIGS {
        let gradients = tied_across_units(config);
        assert_eq!(gradients, tied_across_units(&plain(config)), "{config}");
    }
}

/// The configuration without activation checkpointing.
fn plain(config: &str) -> String {
    match config.split_once(", \"activation_checkpointing\"") {
        Some((plain, _)) => format!("{plain}}}"),
        None => config.to_owned(),
    }
}

/// The gradients of a weight shared by two units, on both of two ranks that share the batch.
fn tied_across_units(config: &str) -> Vec<Vec<f32>> {
    run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let shared = |b: &ModuleBuilder| {
            Ok(candle_nn::linear_no_bias(3, 3, b.var_builder().root().pp("shared"))?)
        };
        let units = fabric.setup_module(|b| Ok([b.unit("a", shared)?, b.unit("b", shared)?]))?;
        let tree = fabric.module_tree()?;
        assert_eq!((tree.parameters().len(), tree.unit_parameters(None).len()), (1, 1));
        let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
        let y = units[0].call(&x, |layer, x| Ok(layer.forward(x)?))?;
        let y = units[1].call(&y, |layer, x| Ok(layer.forward(x)?))?;
        fabric.backward(&Loss::new(y.sum_all()?, 1.0))?;
        let grad = tree.parameters()[0].local_grad().expect("a gradient was synchronised");
        Ok(grad.to_vec1()?)
    })
    .unwrap()
}

/// A linear layer whose gradient candle_nn's fused norm cuts off, and a head that gets a gradient.
struct Cut {
    body: Unit<(Linear, Tensor, Tensor)>,
    head: Linear,
}

impl Cut {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let body = b.unit("body", |b| {
            let vb = b.var_builder();
            let linear = candle_nn::linear_no_bias(4, 4, vb.pp("linear"))?;
            let weight = vb.get_with_hints(4, "norm.weight", candle_nn::Init::Const(1.0))?;
            let bias = vb.get_with_hints(4, "norm.bias", candle_nn::Init::Const(0.5))?;
            Ok((linear, weight, bias))
        })?;
        Ok(Self { body, head: candle_nn::linear(4, 1, b.var_builder().pp("head"))? })
    }

    #[allow(clippy::disallowed_methods, reason = "that it loses gradients is what is tested")]
    fn loss(&self) -> Result<Loss> {
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        let y = self.body.call(&x, |(linear, weight, bias), x| {
            Ok(candle_nn::ops::layer_norm(&linear.forward(x)?, weight, bias, 1e-5)?)
        })?;
        Ok(Loss::new(self.head.forward(&y)?.sqr()?.sum_all()?, 2.0))
    }
}

/// One step of [`Cut`]: the weights of the body's linear layer and of the head, before and after.
fn cut_step(config: &str, policy: UnusedParameters) -> Result<[[Vec<f32>; 2]; 2]> {
    let steps = run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let decaying = AdamW { lr: 0.1, weight_decay: 0.5, ..AdamW::default() };
        let (model, optimizer) = fabric.setup(Cut::new, &decaying)?;
        let mut optimizer = optimizer.with_unused_parameters(policy);
        let read = || -> Result<[Vec<f32>; 2]> {
            let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
            Ok(["body.linear.weight", "head.weight"].map(|fqn| weights[fqn].clone()))
        };
        let before = read()?;
        fabric.backward(&model.loss()?)?;
        optimizer.step()?;
        Ok([before, read()?])
    });
    Ok(steps?.swap_remove(0))
}

#[test]
fn lost_candle_nn_gradients_are_named() {
    for config in CONFIGS {
        let error = cut_step(config, UnusedParameters::Error).unwrap_err();
        assert_says!(
            error,
            "3 … got no gradient … body.linear.weight, body.norm.weight, body.norm.bias. … \
                 candle_nn's … `trainer.freeze` … `trainer.unused_parameters` …"
        );
    }
}

#[test]
fn unused_parameter_policies_differ_in_decay() {
    for config in CONFIGS {
        let [before, after] = cut_step(config, UnusedParameters::Ignore).unwrap();
        assert_eq!(after[0], before[0], "{config}");
        assert_ne!(after[1], before[1], "{config}");
        let [before, after] = cut_step(config, UnusedParameters::Zero).unwrap();
        for (a, b) in after[0].iter().zip(&before[0]) {
            assert!((a - b * (1.0 - 0.1 * 0.5)).abs() < 1e-6, "{config}: {b} became {a}");
        }
        assert_ne!(after[1], before[1], "{config}");
    }
}

/// An operation between a convolution and a head.
type Pool = fn(&Tensor) -> Result<Tensor>;

/// The error, if any, of a step with one pooling inside a unit and another after it.
fn pooled(config: &str, inside: Pool, outside: Pool) -> Option<String> {
    let step = run_ranks(1, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let (model, mut optimizer) = fabric.setup(
            |b| {
                let conv = |b: &ModuleBuilder| {
                    Conv2d::new(&b.pp("conv"), 1, 2, [3, 3], Conv2dConfig::default())
                };
                Ok((b.unit("stem", conv)?, nn::Linear::new(&b.pp("head"), 2, 3)?))
            },
            &AdamW::default(),
        )?;
        let (images, labels) = images(0, 0, 1)?;
        let x = model.0.call(&images, move |conv, x| inside(&conv.forward(x)?))?;
        let logits = model.1.forward(&outside(&x)?.flatten_from(2)?.mean(2)?)?;
        fabric.backward(&cross_entropy(&logits, &labels)?)?;
        optimizer.step()
    });
    step.err().map(|error| error.to_string())
}

#[test]
fn wrong_candle_gradients_are_named() {
    let keep: Pool = |x| Ok(x.clone());
    let theirs: Pool = |x| Ok(x.max_pool2d(2)?);
    let own: Pool = |x| MaxPool2d::new([2, 2], MaxPool2dConfig::default())?.forward(x);
    let remainder: Pool = |x| Ok(x.avg_pool2d(3)?);
    let whole: Pool = |x| Ok(x.avg_pool2d(2)?);
    for config in [
        r#"{"type": "single_device"}"#,
        r#"{"type": "fsdp"}"#,
        r#"{"type": "fsdp", "activation_checkpointing": "full"}"#,
    ] {
        for (inside, outside) in [(theirs, keep), (keep, theirs)] {
            let error = pooled(config, inside, outside).expect(config);
            assert!(error.contains("candle's `max_pool2d` gives 1/4 of the gradient"), "{error}");
        }
        let error = pooled(config, keep, remainder).expect(config);
        assert!(error.contains("use `AvgPool2d` of `fulgurite::nn`"), "{error}");
        for pool in [keep, own, whole] {
            assert_eq!(pooled(config, pool, keep), None, "{config}");
            assert_eq!(pooled(config, keep, pool), None, "{config}");
        }
    }
}

/// A custom layer that computes with its scale and reads its shift without a graph.
struct Detached {
    scale: Parameter,
    shift: Parameter,
    other: Parameter,
}

impl Detached {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            scale: b.parameter("scale", [4], Init::ONES)?,
            shift: b.parameter("shift", [4], Init::ONES)?,
            other: b.parameter("other", [4], Init::ONES)?,
        })
    }
}

#[test]
fn missing_gradients_are_named_with_the_cause() {
    let step = |config: &str, scaled: bool| {
        let step = run_ranks(2, |world| {
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
            let (layer, mut optimizer) =
                fabric.setup(|b| b.unit("layer", Detached::new), &AdamW::default())?;
            let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
            let y = layer.call(&x, move |layer, x| {
                let scale = if scaled { layer.scale.tensor()? } else { layer.scale.value()? };
                Ok(x.broadcast_mul(&scale)?.broadcast_add(&layer.shift.value()?)?)
            })?;
            fabric.backward(&Loss::new(y.sqr()?.sum_all()?, 2.0))?;
            assert!(layer.module().other.requires_grad());
            optimizer.step()
        });
        step.unwrap_err()
    };
    for config in [r#"{"type": "ddp"}"#, r#"{"type": "fsdp"}"#] {
        assert_says!(step(config, true), "2 … `Parameter::value` … not use `layer.other` …");
        assert_says!(step(config, false), "… not depend … `layer.scale` … `Parameter::tensor`");
    }
}

/// Two units of equal shapes; rank 1 skips one layer of the second unit. That unit completes late
/// on rank 1, and must still be reduced together with the same unit of the other ranks.
#[test]
fn skipped_layers_keep_the_reduction_order() {
    let train = |config: &str| {
        run_ranks(2, move |world| {
            let rank = world.rank();
            let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 3)?;
            let (units, mut optimizer) = fabric.setup(
                |b| {
                    (0..2)
                        .map(|i| {
                            b.unit(&format!("units.{i}"), |b| {
                                let vb = b.var_builder();
                                Ok([
                                    candle_nn::linear(3, 3, vb.pp("first"))?,
                                    candle_nn::linear(3, 3, vb.pp("second"))?,
                                ])
                            })
                        })
                        .collect::<Result<Vec<Unit<[Linear; 2]>>>>()
                },
                &AdamW::default(),
            )?;
            for _ in 0..3 {
                let mut x = Tensor::new(&[[1f32, 2.0, 3.0]], &Device::Cpu)?;
                for (i, unit) in units.iter().enumerate() {
                    x = unit.call(&x, move |layers, x| {
                        let y = layers[0].forward(x)?;
                        Ok(if (rank, i) == (1, 1) { y } else { layers[1].forward(&y)? })
                    })?;
                }
                fabric.backward(&Loss::new(x.sqr()?.sum_all()?, 1.0))?;
                optimizer.step()?;
            }
            gather_weights(fabric.module_tree()?, &**fabric.world())
        })
        .unwrap()
    };
    let expected = train(r#"{"type": "ddp"}"#);
    let fsdp = r#"{"type": "fsdp", "reshard_after_forward": false}"#;
    assert_eq!(train(fsdp), expected);
    for mode in ["full", "selective"] {
        assert_eq!(train(&checkpointed(fsdp, mode)), expected, "{mode}");
    }
}
