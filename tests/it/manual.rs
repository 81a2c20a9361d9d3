//! Modules with manual optimization and several optimizers.

use std::path::Path;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Event, OptimizerSetup, Optimizers};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::toy::{Events, NoKeys, Numbers};

/// A generator that learns to double, judged by a critic that learns its error.
struct Pair {
    generator: Unit<Linear>,
    critic: Linear,
    config: PairConfig,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PairConfig {
    /// Updates of the critic in a step, minus one.
    more_critic_steps: usize,
    /// The mistake in the module.
    mistake: String,
    /// Whether gradients are accumulated over two steps.
    accumulates: bool,
}

impl Pair {
    fn critic_loss(&self, x: &Tensor) -> Result<Loss> {
        let y = self.generator.forward(x)?;
        let judged = self.critic.forward(&Tensor::cat(&[x, &y], 1)?)?;
        let error = (judged - (y - (x * 2.0)?)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }

    fn generator_loss(&self, x: &Tensor) -> Result<Loss> {
        let y = self.generator.forward(x)?;
        let judged = self.critic.forward(&Tensor::cat(&[x, &y], 1)?)?;
        let error = (judged.sqr()? + (y - (x * 2.0)?)?.sqr()?)?;
        Ok(Loss::new(error.sum_all()?, x.dim(0)? as f64))
    }
}

impl LightningModule for Pair {
    type Config = PairConfig;
    type Data = Numbers;

    fn configure_model(config: &PairConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            generator: b.unit("generator", |b| Linear::with_bias(b, 1, 1))?,
            critic: Linear::with_bias(&b.pp("critic"), 2, 1)?,
            config: config.clone(),
        })
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        let another = configured.another()?;
        let critic: &[&str] = match &*self.config.mistake {
            "no optimizer" => &["critic.weight"],
            "two optimizers" => &["critic", "bias"],
            "no parameter" => &["discriminator"],
            "no pattern" => &[],
            _ => &["critic"],
        };
        Ok(match &*self.config.mistake {
            "one" => configured.into(),
            _ => Optimizers::several()
                .with("generator", &["generator"], configured)
                .with("critic", critic, another),
        })
    }

    fn automatic_optimization(&self) -> bool {
        self.config.mistake == "automatic" || self.config.mistake == "one"
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        let name = if self.config.mistake == "unknown name" { "judge" } else { "critic" };
        let last = if self.config.accumulates {
            let accumulating = ctx.step % 2 == 1;
            let no_sync = ctx.no_backward_sync(accumulating)?;
            let turn = ctx.toggle_optimizer(name)?;
            ctx.manual_backward(&self.critic_loss(x)?)?;
            drop(turn);
            let turn = ctx.toggle_optimizer("generator")?;
            ctx.manual_backward(&self.generator_loss(x)?)?;
            drop((turn, no_sync));
            if !accumulating {
                ctx.optimizer_step(name)?;
                ctx.optimizer_step("generator")?;
            }
            self.generator_loss(x)?
        } else {
            for _ in 0..=self.config.more_critic_steps {
                ctx.optimize(name, |_| self.critic_loss(x))?;
            }
            let step = ctx.optimize("generator", |_| self.generator_loss(x))?;
            ctx.log("generator_loss", step.loss);
            self.generator_loss(x)?
        };
        Ok(last)
    }

    fn validation_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.generator_loss(x)
    }
}

impl Hooks<Numbers> for Pair {}

fn config(dir: &Path, ranks: usize, keys: &str) -> Result<RunConfig<PairConfig, NoKeys>> {
    let root = dir.join("runs");
    let text = format!(
        "seed = 3\noptimizer = {{ type = 'adamw', lr = 0.05 }}\n\
         scheduler = {{ type = 'linear', warmup_steps = 4 }}\n\
         trainer.devices = {ranks}\ntrainer.default_root_dir = {root:?}\n\
         trainer.loggers = []\ntrainer.enable_progress_bar = false\n\
         trainer.max_steps = 40\ntrainer.log_every_n_steps = 1\n{keys}\n"
    );
    let layers = ConfigLayers::new().text("run.toml", &text)?;
    RunConfig::from_layers(layers)
}

/// The losses of all steps, and the logged values of the last one.
fn train(ranks: usize, strategy: &str, keys: &str) -> (Vec<f64>, Vec<(String, f64)>) {
    let dir = tempfile::tempdir().unwrap();
    let runs = run_ranks(ranks, |world| {
        let mut run = config(dir.path(), ranks, keys)?;
        run.trainer.strategy = strategy.into();
        let events = Events::default();
        let trainer = Trainer::new(world).with_sink(Box::new(events.clone()));
        let trained = trainer.fit::<Pair>(&run)?;
        assert_eq!(trained.outcome().steps, 40);
        let events = events.0.lock().unwrap();
        let steps = events.iter().filter_map(|event| match event {
            Event::Step { train_loss, metrics, .. } => Some((*train_loss, metrics.clone())),
            _ => None,
        });
        let (losses, mut metrics): (Vec<f64>, Vec<_>) = steps.unzip();
        Ok((losses, metrics.pop().unwrap_or_default().into_iter().collect::<Vec<_>>()))
    });
    runs.unwrap_or_else(|error| panic!("{strategy}, {keys}: {error}")).swap_remove(0)
}

