//! Computing and reducing in bf16.

use candle_core::{DType, Tensor};
use fulgurite_core::Result;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module as _, ModuleBuilder, ModuleInit, Unit};
use fulgurite_core::nn::{Conv2d, Conv2dConfig, Linear, cross_entropy};
use fulgurite_core::optim::Sgd;
use fulgurite_test_support::training::{Run, Training, gather_weights, images, init, strategy};
use fulgurite_transports::run_ranks;

fn train(ranks: usize, config: &str, compute_dtype: DType) -> Run {
    run_ranks(ranks, |world| Training::new(world, config, compute_dtype, 2)?.run())
        .unwrap_or_else(|error| panic!("{config}: {error}"))
        .swap_remove(0)
}

fn policy(param: &str, reduce: &str) -> String {
    format!(
        r#"{{"type": "fsdp",
            "mixed_precision": {{"param_dtype": "{param}", "reduce_dtype": "{reduce}"}}}}"#
    )
}

fn assert_trains_like(what: &str, run: &Run, reference: &Run, tolerance: f64) {
    let last = run.losses.len() - 1;
    assert!(run.losses[last] < 0.85 * run.losses[0], "{what} did not learn: {:?}", run.losses);
    for (i, (a, b)) in run.losses.iter().zip(&reference.losses).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs(), "{what}, step {i}: {a} and {b}");
    }
}

// checklist: composer: mixed-precision presets
// checklist: NeMo: mp_policy
#[test]
fn bf16_trains_like_f32_under_every_strategy() {
    let f32s = train(1, r#"{"type": "single_device"}"#, DType::F32);
    let single = train(1, r#"{"type": "single_device"}"#, DType::BF16);
    assert_trains_like("single_device", &single, &f32s, 0.03);
    assert_ne!(single.losses, f32s.losses);
    let ddp = train(3, r#"{"type": "ddp"}"#, DType::BF16);
    assert_trains_like("ddp", &ddp, &single, 0.02);
    // Gradients are reduced in f32 either way: the same bits.
    let fsdp = train(3, &policy("bf16", "f32"), DType::F32);
    assert_eq!(fsdp, ddp);
    let reduced = train(3, &policy("bf16", "bf16"), DType::F32);
    assert_trains_like("reduced in bf16", &reduced, &ddp, 0.03);
    assert_ne!(reduced.losses, ddp.losses);
}

/// Optimizers update f32 values: updates far below bf16's resolution add up.
#[test]
fn values_stay_in_f32() {
    let run = train(2, &policy("bf16", "bf16"), DType::F32);
    let weights = &run.weights["layers.0.mlp.up_proj.weight"];
    // Bits that bf16 does not have.
    assert!(weights.iter().any(|x| x.to_bits() & 0xffff != 0));
}

/// A unit with a layer and a parameter used by plain candle operations, and a head outside of
/// units.
struct Images {
    stem: Unit<(Conv2d, Tensor)>,
    head: Linear,
}

impl Images {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let stem = b.unit("stem", |b| {
            let conv = Conv2d::new(&b.pp("conv"), 1, 4, [3, 3], Conv2dConfig::default())?;
            Ok((conv, b.var_builder().get_with_hints(1, "scale", candle_nn::Init::Const(0.5))?))
        })?;
        Ok(Self { stem, head: Linear::with_bias(&b.pp("head"), 5, 3)? })
    }

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let x = self.stem.call(images, |(conv, scale), x| {
            let scaled = x.broadcast_mul(scale)?.flatten_from(2)?.mean(2)?;
            Ok(Tensor::cat(&[conv.forward(x)?.flatten_from(2)?.mean(2)?, scaled], 1)?)
        })?;
        self.head.forward(&x)
    }
}

/// Losses and weights of a training. The unit's images have the first dtype of `given`, the head's
/// the second. With `by_hand` both are cast to the compute dtype first.
fn train_on_images(
    ranks: usize,
    config: &str,
    (dtype, compute_dtype): (DType, DType),
    given: [DType; 2],
    by_hand: bool,
) -> Run {
    let mut runs = run_ranks(ranks, |world| {
        let (rank, size) = (world.rank(), world.size());
        let init = ModuleInit { dtype, compute_dtype, ..init(config)? };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 5)?;
        let (model, mut optimizer) =
            fabric.setup(Images::new, &Sgd { lr: 0.1, ..Sgd::default() })?;
        let mut losses = Vec::new();
        for step in 0..4 {
            let (images, labels) = images(step, rank, size)?;
            let give = |x: &Tensor, dtype: DType| -> Result<Tensor> {
                let x = x.to_dtype(dtype)?;
                Ok(if by_hand { x.to_dtype(compute_dtype)? } else { x })
            };
            let rows = give(&images.flatten_from(1)?.narrow(1, 0, 5)?, given[1])?;
            let logits = model.forward(&give(&images, given[0])?)?;
            let logits = (logits + model.head.forward(&rows)?)?;
            fabric.backward(&cross_entropy(&logits, &labels)?)?;
            losses.push(fabric.step_totals(&[])?.mean());
            optimizer.step()?;
        }
        let weights = gather_weights(fabric.module_tree()?, &**fabric.world())?;
        let averages = std::collections::BTreeMap::new();
        Ok(Run { losses, norms: vec![], weights, averages })
    })
    .unwrap_or_else(|error| panic!("{config}, {compute_dtype:?} of {given:?}: {error}"));
    runs.swap_remove(0)
}

