//! Training on streams that are endless or of unknown length.

use std::path::Path;
use std::sync::Arc;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::data::{Endless, Sampler, Streaming};
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::toy::{Events, NoKeys};

type Numbers = Box<dyn Iterator<Item = Result<u64>> + Send>;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StreamConfig {
    /// Samples of a micro-batch.
    batch: usize,
    /// Samples in the stream; `None` for an endless stream.
    samples: Option<u64>,
    /// A declared length that differs from the real one.
    said: Option<u64>,
}

struct Streamed {
    stream: Streaming<Numbers>,
    len: Option<u64>,
}

impl DataModule for Streamed {
    type Config = StreamConfig;
    type Batch = Tensor;

    fn setup(config: &StreamConfig, _: &DataContext) -> Result<Self> {
        let samples = config.samples;
        let stream = Streaming::new(100, move || -> Result<Numbers> {
            Ok(match samples {
                Some(samples) => Box::new((0..samples).map(Ok)),
                None => Box::new((0..).map(Ok)),
            })
        });
        let len = match (config.said, samples) {
            (Some(said), _) => Some(said),
            (None, Some(_)) => Some(stream.count()?),
            (None, None) => None,
        };
        Ok(Self { stream, len })
    }

    fn batch_size(config: &StreamConfig) -> usize {
        config.batch
    }

    fn sampler(&self, _: u64) -> Result<Option<Arc<dyn Sampler>>> {
        Ok(match self.len {
            Some(_) => None,
            None => Some(Arc::new(Endless::new(12)?)),
        })
    }

    fn shuffle(_: &StreamConfig) -> bool {
        false
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { self.len.unwrap_or(u64::MAX) } else { 0 }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let numbers: Vec<u64> =
            indices.iter().map(|&index| self.stream.get(index)).collect::<Result<_>>()?;
        let numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
        Ok(Tensor::from_vec(numbers, (indices.len(), 1), device)?)
    }
}

struct Model(Unit<Linear>);

impl LightningModule for Model {
    type Config = NoKeys;
    type Data = Streamed;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        ctx.log("mean", x.mean_all()?);
        let y = self.0.forward(&(x / 1000.0)?)?;
        Ok(Loss::new(y.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Streamed> for Model {}

/// The mean of the samples of each step, and the epochs completed after it.
fn train(ranks: usize, keys: &str, root: &Path) -> Result<Vec<(f64, f64)>> {
    let runs = run_ranks(ranks, |world| {
        let batch = 6 / ranks;
        let text = format!(
            "trainer.default_root_dir = {root:?}\ntrainer.strategy = 'ddp'\ntrainer.devices = {ranks}\n\
             trainer.loggers = []\ntrainer.enable_progress_bar = false\n\
             trainer.log_every_n_steps = 1\ndata.batch = {batch}\n{keys}\n"
        );
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        let run: RunConfig<NoKeys, StreamConfig> = RunConfig::from_layers(layers)?;
        let events = Events::default();
        Trainer::new(world).with_sink(Box::new(events.clone())).fit::<Model>(&run)?;
        let mut steps = Vec::new();
        for event in &*events.0.lock().unwrap() {
            if let Event::Step { epoch, metrics, .. } = event {
                steps.push((metrics["mean"], *epoch));
            }
        }
        Ok(steps)
    });
    Ok(runs?.swap_remove(0))
}

#[test]
fn endless_stream_across_epochs_and_resume() {
    // Steps of six samples, epochs of two steps.
    let expected = |steps: std::ops::Range<u64>| -> Vec<(f64, f64)> {
        steps.map(|step| (6.0 * step as f64 + 2.5, (step + 1) as f64 / 2.0)).collect()
    };
    for ranks in [1, 2, 3] {
        for workers in [0, 2] {
            let root = tempfile::tempdir().unwrap();
            let kept = root.path().join("kept");
            let keys = format!(
                "trainer.num_workers = {workers}\ncheckpoint.dir = {kept:?}\n\
                 checkpoint.every_n_steps = 3\ntrainer.max_steps ="
            );
            let steps = train(ranks, &format!("{keys} 3"), root.path()).unwrap();
            assert_eq!(steps, expected(0..3), "{ranks} ranks, {workers} workers");
            let resume = format!("{keys} 7\ntrainer.ckpt_path = 'last'");
            let steps = train(ranks, &resume, root.path()).unwrap();
            assert_eq!(steps, expected(3..7), "{ranks} ranks, {workers} workers, resumed");
        }
    }
    let root = tempfile::tempdir().unwrap();
    let steps = train(1, "trainer.max_epochs = 2", root.path()).unwrap();
    assert_eq!(steps, expected(0..4));
}

#[test]
fn counted_stream_has_epochs() {
    let root = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3] {
        let steps = train(ranks, "data.samples = 12\ntrainer.max_epochs = 2", root.path()).unwrap();
        assert_eq!(steps, [(2.5, 0.5), (8.5, 1.0), (2.5, 1.5), (8.5, 2.0)], "{ranks} ranks");
    }
}

#[test]
fn stream_shorter_than_declared_ends_run() {
    let root = tempfile::tempdir().unwrap();
    for workers in [0, 2] {
        let keys = format!(
            "data.samples = 8\ndata.said = 12\ntrainer.max_epochs = 1\ntrainer.num_workers = {workers}"
        );
        let error = train(1, &keys, root.path()).unwrap_err().to_string();
        assert!(error.contains("the stream has 8 samples, and sample 8 is wanted"), "{error}");
    }
}
