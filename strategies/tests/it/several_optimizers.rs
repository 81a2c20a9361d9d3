//! Two models in one Fabric, each with its own optimizer: a generator and its critic.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::Result;
use fulgurite_core::collective::{Counter, ProcessGroup, Record};
use fulgurite_core::execution::read;
use fulgurite_core::fabric::{Fabric, FabricOptimizer};
use fulgurite_core::module::{CandleModule, Module, ModuleBuilder, ModuleInit, Unit};
use fulgurite_core::nn::{Conv2d, Conv2dConfig, Linear, Loss};
use fulgurite_core::optim::{AdamW, Sgd};
use fulgurite_core::parameter::Parameter;
use fulgurite_test_message::assert_says;
use fulgurite_test_support::training::{checkpointed, gather_weights, init, strategy};
use fulgurite_transports::run_ranks;

const STEPS: u64 = 6;
/// Samples of a micro-batch, over all ranks.
const SAMPLES: usize = 4;

/// Two layers. The first is a unit; the other is candle's, and its parameters belong to the root.
struct Net {
    hidden: Unit<Linear>,
    out: CandleModule<candle_nn::Linear>,
}

impl Net {
    fn new(b: &ModuleBuilder, [inputs, hidden, outputs]: [usize; 3]) -> Result<Self> {
        let first = b.unit("hidden", |b| Linear::new(b, inputs, hidden))?;
        let out = candle_nn::linear(hidden, outputs, b.pp("out").var_builder())?;
        Ok(Self { hidden: first, out: CandleModule(out) })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.out.forward(&self.hidden.forward(x)?.tanh()?)
    }
}

/// How gradients of the one are kept away from the other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Each optimizer has its turn, with its own forward.
    Turns,
    /// The generator's forward is before the critic's turn, its backward after it.
    ForwardFirst,
    /// The generator's loss gives the critic gradients, which the critic clears.
    ZeroGrad,
    /// Both take gradients of two micro-batches, in turns.
    Accumulating,
}

struct Training {
    fabric: Fabric,
    generator: Net,
    critic: Net,
    of_generator: FabricOptimizer,
    of_critic: FabricOptimizer,
    way: Way,
}

impl Training {
    fn new(world: Arc<dyn ProcessGroup>, config: &str, way: Way) -> Result<Self> {
        let mut fabric = Fabric::new(world, strategy(config)?, init(config)?, 11)?;
        let (generator, critic) = fabric.setup_module(|b| {
            Ok((Net::new(&b.pp("generator"), [3, 8, 5])?, Net::new(&b.pp("critic"), [5, 8, 1])?))
        })?;
        let adamw = AdamW { lr: 1e-2, ..AdamW::default() };
        let sgd = Sgd { lr: 1e-2, momentum: 0.9, ..Sgd::default() };
        let of_generator = fabric.setup_optimizer_for(&adamw, &["generator"])?;
        let of_critic = fabric.setup_optimizer_for(&sgd, &["critic"])?;
        Ok(Self { fabric, generator, critic, of_generator, of_critic, way })
    }

    /// This rank's part of a micro-batch's noise, or of its real samples.
    fn samples(&self, seed: u64, width: usize) -> Result<Tensor> {
        let value = |i: usize| ((i as f32 + 1.3) * (seed as f32 + 0.7)).sin();
        let all = (0..SAMPLES * width).map(value).collect::<Vec<_>>();
        let all = Tensor::from_vec(all, (SAMPLES, width), &Device::Cpu)?;
        let own = SAMPLES / self.fabric.world_size();
        Ok(all.narrow(0, self.fabric.global_rank() * own, own)?)
    }

    fn loss(&self, error: &Tensor) -> Result<Loss> {
        Ok(Loss::new(error.sqr()?.sum_all()?, error.dim(0)? as f64))
    }

