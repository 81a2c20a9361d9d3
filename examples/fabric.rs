//! Owning the loop: Fabric on as many processes as the first argument says, under the strategy that
//! the second one names.
//!
//! ```text
//! cargo run --example fabric -- 2 fsdp
//! cargo run --example fabric -- 1 single_device
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use fulgurite::core::checkpoint::{self, CheckpointIO, CheckpointIOConfig, SaveMeta};
use fulgurite::core::collective::{ProcessGroup, ProcessGroupConfig, Solo};
use fulgurite::core::config::PluginValue;
use fulgurite::core::launch::{LaunchOptions, launch, report_and_exit_code};
use fulgurite::core::module::ModuleInit;
use fulgurite::core::registry::kind;
use fulgurite::core::strategy::BuildContext;
use fulgurite::prelude::*;

const STEPS: u64 = 200;
const ACCUMULATE: u64 = 2;
const GLOBAL_BATCH: usize = 64;
const SEED: u64 = 42;

/// Two hidden layers that learn a sine.
struct Net {
    first: Linear,
    block: Unit<GeluMlp>,
    last: Linear,
}

impl Net {
    fn new(b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            first: Linear::new(&b.pp("first"), 1, 16)?,
            block: b.unit("block", |b| GeluMlp::new(b, 16, 64))?,
            last: Linear::new(&b.pp("last"), 16, 1)?,
        })
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Result<Loss> {
        let hidden = self.first.forward(x)?.tanh()?;
        let hidden = (&hidden + self.block.forward(&hidden)?)?;
        let error = (self.last.forward(&hidden)? - y)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, y.elem_count() as f64))
    }
}

/// This rank's part of a micro-batch. Every sample is a function of its place, so the data is the
/// same on any number of ranks that divides the batch.
fn batch(micro_batch: u64, rank: usize, world_size: usize) -> Result<(Tensor, Tensor)> {
    let share = GLOBAL_BATCH / world_size;
    let start = micro_batch * GLOBAL_BATCH as u64 + (rank * share) as u64;
    let random = Stream::new(SEED, Purpose::Sample, "x");
    let xs = (0..share as u64).map(|i| 6.0 * random.uniform(start + i) as f32 - 3.0);
    let x = Tensor::from_iter(xs, &Device::Cpu)?.reshape((share, 1))?;
    let y = x.sin()?;
    Ok((x, y))
}

fn main() -> ExitCode {
    report_and_exit_code(run())
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let devices = args.next().map_or(Ok(2), |n| n.parse()).map_err(Error::other)?;
    let strategy = PluginValue::new(args.next().unwrap_or_else(|| "fsdp".to_owned()));

    // Starts the other ranks, or finds that torchrun or srun has done so.
    let launched = launch(LaunchOptions { devices: Some(devices), ..LaunchOptions::default() })?;
    let world: Arc<dyn ProcessGroup> = if launched.world_size == 1 {
        Arc::new(Solo::new("world", 0))
    } else {
        PluginValue::new("shm")
            .build::<Box<dyn ProcessGroupConfig>>(kind::PROCESS_GROUP, "process_group")?
            .build(&launched.group_context(Duration::from_secs(60)))?
    };
    let mut context = BuildContext::default();
    context.world_size = launched.world_size;
    let strategy =
        strategy.build::<Box<dyn StrategyConfig>>(kind::STRATEGY, "strategy")?.build(&context)?;

    let mut fabric = Fabric::new(world, strategy, ModuleInit::default(), SEED)?;
    let adamw = AdamW { lr: 1e-2, ..AdamW::default() };
    let (model, mut optimizer) = fabric.setup(Net::new, &adamw)?;
    for step in 0..STEPS {
        for i in 0..ACCUMULATE {
            let (x, y) = batch(step * ACCUMULATE + i, fabric.global_rank(), fabric.world_size())?;
            let loss = model.loss(&x, &y)?;
            let _no_sync = fabric.no_backward_sync(i + 1 < ACCUMULATE); // restores what was before
            fabric.backward(&loss)?;
        }
        let loss = fabric.step_totals(&[])?.mean(); // over all ranks and micro-batches
        let norm = fabric.clip_gradients_norm(&mut optimizer, 1.0)?;
        optimizer.step()?; // also clears the gradients
        if fabric.is_global_zero() && (step + 1) % 50 == 0 {
            println!("step {:3}  loss {loss:.6}  gradient norm {norm:.6}", step + 1);
        }
    }
    let path = save(&fabric, &mut optimizer, &std::env::temp_dir().join("fulgurite-fabric"))?;
    if fabric.is_global_zero() {
        println!("saved {}", path.display());
    }
    Ok(())
}

/// Saves a distributed checkpoint; every rank writes what it holds.
fn save(
    fabric: &Fabric,
    optimizer: &mut FabricOptimizer,
    directory: &Path,
) -> Result<std::path::PathBuf> {
    let io: Arc<dyn CheckpointIO> = PluginValue::new("local")
        .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
        .build(directory)?;
    let (tree, mesh) = (fabric.module_tree()?, fabric.device_mesh()?);
    let coordinate = |dim: &str| mesh.coordinate(dim);
    let model = checkpoint::model_tensors(&tree, coordinate)?;
    let states = optimizer.state_tensors()?;
    let states = checkpoint::optimizer_tensors(&tree, &states, coordinate)?;
    let meta = SaveMeta {
        step: optimizer.steps(),
        state: serde_json::json!({ "optimizer": optimizer.scalars() }),
        ..SaveMeta::default()
    };
    let name = checkpoint::step_name(optimizer.steps());
    checkpoint::save(&*io, &**fabric.world(), &name, &model, &states, &meta)
}