#[test]
fn several_optimizers_under_every_strategy() {
    for keys in ["", "model.more_critic_steps = 2", "model.accumulates = true"] {
        let (losses, logged) = train(1, "single_device", keys);
        assert!(losses[39] < 0.5 * losses[0], "{keys}: {losses:?}");
        let names: Vec<&str> = logged.iter().map(|(name, _)| name.as_str()).collect();
        let steps = ["grad_norm/critic", "grad_norm/generator", "lr/critic", "lr/generator"];
        assert!(steps.iter().all(|name| names.contains(name)), "{names:?}");
        // Both rates follow the trainer's steps, not the optimizers' updates: 36 steps after the
        // warm-up.
        let lr = |name: &str| logged.iter().find(|(other, _)| other == name).unwrap().1;
        assert!((lr("lr/critic") - 0.05 / 36.0).abs() < 1e-9, "{logged:?}");
        assert!((lr("lr/critic") - lr("lr/generator")).abs() < 1e-12);
        for strategy in ["ddp", "fsdp"] {
            let (others, _) = train(2, strategy, keys);
            assert!(others[39] < 0.5 * others[0], "{strategy}, {keys}: {others:?}");
        }
        assert_eq!(train(2, "ddp", keys), train(2, "fsdp", keys));
    }
}

#[test]
fn several_optimizers_resume_bitwise() {
    for (ranks, strategy) in [(1, "single_device"), (2, "fsdp")] {
        let dir = tempfile::tempdir().unwrap();
        let run = |ranks: usize, name: &str, keys: &str| {
            let logged = run_ranks(ranks, |world| {
                let keys = format!(
                    "checkpoint = {{ dir = {:?}, every_n_steps = 1, overwrite = true }}\n\
                     trainer.ema_decay = 0.9\ntrainer.val_check_interval = 3\n{keys}",
                    dir.path().join(name)
                );
                let mut run = config(dir.path(), ranks, &keys)?;
                run.trainer.strategy = strategy.into();
                run.trainer.max_steps = Some(9);
                let events = Events::default();
                Trainer::new(world).with_sink(Box::new(events.clone())).fit::<Pair>(&run)?;
                let events = events.0.lock().unwrap();
                let numbers = events.iter().filter_map(|event| match event {
                    Event::Step { step, train_loss, metrics, .. } => {
                        Some((*step, *train_loss, format!("{metrics:?}")))
                    }
                    Event::Validation { step, val_loss, .. } => {
                        Some((*step, *val_loss, "val".to_owned()))
                    }
                    _ => None,
                });
                Ok(numbers.collect::<Vec<_>>())
            });
            logged.unwrap_or_else(|error| panic!("{strategy}: {error}")).swap_remove(0)
        };
        let mut whole = run(ranks, "whole", "");
        let from = format!("trainer.ckpt_path = {:?}", dir.path().join("whole/step-00000004"));
        let resumed = run(ranks, "resumed", &from);
        whole.retain(|(step, ..)| *step > 4);
        assert_eq!(resumed, whole, "{strategy}");
    }
}

#[test]
fn mistakes_in_manual_optimization_are_explained() {
    let error = |keys: &str| {
        let dir = tempfile::tempdir().unwrap();
        let run = config(dir.path(), 1, keys).unwrap();
        Trainer::default().fit::<Pair>(&run).unwrap_err().to_string()
    };
    let mistake = |name: &str| error(&format!("model.mistake = '{name}'"));
    assert_says!(mistake("automatic"), "configure_optimizers: 2 … manual optimization … `false` …");
    assert_says!(mistake("one"), "the trainer optimizes by itself … returns `false` … of step 1)");
    assert_says!(mistake("no optimizer"), "configure_optimizers: no optimizer … `critic.bias` …");
    assert_says!(mistake("two optimizers"), "configure_optimizers … both have … `generator.bias`");
    assert_says!(mistake("no parameter"), r#"configure_optimizers … "discriminator" … matches …"#);
    assert_says!(mistake("no pattern"), "configure_optimizers: `critic` has no patterns …");
    assert_says!(mistake("unknown name"), "there is no optimizer `judge` … `critic` … step 1)");
    assert_says!(
        error("trainer.accumulate_grad_batches = 2"),
        "`trainer.accumulate_grad_batches` … optimizes by itself … leave the key out"
    );
}

#[test]
fn clipping_reports_the_norm_before() {
    let norm = |(_, logged): &(Vec<f64>, Vec<(String, f64)>)| {
        logged.iter().find(|(name, _)| name == "grad_norm/critic").unwrap().1
    };
    let free = train(1, "single_device", "");
    let clipped = train(1, "single_device", "trainer.gradient_clip_val = 1e-6");
    assert!(clipped.0 != free.0);
    assert!(norm(&clipped) > 1e-6, "{}", norm(&clipped));
}
