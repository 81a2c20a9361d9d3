//! Pipelines over NCCL train as one device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint_local as _;
use fulgurite_core::Result;
use fulgurite_core::collective::{Collective, End, Intercepted, Interceptor, ProcessGroup, Work};
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::data::{DataContext, DataModule, Split};
use fulgurite_core::module::stage::{self, StageTensors};
use fulgurite_core::module::{Module as _, ModuleBuilder, Unit};
use fulgurite_core::nn::{Linear, Loss};
use fulgurite_core::run::RunConfig;
use fulgurite_core::trainer::{Hooks, LightningModule, StepContext, Trainer};
use fulgurite_strategies as _;
use fulgurite_test_support::training::gather_weights;
use fulgurite_transports::run_ranks;

use crate::ranks::Job;

/// Rows of numbers.
struct Rows;

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
struct RowsConfig {
    batch_size: usize,
}

impl DataModule for Rows {
    type Config = RowsConfig;
    type Batch = Tensor;

    fn setup(_: &RowsConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &RowsConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 48 } else { 4 }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let row = |&i: &u64| (0..8).map(move |k| ((i * 5 + k * 3) % 11) as f32 / 11.0);
        let rows: Vec<f32> = indices.iter().flat_map(row).collect();
        Ok(Tensor::from_vec(rows, (indices.len(), 8), device)?)
    }
}

/// An activation, and a penalty of all layers.
struct Passed {
    x: Tensor,
    penalty: Tensor,
}

impl StageTensors for Passed {
    fn tensors(&self) -> Result<Vec<Tensor>> {
        Ok(vec![self.x.clone(), self.penalty.clone()])
    }

    fn of_tensors(tensors: Vec<Tensor>) -> Result<Self> {
        let [x, penalty] = <[Tensor; 2]>::try_from(tensors).expect("two tensors");
        Ok(Self { x, penalty })
    }
}

struct Layers {
    layers: Vec<Unit<Linear>>,
    head: Linear,
}

impl Layers {
    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let first = || Ok(Passed { x: x.clone(), penalty: Tensor::new(0f32, x.device())? });
        let last = stage::through(&self.layers, first, |layer, before: &Passed| {
            let x = layer.forward(&before.x)?.tanh()?;
            let penalty = (&before.penalty + (x.sqr()?.sum_all()? * 0.01)?)?;
            Ok(Passed { x, penalty })
        })?;
        let y = self.head.forward(&last.x)?;
        let sum = ((y - x)?.sqr()?.sum_all()? + last.penalty)?;
        Ok(Loss::new(sum, x.dim(0)? as f64))
    }
}

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
struct NoKeys {}

impl LightningModule for Layers {
    type Config = NoKeys;
    type Data = Rows;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let layer = |i| b.unit(&format!("layers.{i}"), |b| Linear::new(b, 8, 8));
        let layers = (0..4).map(layer).collect::<Result<Vec<_>>>()?;
        b.stages(&[] as &[&str], &layers);
        Ok(Self { layers, head: Linear::new(&b.pp("head"), 8, 8)? })
    }

    fn training_step(&mut self, batch: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }

    fn validation_step(&mut self, batch: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }
}

impl<D> Hooks<D> for Layers {}

/// The weights after some steps, and the loss of the validation.
type Trained = (BTreeMap<String, Vec<f32>>, f64);

fn train(world: Arc<dyn ProcessGroup>, strategy: &str, batch: usize) -> Result<Trained> {
    let logs = tempfile::tempdir().unwrap();
    let text = format!(
        "[data]\nbatch_size = {batch}\n[trainer]\nstrategy = {strategy}\ndevices = {}\n\
         default_root_dir = {:?}\nloggers = []\nenable_progress_bar = false\nmax_steps = 3\nval_check_interval = 3\n\
         accumulate_grad_batches = 4\n",
        world.size(),
        logs.path(),
    );
    let run = RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)?;
    let trained = Trainer::new(world.clone()).fit::<Layers>(&run)?;
    let weights = gather_weights(trained.fabric().module_tree()?, &*world)?;
    Ok((weights, trained.outcome().metrics["val_loss"]))
}

#[test]
fn pipelines_train_as_one_device() {
    let alone = run_ranks(1, |world| train(world, "'single_device'", 2)).unwrap().swap_remove(0);
    for (ranks, batch, options) in [
        (2, 2, "pipeline_parallel_size = 2"),
        (2, 2, "pipeline_parallel_size = 2, pipeline_schedule = 'zb_v'"),
        (3, 2, "pipeline_parallel_size = 3, pipeline_schedule = 'gpipe'"),
        (4, 1, "pipeline_parallel_size = 2, data_parallel_shard_size = 2"),
    ] {
        let strategy = format!("{{ type = 'model_parallel', {options} }}");
        for seed in 21..24 {
            // The heads of messages are on the host. A wait for one on the device would stop what
            // is computed, for which other ranks wait.
            let floats = vec![DType::F32, DType::BF16, DType::F16];
            let job = Job { dtypes: Some(floats), ..Job::new(seed) };
            let runs = job.run(ranks, |world| train(world, &strategy, batch)).unwrap();
            for (weights, loss) in &runs {
                assert!((loss - alone.1).abs() <= 1e-5 * alone.1, "{options}: {loss} {}", alone.1);
                for (name, expected) in &alone.0 {
                    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
                    assert!(weights[name].iter().zip(expected).all(close), "{options}: {name}");
                }
            }
            job.check();
        }
    }
}

/// Comes late to everything after it has sent a head.
struct Late;

impl Interceptor for Late {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        group.start(collective, overlap)
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        group.start_after(end, collective)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(Intercepted::new(part, Self)))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        let work = group.send(tensor, dst)?;
        if tensor.dtype() == DType::F64 {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(work)
    }
}

/// Each rank receives a head while its own next message is not yet given to the device.
#[test]
fn late_senders_do_not_wait_for_each_other() {
    let floats = vec![DType::F32, DType::BF16, DType::F16];
    let job = Job { dtypes: Some(floats), ..Job::new(1) };
    let strategy =
        "{ type = 'model_parallel', pipeline_parallel_size = 2, pipeline_schedule = 'zb_v' }";
    job.run(2, |world| train(Arc::new(Intercepted::new(world, Late)), strategy, 2)).unwrap();
    job.check();
}