    /// The critic learns 1 for real samples and 0 for generated ones.
    fn critic_backward(&self, seed: u64, fake: &Tensor) -> Result<()> {
        let real = self.critic.forward(&self.samples(seed + 50, 5)?)?;
        let error = Tensor::cat(&[(real - 1.0)?, self.critic.forward(&fake.detach())?], 0)?;
        self.fabric.backward(&self.loss(&error)?)
    }

    /// The generator learns to make the critic answer 1 for its samples.
    fn generator_backward(&self, fake: &Tensor) -> Result<()> {
        self.fabric.backward(&self.loss(&(self.critic.forward(fake)? - 1.0)?)?)
    }

    /// Takes a step; returns the losses and norms of both.
    fn step(&mut self, step: u64) -> Result<[f64; 4]> {
        let noise = self.samples(step, 3)?;
        let (critic, critic_norm) = match self.way {
            Way::Accumulating => {
                for micro in 0..2 {
                    let _no_sync = self.fabric.no_backward_sync(micro == 0);
                    let noise = self.samples(step + 100 * micro, 3)?;
                    {
                        let _turn = self.fabric.toggle_optimizer(&self.of_critic)?;
                        self.critic_backward(step, &self.generator.forward(&noise)?)?;
                    }
                    let _turn = self.fabric.toggle_optimizer(&self.of_generator)?;
                    self.generator_backward(&self.generator.forward(&noise)?)?;
                }
                finish(&self.fabric, &mut self.of_critic)?
            }
            way => {
                let first = (way == Way::ForwardFirst).then(|| self.generator.forward(&noise));
                let first = first.transpose()?;
                let turn = |optimizer| {
                    (way != Way::ZeroGrad)
                        .then(|| self.fabric.toggle_optimizer(optimizer))
                        .transpose()
                };
                let critics_turn = turn(&self.of_critic)?;
                let fake = first.clone().map_or_else(|| self.generator.forward(&noise), Ok)?;
                self.critic_backward(step, &fake)?;
                drop(critics_turn);
                let critics = finish(&self.fabric, &mut self.of_critic)?;
                let turn = (way != Way::ZeroGrad)
                    .then(|| self.fabric.toggle_optimizer(&self.of_generator))
                    .transpose()?;
                if way == Way::ZeroGrad {
                    self.of_generator.zero_grad()?;
                }
                let fake = first.map_or_else(|| self.generator.forward(&noise), Ok)?;
                self.generator_backward(&fake)?;
                drop(turn);
                critics
            }
        };
        let (generator, generator_norm) = finish(&self.fabric, &mut self.of_generator)?;
        if self.way == Way::ZeroGrad {
            self.of_critic.zero_grad()?;
        }
        Ok([critic, critic_norm, generator, generator_norm])
    }
}

fn finish(fabric: &Fabric, optimizer: &mut FabricOptimizer) -> Result<(f64, f64)> {
    let loss = optimizer.step_totals(&[])?.mean();
    let norm = fabric.clip_gradients_norm(optimizer, 0.5)?;
    optimizer.step()?;
    Ok((loss, norm))
}

type Run = (Vec<[f64; 4]>, BTreeMap<String, Vec<f32>>);

fn train(ranks: usize, config: &str, way: Way) -> Run {
    let runs = run_ranks(ranks, |world| {
        let mut training = Training::new(world, config, way)?;
        let steps = (0..STEPS).map(|step| training.step(step)).collect::<Result<Vec<_>>>()?;
        let fabric = &training.fabric;
        Ok((steps, gather_weights(fabric.module_tree()?, &**fabric.world())?))
    });
    let mut runs = runs.unwrap_or_else(|error| panic!("{config}, {way:?}: {error}"));
    assert!(runs.iter().all(|run| *run == runs[0]), "{config}, {way:?}: ranks differ");
    runs.swap_remove(0)
}

