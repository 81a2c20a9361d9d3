//! Counts of a step: impossible counts, steps without counted items, and parameters that a step
//! leaves out.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::fabric::{Fabric, FabricOptimizer, UnusedParameters};
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::optim::{AdamW, OptimizerConfig, Sgd};
use fulgurite_test_support::training::{gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const FSDP: &str = r#"{"type": "fsdp"}"#;
const DDP: &str = r#"{"type": "ddp"}"#;
const CONFIGS: [(usize, &str); 5] = [
    (1, r#"{"type": "single_device"}"#),
    (3, DDP),
    (3, FSDP),
    (2, r#"{"type": "fsdp", "reshard_after_forward": false, "prefetch": 0}"#),
    (4, r#"{"type": "hsdp", "data_parallel_shard_size": 2}"#),
];

/// Two layers side by side that learn from a sum: the gradient of every weight is the number of
/// samples.
struct Pair {
    layers: [Unit<Linear>; 2],
}

impl Pair {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let layer = |name: &str| b.unit(name, |b| Linear::new(b, 3, 3));
        Ok(Self { layers: [layer("first")?, layer("second")?] })
    }

    /// The loss of the layers that are `used`.
    fn loss(&self, used: [bool; 2]) -> Result<Loss> {
        let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
        let mut sum = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for (layer, used) in self.layers.iter().zip(used) {
            if used {
                sum = (sum + layer.forward(&x)?.sum_all()?)?;
            }
        }
        Ok(Loss::new(sum, 1.0))
    }
}

/// The same in one unit; a rank may leave out a layer.
struct Both(Unit<[Linear; 2]>);

impl Both {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        let layers = |b: &ModuleBuilder| {
            Ok([Linear::new(&b.pp("first"), 3, 3)?, Linear::new(&b.pp("second"), 3, 3)?])
        };
        Ok(Self(b.unit("both", layers)?))
    }

    fn loss(&self, uses_second: bool) -> Result<Loss> {
        let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
        let y = self.0.call(&x, move |[first, second], x| match uses_second {
            true => Ok((first.forward(x)? + second.forward(x)?)?),
            false => first.forward(x),
        })?;
        Ok(Loss::new(y.sum_all()?, 1.0))
    }
}

type Weights = BTreeMap<String, Vec<f32>>;

/// Trains a [`Pair`], and returns rank 0's weights before the first step and after each step.
fn train(
    ranks: usize,
    config: &str,
    optimizer: &(dyn OptimizerConfig + Sync),
    steps: usize,
    step: impl Fn(&Fabric, &Pair, &mut FabricOptimizer, usize) -> Result<()> + Sync,
) -> Result<Vec<Weights>> {
    train_model(ranks, config, Pair::new, optimizer, steps, step)
}

fn train_model<M>(
    ranks: usize,
    config: &str,
    new: impl Fn(&ModuleBuilder) -> Result<M> + Sync,
    optimizer: &(dyn OptimizerConfig + Sync),
    steps: usize,
    step: impl Fn(&Fabric, &M, &mut FabricOptimizer, usize) -> Result<()> + Sync,
) -> Result<Vec<Weights>> {
    let all = run_ranks(ranks, |world| {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 5)?;
        let (model, mut optimizer) = fabric.setup(&new, optimizer)?;
        let weights = |fabric: &Fabric| gather_weights(fabric.module_tree()?, &**fabric.world());
        let mut seen = vec![weights(&fabric)?];
        for i in 1..=steps {
            step(&fabric, &model, &mut optimizer, i)?;
            seen.push(weights(&fabric)?);
        }
        Ok(seen)
    })?;
    for rank in &all[1..] {
        assert_eq!(*rank, all[0], "{config}: the ranks have other weights");
    }
    Ok(all.into_iter().next().unwrap_or_default())
}

fn moves(weights: &[Weights], fqn: &str) -> Vec<bool> {
    weights.windows(2).map(|pair| pair[0][fqn] != pair[1][fqn]).collect()
}

#[test]
fn impossible_counts_fail_on_all_ranks() {
    for (ranks, config) in CONFIGS {
        for count in [f64::NAN, f64::INFINITY, -1.0] {
            for late in [false, true] {
                let culprit = ranks - 1;
                train(ranks, config, &Sgd::default(), 1, |fabric, pair, optimizer, _| {
                    let before = gather_weights(fabric.module_tree()?, &**fabric.world())?;
                    let loss = pair.loss([true, true])?;
                    let wrong = fabric.global_rank() == culprit;
                    let count_here = if wrong { count } else { 1.0 };
                    fabric.backward(&Loss::new(loss.sum().clone(), count_here))?;
                    let error = match late {
                        true => optimizer.clip_and_step(Some((1.0, Default::default()))).map(drop),
                        false => optimizer.step(),
                    };
                    assert_eq!(
                        error.unwrap_err().to_string(),
                        format!(
                            "the count of the loss on rank {culprit} is {count}: a `Loss` is a sum and the number of \
                             its items, which is finite and not negative; look at how `Loss::new` gets its count (in \
                             step 1)"
                        ),
                        "{config}, late: {late}"
                    );
                    let after = gather_weights(fabric.module_tree()?, &**fabric.world())?;
                    assert_eq!(after, before, "{config}");
                    Ok(())
                })
                .unwrap_or_else(|error| panic!("{config}: {error}"));
            }
        }
    }
}

/// The counts of two micro-batches add up to a possible one.
#[test]
fn negative_micro_batch_counts_are_found() {
    let error = train(2, DDP, &Sgd::default(), 1, |fabric, pair, optimizer, _| {
        for count in [-1.0, 3.0] {
            let loss = pair.loss([true, true])?;
            fabric.backward(&Loss::new(loss.sum().clone(), count))?;
        }
        optimizer.step()
    });
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("the count of the loss on rank 0 is -1: "), "{error}");
}

