//! A training loop with Fabric. The arguments set strategy and ranks.
//!
//! ```text
//! cargo run --example fabric -- trainer.devices=2 trainer.strategy=fsdp
//! cargo run --example fabric -- trainer.strategy=single_device data.batch_size=64
//! ```

use std::process::ExitCode;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::launch::report_and_exit_code;
use fulgurite::core::run::RunConfig;
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};

const STEPS: u64 = 200;
const ACCUMULATE: u64 = 2;

/// A network with two hidden layers that learns a sine.
struct Net {
    first: Linear,
    block: Unit<GeluMlp>,
    last: Linear,
}

/// The `[model]` table.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetConfig {}

impl Net {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            first: Linear::new(&b.pp("first"), 1, 16)?,
            block: b.unit("block", |b| GeluMlp::new(b, 16, 64))?,
            last: Linear::new(&b.pp("last"), 16, 1)?,
        })
    }

    fn loss(&self, (x, y): &(Tensor, Tensor)) -> Result<Loss> {
        let hidden = self.first.forward(x)?.tanh()?;
        let hidden = (&hidden + self.block.forward(&hidden)?)?;
        let error = (self.last.forward(&hidden)? - y)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, y.elem_count() as f64))
    }
}

/// Points on a sine.
struct Sine;

/// The `[data]` table.
#[derive(Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
struct SineConfig {
    /// Samples of one micro-batch of one rank.
    #[default(32)]
    batch_size: usize,
}

impl DataModule for Sine {
    type Config = SineConfig;
    type Batch = (Tensor, Tensor);

    fn setup(_: &SineConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &SineConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 1024 } else { 0 }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let xs: Vec<f32> = indices.iter().map(|&i| i as f32 * (6.0 / 1024.0) - 3.0).collect();
        let x = Tensor::from_vec(xs, (indices.len(), 1), device)?;
        let y = x.sin()?;
        Ok((x, y))
    }
}

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    report_and_exit_code(run())
}

fn run() -> Result<()> {
    let layers = std::env::args().skip(1).try_fold(ConfigLayers::new(), |l, arg| l.set(&arg))?;
    let run = RunConfig::<NetConfig, SineConfig>::from_layers(layers)?;

    // Starts the other ranks, unless torchrun or srun has done so.
    let mut fabric = Fabric::from_config(&run)?.launch()?;
    let adamw = AdamW { lr: 1e-2, ..AdamW::default() };
    let (model, mut optimizer) = fabric.setup(Net::new, &adamw)?;
    let batches = fabric.setup_data::<Sine>(&run.data)?;
    for (i, batch) in (1..=STEPS * ACCUMULATE).zip(batches) {
        let accumulating = i % ACCUMULATE != 0;
        let loss = batch?.forward(|batch| model.loss(batch))?; // in the batch's scope
        let _no_sync = fabric.no_backward_sync(accumulating); // restores the state before when dropped
        fabric.backward(&loss)?;
        if accumulating {
            continue;
        }
        let loss = fabric.step_totals(&[])?.mean(); // over all ranks and micro-batches
        let norm = fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
        optimizer.step()?; // also clears the gradients
        if fabric.is_global_zero() && optimizer.steps() % 50 == 0 {
            println!("step {:3}  loss {loss:.6}  gradient norm {norm:.6}", optimizer.steps());
        }
    }

    let path = std::env::temp_dir().join("fulgurite-fabric").join("last");
    fabric.save(&path, &mut optimizer, &(STEPS * ACCUMULATE))?;
    let batches: u64 = fabric.load(&path, Some(&mut optimizer))?;
    if fabric.is_global_zero() {
        println!("saved after {batches} micro-batches: {}", path.display());
    }
    Ok(())
}