/// Each `trainer.precision` with images and rows in f32 (as from data sets), in f64 (as from numpy)
/// and in the model's compute dtype.
#[test]
fn floats_of_any_dtype_are_cast_at_the_border() {
    use DType::{BF16, F16, F32, F64};
    let strategies = [
        (1, r#"{"type": "single_device"}"#),
        (2, r#"{"type": "ddp"}"#),
        (2, r#"{"type": "fsdp"}"#),
        (2, r#"{"type": "fsdp", "activation_checkpointing": "full"}"#),
    ];
    for precision in [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16), (F64, F64)] {
        for (ranks, config) in strategies {
            for given in [[F32, F64], [F64, F32]] {
                let run = train_on_images(ranks, config, precision, given, false);
                let by_hand = train_on_images(ranks, config, precision, given, true);
                assert_eq!(run, by_hand, "{config}, {precision:?} of {given:?}");
                assert!(run.losses.iter().all(|loss| loss.is_finite()), "{config}, {precision:?}");
            }
        }
    }
}

/// Like FSDP2's `cast_forward_inputs = False`: candle's layers get inputs that they cannot compute
/// with, and layers of `nn` cast.
#[test]
fn a_policy_leaves_unit_inputs_to_layers() {
    let seen = |config: &str| {
        let seen = run_ranks(2, |world| {
            let mut fabric = Fabric::new(world, strategy(config)?, ModuleInit::default(), 5)?;
            let unit = fabric.setup_module(|b| b.unit("unit", |b| Linear::new(b, 36, 2)))?;
            let x = Tensor::ones((1, 36), DType::F32, &candle_core::Device::Cpu)?;
            let dtypes = unit.call(&x, |linear, x| {
                let y = linear.forward(x)?;
                Ok((x.zeros_like()?.detach(), y))
            })?;
            Ok([dtypes.0.dtype(), dtypes.1.dtype()])
        });
        seen.unwrap()[0]
    };
    let policy = |casts: bool| {
        format!(
            r#"{{"type": "fsdp",
                "mixed_precision": {{"param_dtype": "bf16", "cast_forward_inputs": {casts}}}}}"#
        )
    };
    assert_eq!(seen(&policy(true)), [DType::BF16; 2]);
    assert_eq!(seen(&policy(false)), [DType::F32, DType::BF16]);
}