fn assert_close((steps, weights): &Run, (other_steps, other_weights): &Run, what: &str) {
    let close =
        |a: f64, b: f64| assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{what}: {a} {b}");
    for (step, other) in steps.iter().zip(other_steps) {
        step.iter().zip(other).for_each(|(&a, &b)| close(a, b));
    }
    for (fqn, values) in weights {
        let values = values.iter().zip(&other_weights[fqn]);
        values.for_each(|(&a, &b)| close(a.into(), b.into()));
    }
}

const DDP: &str = r#"{"type": "ddp"}"#;
const FSDP: &str = r#"{"type": "fsdp"}"#;
const HSDP: &str = r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#;

#[test]
fn two_optimizers_match_one_device() {
    let one = train(1, r#"{"type": "single_device"}"#, Way::Turns);
    let accumulated = train(1, r#"{"type": "single_device"}"#, Way::Accumulating);
    for (ranks, config) in [(1, FSDP), (2, DDP), (2, FSDP), (4, HSDP)] {
        let turns = train(ranks, config, Way::Turns);
        assert_close(&turns, &one, config);
        for way in [Way::ForwardFirst, Way::ZeroGrad] {
            assert_eq!(train(ranks, config, way), turns, "{config}, {way:?}");
        }
        let config = &*checkpointed(config, "full");
        assert_eq!(train(ranks, config, Way::Turns), turns, "{config}");
        assert_close(&train(ranks, config, Way::ForwardFirst), &one, config);
        assert_close(&train(ranks, config, Way::Accumulating), &accumulated, config);
    }
    assert_eq!(train(2, DDP, Way::Turns), train(2, FSDP, Way::Turns));
    assert_eq!(train(2, DDP, Way::Accumulating), train(2, FSDP, Way::Accumulating));
}

#[test]
fn waiting_gradients_of_optimizers_stay_separate() {
    let config = HSDP.replace('}', r#", "accumulation_sync": "reduce_scatter"}"#);
    let errors = run_ranks(4, |world| {
        let mut training = Training::new(world, &config, Way::Accumulating)?;
        Ok(training.step(0).unwrap_err().to_string())
    });
    let errors = errors.unwrap();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert_says!(errors[0], r#"… `critic.hidden` … wait … other … `accumulation_sync = "all"`"#);
}

#[test]
fn a_turn_reduces_only_its_optimizers_gradients() {
    for (config, operation) in [(DDP, "all_reduce"), (FSDP, "reduce_scatter")] {
        let tallies = run_ranks(2, |world| {
            let counter = Counter::default();
            let world = counter.watch(world);
            let mut training = Training::new(world, config, Way::Turns)?;
            training.step(0)?;
            training.step(1)?;
            let mut bytes = |own: &str, other: &str| -> Result<_> {
                counter.reset();
                let paused = training.fabric.module_tree()?.trainable();
                let of_other = |p: &&Parameter| p.fqn().starts_with(other);
                let paused =
                    fulgurite_core::parameter::PausedGradients::of(paused.filter(of_other));
                let fake = training.generator.forward(&training.samples(2, 3)?)?;
                training.generator_backward(&fake)?;
                drop(paused);
                let tally: Record = counter
                    .snapshot()
                    .into_iter()
                    .filter(|((_, called), _)| *called == operation)
                    .fold(Record::default(), |sum, (_, record)| Record {
                        calls: sum.calls + record.calls,
                        bytes: sum.bytes + record.bytes,
                    });
                let tree = training.fabric.module_tree()?;
                let own = tree.trainable().filter(|p| p.fqn().starts_with(own));
                let expected =
                    own.map(|p| (p.elem_count() * DType::F32.size_in_bytes()) as u64).sum();
                let optimizers = [&mut training.of_generator, &mut training.of_critic];
                optimizers.into_iter().try_for_each(FabricOptimizer::zero_grad)?;
                Ok((tally.bytes, expected))
            };
            Ok([bytes("generator", "critic")?, bytes("critic", "generator")?])
        });
        for [(generator, expected), (critic, expected_of_critic)] in tallies.unwrap() {
            assert_eq!(
                (generator, critic),
                (expected, expected_of_critic),
                "{config}: {operation}"
            );
        }
    }
}

#[test]
fn several_optimizers_mistakes_are_explained() {
    let error = |result: Result<()>| result.unwrap_err().to_string();
    run_ranks(1, |world| {
        let training = Training::new(world, DDP, Way::Turns)?;
        let (fabric, adamw) = (&training.fabric, AdamW::default());
        let again = fabric.setup_optimizer_for(&adamw, &["generator"]).map(drop);
        assert_says!(error(again), "parameter `generator.hidden.weight` … optimizer already …");
        let nothing = fabric.setup_optimizer_for(&adamw, &["discriminator"]).map(drop);
        assert_says!(error(nothing), r#"the optimizer for "discriminator": no … pattern matches"#);
        assert_says!(
            error(fabric.setup_optimizer(&adamw).map(drop)),
            "there is no parameter left that has no optimizer yet"
        );
        assert_says!(error(fabric.step_totals(&[]).map(drop)), "… several … `FabricOptimizer` …");
        let _turn = fabric.toggle_optimizer(&training.of_critic)?;
        // candle's layer would be in the graph, and its gradient dropped.
        let of_generator =
            training.loss(&training.generator.hidden.forward(&training.samples(0, 3)?)?)?;
        assert_says!(
            error(fabric.backward(&of_generator)),
            "the loss does not depend on any … another optimizer … cut the graph"
        );
        Ok(())
    })
    .unwrap();
    run_ranks(1, |world| {
        let mut fabric = Fabric::new(world, strategy(DDP)?, init(DDP)?, 11)?;
        let (a, b) = fabric.setup_module(|b| {
            Ok((Linear::new(&b.pp("a"), 1, 1)?, Linear::new(&b.pp("b"), 1, 1)?))
        })?;
        let mut of_a = fabric.setup_optimizer_for(&AdamW::default(), &["a"])?;
        let x = Tensor::ones((1, 1), DType::F32, &Device::Cpu)?;
        fabric.backward(&Loss::new(b.forward(&a.forward(&x)?)?.sum_all()?, 1.0))?;
        assert_says!(error(of_a.step()), "parameter `b.weight`: no optimizer updates it …");
        Ok(())
    })
    .unwrap();
}

/// The search of the graph reads values, so it runs only in each optimizer's first step.
#[test]
fn graphs_are_searched_only_in_first_steps() {
    let counts = run_ranks(1, |world| {
        let mut fabric = Fabric::new(
            world,
            strategy(r#"{"type": "single_device"}"#)?,
            ModuleInit::default(),
            1,
        )?;
        let models = fabric.setup_module(|b| {
            let conv = |name: &str| Conv2d::new(&b.pp(name), 1, 2, [3, 3], Conv2dConfig::default());
            Ok([conv("a")?, conv("b")?])
        })?;
        let mut optimizers = [
            fabric.setup_optimizer_for(&Sgd::default(), &["a"])?,
            fabric.setup_optimizer_for(&Sgd::default(), &["b"])?,
        ];
        let x = (0..36).map(|i| (i % 7) as f32).collect();
        let x = Tensor::from_vec(x, (1, 1, 6, 6), &Device::Cpu)?;
        let mut counts = Vec::new();
        for _ in 0..3 {
            for (model, optimizer) in models.iter().zip(&mut optimizers) {
                let turn = fabric.toggle_optimizer(optimizer)?;
                let y = model.forward(&x)?.avg_pool2d(2)?;
                fabric.backward(&Loss::new(y.sqr()?.sum_all()?, 1.0))?;
                drop(turn);
                optimizer.step()?;
                counts.push(read::counts().get("check of candle's operations").copied());
            }
        }
        Ok(counts)
    });
    let counts = counts.unwrap().swap_remove(0);
    assert!(counts[0].is_some() && counts[1] > counts[0], "{counts:?}");
    assert!(counts[2..].iter().all(|count| *count == counts[1]), "{counts:?}");
}
