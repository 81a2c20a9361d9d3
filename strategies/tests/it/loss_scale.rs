//! Training in f16 with a loss scale.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::ProcessGroup;
use fulgurite_core::fabric::Fabric;
use fulgurite_core::module::{Module as _, ModuleInit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::{AdamW, LossScale};
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{DecoderTraining, Run, Training, Variant, strategy};
use fulgurite_transports::run_ranks;

const SINGLE: &str = r#"{"type": "single_device"}"#;
const DDP: &str = r#"{"type": "ddp"}"#;
const FSDP: &str = r#"{"type": "fsdp"}"#;
/// The strategy sets the dtype.
const POLICY: &str =
    r#"{"type": "fsdp", "mixed_precision": {"param_dtype": "f16", "reduce_dtype": "f32"}}"#;

fn train(ranks: usize, config: &str, dtype: DType) -> Run {
    run_ranks(ranks, |world| Training::new(world, config, dtype, 2)?.run())
        .unwrap_or_else(|error| panic!("{config}: {error}"))
        .swap_remove(0)
}

#[test]
fn f16_trains_like_f32_under_every_strategy() {
    let close = |what: &str, run: &Run, reference: &Run| {
        for (i, (a, b)) in run.losses.iter().zip(&reference.losses).enumerate() {
            assert!((a - b).abs() <= 0.01 * b.abs(), "{what}, step {i}: {a} and {b}");
        }
    };
    let f32s = train(1, SINGLE, DType::F32);
    let single = train(1, SINGLE, DType::F16);
    close("single_device", &single, &f32s);
    assert_ne!(single.losses, f32s.losses);
    let ddp = train(3, DDP, DType::F16);
    close("ddp", &ddp, &f32s);
    // Gradients are reduced in f32 either way: the same bits.
    assert_eq!(train(3, FSDP, DType::F16), ddp);
    assert_eq!(train(3, POLICY, DType::F32), ddp);
}

fn decoder(world: std::sync::Arc<dyn ProcessGroup>, config: &str) -> Result<DecoderTraining> {
    let init = ModuleInit { compute_dtype: DType::F16, ..ModuleInit::default() };
    DecoderTraining::with_init(world, config, Variant::default(), 1, init)
}

#[test]
fn tensor_parallel_ranks_have_the_losses_of_one() {
    let run = |ranks, config: &str| {
        run_ranks(ranks, |world| decoder(world, config)?.run()).unwrap().swap_remove(0).losses
    };
    let single = run(1, SINGLE);
    let mesh = r#"{"type": "model_parallel", "data_parallel_size": 1, "tensor_parallel_size": 2}"#;
    for (a, b) in run(2, mesh).iter().zip(&single) {
        assert!((a - b).abs() <= 0.01 * b.abs(), "{a} and {b}");
    }
}

/// A model without units.
const ROOT_ONLY: &str = r#"{"type": "fsdp", "allow_root_only": true}"#;

/// An f16 layer that multiplies ones by its weight; the loss is its output times a number.
struct Line {
    fabric: Fabric,
    layer: Linear,
    optimizer: fulgurite_core::fabric::FabricOptimizer,
}

impl Line {
    fn new(world: std::sync::Arc<dyn ProcessGroup>, config: &str) -> Result<Self> {
        let init = ModuleInit { compute_dtype: DType::F16, ..ModuleInit::default() };
        let mut fabric = Fabric::new(world, strategy(config)?, init, 1)?;
        let (layer, optimizer) =
            fabric.setup(|b| Linear::new(&b.pp("line"), 4, 2), &AdamW::default())?;
        Ok(Self { fabric, layer, optimizer })
    }

    fn backward(&self, times: f64) -> Result<()> {
        let x = Tensor::ones((3, 4), DType::F16, &Device::Cpu)?;
        let y = self.layer.forward(&x)?.to_dtype(DType::F32)?;
        self.fabric.backward(&Loss::new((y.sum_all()? * times)?, 3.0))
    }

    fn factor(&self) -> f64 {
        self.fabric.loss_scale().unwrap().unwrap().factor()
    }

    fn weights(&self) -> Vec<f32> {
        let weight = &self.fabric.module_tree().unwrap().parameters()[0];
        let whole = self.fabric.full_state().full_tensor(weight.fqn()).unwrap();
        whole.flatten_all().unwrap().to_vec1().unwrap()
    }
}

#[test]
fn gradients_too_small_for_f16_are_scaled_up() {
    let norm = |init_scale: f64| {
        run_ranks(2, |world| {
            let mut line = Line::new(world, ROOT_ONLY)?;
            line.fabric.set_loss_scale(LossScale::default().with_init_scale(init_scale))?;
            line.backward(1e-8)?;
            line.fabric.clip_gradients_norm(&mut line.optimizer, 1.0)
        })
        .unwrap()[0]
    };
    // 1e-8 for each of 3 rows and 2 ranks, over 6 samples, in 8 elements.
    let expected = 1e-8 * 8f64.sqrt();
    assert!((norm(65536.0) / expected - 1.0).abs() < 1e-3, "{}", norm(65536.0));
    assert_eq!(norm(1.0), 0.0);
}

#[test]
fn an_overflow_on_one_rank_skips_the_step() {
    for config in [DDP, ROOT_ONLY] {
        let outcomes = run_ranks(2, |world| {
            let large = if world.rank() == 1 { 1e4 } else { 1.0 };
            let mut line = Line::new(world, config)?;
            let mut seen = Vec::new();
            for step in 0..4 {
                let before = line.weights();
                line.backward(large)?;
                // With and without a request for the norm.
                if step % 2 == 0 {
                    line.fabric.clip_gradients_norm(&mut line.optimizer, 1.0)?;
                }
                line.optimizer.step()?;
                seen.push((line.weights() == before, line.factor()));
            }
            assert_eq!(line.optimizer.steps(), 4);
            Ok((seen, line.weights()))
        })
        .unwrap();
        // First 65536 / 4: f16 can hold 1e4 times the scale once the scale is 4.
        let (seen, _) = &outcomes[0];
        assert!(seen.iter().all(|(skipped, _)| *skipped), "{config}: {seen:?}");
        assert_eq!(seen[3].1, 1024.0);
        assert_eq!(outcomes[0], outcomes[1]);
    }
    // The scale is found, and training continues.
    run_ranks(2, |world| {
        let mut line = Line::new(world, ROOT_ONLY)?;
        let before = line.weights();
        for _ in 0..15 {
            line.backward(1e4)?;
            line.optimizer.step()?;
        }
        assert_eq!(line.factor(), 4.0);
        assert_eq!(line.fabric.loss_scale()?.unwrap().skipped(), 12);
        assert_ne!(line.weights(), before);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_scale_is_saved_and_resumed_bitwise() {
    let resumed = |ranks: usize, config: &str, path: &Path| {
        run_ranks(ranks, |world| {
            let growing = LossScale::default().with_growth_interval(2);
            let mut whole = decoder(world.clone(), config)?;
            whole.fabric.set_loss_scale(growing)?;
            let mut first = Vec::new();
            for step in 0..8 {
                if step == 5 {
                    whole.save(path)?;
                }
                first.push(whole.step()?);
            }
            let mut second = decoder(world, config)?;
            second.fabric.set_loss_scale(growing)?;
            second.load(path)?;
            let rest = (5..8).map(|_| second.step()).collect::<Result<Vec<_>>>()?;
            assert_eq!(rest, first[5..]);
            assert_eq!(second.weights()?, whole.weights()?);
            assert_eq!(second.fabric.loss_scale()?, whole.fabric.loss_scale()?);
            Ok(second.fabric.loss_scale()?.unwrap())
        })
        .unwrap()
        .swap_remove(0)
    };
    let dir = tempfile::tempdir().unwrap();
    let scale = resumed(2, FSDP, &dir.path().join("fsdp"));
    assert!(scale.factor() != 65536.0 && scale.has_begun(), "{scale:?}");
    resumed(1, SINGLE, &dir.path().join("single"));
}

#[test]
fn several_optimizers_are_refused() {
    let error = run_ranks(1, |world| {
        let init = ModuleInit { compute_dtype: DType::F16, ..ModuleInit::default() };
        let mut fabric = Fabric::new(world, strategy(SINGLE)?, init, 1)?;
        let (_layer, _first) =
            fabric.setup(|b| Linear::new(&b.pp("line"), 4, 2), &AdamW::default())?;
        fabric.setup_optimizer_for(&AdamW::default(), &["line.bias"]).map(drop)
    })
    .unwrap_err();
    assert_says!(error, r#"the optimizer for "line.bias": no trainable parameter … matches"#);
}