/// As in PyTorch: unused parameters get no moments and no decay, and the correction of moments uses
/// each parameter's own step count. All gradients of a weight are equal, so every step of Adam has
/// the size of the learning rate.
#[test]
fn unused_parameters_stay_in_later_steps() {
    let (lr, decay) = (0.1, 0.5);
    let adamw = AdamW { lr, weight_decay: decay, ..AdamW::default() };
    let used = |step| [true, step == 1 || step == 4];
    for (ranks, config) in CONFIGS {
        for late in [false, true] {
            let weights = train(ranks, config, &adamw, 4, |fabric, pair, optimizer, step| {
                fabric.backward(&pair.loss(used(step))?)?;
                match late {
                    true => {
                        optimizer.clip_and_step(None).and_then(|n| optimizer.read(n)).map(drop)?
                    }
                    false => optimizer.step()?,
                }
                let missed = optimizer.scalars().get("missed.second.weight").copied();
                let expected = [None, Some(1.0), Some(2.0), Some(2.0)];
                assert_eq!(missed, expected[step - 1], "{config}");
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{config}: {error}"));
            assert_eq!(moves(&weights, "first.weight"), [true; 4], "{config}");
            assert_eq!(moves(&weights, "second.weight"), [true, false, false, true], "{config}");
            for step in [1, 4] {
                let [before, after] = [step - 1, step].map(|i| &weights[i]["second.weight"]);
                for (before, after) in before.iter().zip(after) {
                    let expected = f64::from(*before) * (1.0 - lr * decay) - lr;
                    assert!(
                        (f64::from(*after) - expected).abs() < 1e-6,
                        "{config}: {after} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn parameters_one_rank_uses_are_updated() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.5, ..Sgd::default() };
    for (ranks, config) in CONFIGS.into_iter().filter(|(ranks, _)| *ranks > 1) {
        let weights =
            train_model(ranks, config, Both::new, &sgd, 3, |fabric, both, optimizer, step| {
                fabric.backward(&both.loss(step == 1 || fabric.global_rank() == 1)?)?;
                optimizer.step()
            })
            .unwrap_or_else(|error| panic!("{config}: {error}"));
        let second = "both.second.weight";
        let (mut p, mut m) = (f64::from(weights[0][second][0]), 0.0);
        for (step, weights) in weights.iter().enumerate().skip(1) {
            // The mean over the ranks' samples.
            let gradient = if step == 1 { 1.0 } else { 1.0 / ranks as f64 };
            let gradient = gradient + 0.5 * p;
            m = if step == 1 { gradient } else { 0.9 * m + gradient };
            p -= 0.1 * m;
            let found = f64::from(weights[second][0]);
            assert!((found - p).abs() < 1e-5, "{config}: {found} and {p} in step {step}");
        }
    }
}

#[test]
fn zero_policy_moves_unused_parameters() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.5, ..Sgd::default() };
    let weights = run_ranks(2, |world| {
        let mut fabric = Fabric::new(world, strategy(FSDP)?, init(FSDP)?, 5)?;
        let (pair, optimizer) = fabric.setup(Pair::new, &sgd)?;
        let mut optimizer = optimizer.with_unused_parameters(UnusedParameters::Zero);
        let mut seen = Vec::new();
        for step in 1..=3 {
            fabric.backward(&pair.loss([true, step == 1])?)?;
            optimizer.step()?;
            seen.push(gather_weights(fabric.module_tree()?, &**fabric.world())?);
        }
        Ok(seen)
    });
    assert_eq!(moves(&weights.unwrap()[0], "second.weight"), [true; 2]);
}

#[test]
fn steps_without_items_are_skipped() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.5, ..Sgd::default() };
    for (ranks, config) in CONFIGS {
        for late in [false, true] {
            let weights = train(ranks, config, &sgd, 3, |fabric, pair, optimizer, step| {
                let loss = pair.loss([true, true])?;
                fabric.backward(&if step == 2 { loss.ignored()? } else { loss })?;
                let numbers = match late {
                    true => optimizer.clip_and_step(Some((1.0, Default::default())))?,
                    false => {
                        optimizer.step()?;
                        return Ok(());
                    }
                };
                assert_eq!(optimizer.read(numbers)?.loss.is_nan(), step == 2);
                assert_eq!(optimizer.steps(), step as u64);
                assert_eq!(optimizer.skipped_steps(), u64::from(step >= 2), "{config}");
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{config}: {error}"));
            assert_eq!(moves(&weights, "first.weight"), [true, false, true], "{config}");
        }
    }
}

#[test]
fn one_ignored_rank_skips_nothing() {
    for (ranks, config) in CONFIGS.into_iter().filter(|(ranks, _)| *ranks > 1) {
        let weights = train(ranks, config, &Sgd::default(), 2, |fabric, pair, optimizer, step| {
            let loss = pair.loss([true, true])?;
            let ignores = step == 2 && fabric.global_rank() == 0;
            fabric.backward(&if ignores { loss.ignored()? } else { loss })?;
            optimizer.step()?;
            assert_eq!(optimizer.skipped_steps(), 0);
            Ok(())
        })
        .unwrap();
        assert_eq!(moves(&weights, "first.weight"), [true, true], "{config}");
    }
}

/// candle's backward ends at the factor: this rank would skip its collectives.
#[test]
fn constant_zero_factors_are_named() {
    let zero = |whole: bool| {
        let error = train(2, FSDP, &Sgd::default(), 1, |fabric, pair, optimizer, _| {
            let mut loss = pair.loss([true, true])?;
            if fabric.global_rank() == 1 {
                let [first, second] = [[true, false], [false, true]].map(|used| pair.loss(used));
                let kept = if whole { (first?.sum() * 0.0)? } else { first?.sum().clone() };
                loss = Loss::new((kept + (second?.sum() * 0.0)?)?, 1.0);
            }
            fabric.backward(&loss)?;
            optimizer.step()
        });
        error.unwrap_err().to_string()
    };
    let way_out = "candle ends a backward at a constant factor of 0, `(loss * 0.0)?`: multiply by a zero tensor, as \
                   `Loss::ignored` does";
    for whole in [true, false] {
        let error = zero(whole);
        assert!(error.contains(way_out), "{whole}: {error}");
    }
}

/// Replicas do not wait for other ranks during backward.
#[test]
fn ddp_takes_constant_zero_as_ignored() {
    let with = |constant: bool| {
        train(2, DDP, &Sgd::default(), 2, |fabric, pair, optimizer, step| {
            let mut loss = pair.loss([true, true])?;
            if step == 2 && fabric.global_rank() == 1 {
                loss = match constant {
                    true => Loss::new((loss.sum() * 0.0)?, 0.0),
                    false => loss.ignored()?,
                };
            }
            fabric.backward(&loss)?;
            optimizer.step()
        })
        .unwrap()
    };
    assert_eq!(with(true), with(false));
}
