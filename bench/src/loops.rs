//! The same training by the trainer, by a loop with Fabric, and by a loop without either.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fulgurite_core::collective::{ProcessGroup, Solo};
use fulgurite_core::config::{ConfigLayers, PluginValue};
use fulgurite_core::module::ModuleInit;
use fulgurite_core::optim::{GradScale, OptimizerConfig as _, SquaredNorm, clip_factor};
use fulgurite_core::parameter::{LocalGrads, ParameterSlot};
use fulgurite_core::run::RunConfig;
use fulgurite_core::strategy::materialize;

use super::tiny_models::{Net, TinyModel, TinyModelConfig, Tokens};
use fulgurite::prelude::*;

/// A training loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loop {
    /// [`Trainer::fit`], with a callback and the default loggers.
    Trainer,
    /// A hand-written loop over [`Fabric`].
    Fabric,
    /// A hand-written loop that calls candle's backward and the optimizer, without strategy or
    /// Fabric. For one rank.
    Bare,
}

impl Loop {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Trainer => "trainer",
            Self::Fabric => "fabric",
            Self::Bare => "bare",
        }
    }
}

/// The gradient clipping of all loops.
const CLIP: f64 = 1.0;

/// A training run to measure.
pub(super) struct Job<'a> {
    pub(super) model: TinyModel,
    pub(super) strategy: &'a str,
    pub(super) warmup: u64,
    pub(super) steps: u64,
    /// Threads that make the trainer's batches (`trainer.num_workers`); other loops make batches
    /// inline.
    pub(super) workers: usize,
    /// Directory of the trainer's logs.
    pub(super) dir: &'a Path,
}

/// The measurements of a loop on this rank.
pub(super) struct Measured {
    /// Seconds of each step after the warm-up.
    pub(super) steps: Vec<f64>,
    /// The loss of the last step.
    pub(super) loss: f64,
}

impl Job<'_> {
    /// Trains on `world`. Collective over it.
    pub(super) fn run(&self, by: Loop, world: &Arc<dyn ProcessGroup>) -> Result<Measured> {
        let (ends, loss) = match by {
            Loop::Trainer => self.trainer(world.clone())?,
            Loop::Fabric => self.fabric(world.clone())?,
            Loop::Bare => self.bare()?,
        };
        let timed = &ends[self.warmup as usize - 1..];
        let steps = timed.windows(2).map(|ends| (ends[1] - ends[0]).as_secs_f64()).collect();
        Ok(Measured { steps, loss })
    }

    fn config(&self) -> Result<RunConfig<TinyModelConfig, TinyModelConfig>> {
        let layers = ConfigLayers::new();
        let mut run = RunConfig::<TinyModelConfig, TinyModelConfig>::from_layers(layers)?;
        run.model.name = self.model;
        run.data.name = self.model;
        run.trainer.strategy = PluginValue::new(self.strategy);
        run.trainer.accelerator = PluginValue::new("cpu");
        run.trainer.max_steps = Some(self.total());
        run.trainer.gradient_clip_val = Some(CLIP);
        run.trainer.enable_progress_bar = false;
        run.trainer.default_root_dir = self.dir.to_owned();
        run.checkpoint.save_last = false;
        Ok(run)
    }

    fn total(&self) -> u64 {
        self.warmup + self.steps
    }

    fn trainer(&self, world: Arc<dyn ProcessGroup>) -> Result<(Vec<Instant>, f64)> {
        let clock = Clock::default();
        let ends = clock.0.clone();
        let trainer = Trainer::new(world).with_callback(Box::new(clock));
        let mut run = self.config()?;
        run.trainer.num_workers = Some(self.workers);
        let trained = trainer.fit::<Net>(&run)?;
        let ends = std::mem::take(&mut *ends.lock().unwrap_or_else(PoisonError::into_inner));
        Ok((ends, trained.outcome().last_loss))
    }

    fn fabric(&self, world: Arc<dyn ProcessGroup>) -> Result<(Vec<Instant>, f64)> {
        let run = self.config()?;
        let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
        let (net, mut optimizer) = fabric.setup(|b| Net::new(b, self.model), &AdamW::default())?;
        let batches = fabric.setup_data::<Tokens>(&run.data)?;
        let (mut ends, mut loss) = (Vec::new(), f64::NAN);
        for batch in batches.take(self.total() as usize) {
            fabric.backward(&batch?.forward(|batch| net.loss(batch))?)?;
            loss = fabric.step_totals(&[])?.mean();
            fabric.clip_gradients_norm(&mut optimizer, CLIP)?;
            optimizer.step()?;
            ends.push(Instant::now());
        }
        Ok((ends, loss))
    }

    fn bare(&self) -> Result<(Vec<Instant>, f64)> {
        let run = self.config()?;
        let builder = ModuleBuilder::new(ModuleInit::default());
        let net = Net::new(&builder, self.model)?;
        let mut tree = builder.finish()?;
        let slots = tree.slots();
        materialize::replicate(&slots, run.seed)?;
        let grads = Arc::new(LocalGrads::default());
        slots.iter().for_each(|slot| slot.set_reducer(grads.clone()));
        let parameters: Vec<Parameter> = tree.trainable().cloned().collect();
        let mut optimizer = AdamW::default().build(tree.parameters())?;
        let alone = DataContext {
            seed: run.seed,
            rank: 0,
            world_size: 1,
            data_parallel_rank: 0,
            data_parallel_size: 1,
        };
        let data = Tokens::setup(&run.data, &alone)?;
        let samples = Tokens::batch_size(&run.data) as u64;
        let (mut ends, mut mean) = (Vec::new(), f64::NAN);
        for step in 0..self.total() {
            let indices: Vec<u64> = (step * samples..(step + 1) * samples).collect();
            let batch = data.batch(Split::Train, &indices, &Device::Cpu)?;
            let loss = net.loss(&batch)?;
            mean = loss.mean()?;
            drop(loss.sum().backward()?);
            for slot in &slots {
                slot.finish_backward()?;
            }
            grads.deliver(&slots)?;
            let scale = 1.0 / loss.count();
            let norm = scale * SquaredNorm::of(&parameters, &|_| 0)?.read()?.sqrt();
            let factor = scale * clip_factor(norm, CLIP);
            optimizer.step(&GradScale { factor, clip_value: None })?;
            slots.iter().for_each(ParameterSlot::end_step);
            ends.push(Instant::now());
        }
        Ok((ends, mean))
    }
}

/// Records when steps end.
#[derive(Default)]
struct Clock(Arc<Mutex<Vec<Instant>>>);

impl Callback for Clock {}

impl Hooks for Clock {
    fn on_train_step_end(&mut self, _: &mut HookContext) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        Ok(())
    }
}

/// A process group of one rank.
pub(super) fn alone() -> Arc<dyn ProcessGroup> {
    Arc::new(Solo::new("world", 0))
}
