//! Batches made by worker threads: everything in a run is the same as without workers.

use std::path::Path;
use std::sync::{Arc, Mutex};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Evaluation, Event, EventSink, RunStatus};
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

const SAMPLES: u64 = 37;

/// A line through noisy points.
struct Line(Unit<Linear>);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

/// Points with random noise that differs in each epoch.
struct Points {
    wrong: Option<(u64, Wrong)>,
    sets: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PointsConfig {
    /// A training sample that fails.
    wrong: Option<u64>,
    /// Whether the sample panics instead of returning an error.
    panics: bool,
    /// Names of validation sets; each set has one sample less than the previous one.
    sets: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
enum Wrong {
    Error,
    Panic,
}

impl DataModule for Points {
    type Config = PointsConfig;
    type Batch = Tensor;

    fn setup(config: &PointsConfig, _: &DataContext) -> Result<Self> {
        let how = if config.panics { Wrong::Panic } else { Wrong::Error };
        Ok(Self { wrong: config.wrong.map(|sample| (sample, how)), sets: config.sets.clone() })
    }

    fn batch_size(_: &PointsConfig) -> usize {
        2
    }

    fn len(&self, split: Split) -> u64 {
        match split {
            Split::ValidationSet(set) => SAMPLES - set as u64,
            _ => SAMPLES,
        }
    }

    fn validation_sets(&self) -> Vec<String> {
        self.sets.clone()
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        match self.wrong {
            Some((sample, how)) if split == Split::Train && indices.contains(&sample) => {
                let Wrong::Error = how else { panic!("of a sort") };
                return Err(Error::Data("cannot be read".to_owned()));
            }
            _ => {}
        }
        let points: Vec<f32> = indices.iter().map(|&i| i as f32 / 10.0).collect();
        Ok(Tensor::from_vec(points, (indices.len(), 1), device)?)
    }

    fn augmented_batch(&self, samples: &Samples, device: &Device) -> Result<Tensor> {
        let points = self.batch(samples.split(), samples.indices(), device)?;
        let moved: Vec<f32> =
            (0..samples.indices().len()).map(|i| samples.random(i).normal(0) as f32).collect();
        Ok((points + Tensor::from_vec(moved, (samples.indices().len(), 1), device)?)?)
    }
}

impl LightningModule for Line {
    type Config = NoKeys;
    type Data = Points;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("line", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        if let Some(set) = ctx.validation_set {
            ctx.log("number_of_set", set as f64);
        }
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }

    fn predict_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Hooks<Points> for Line {}

#[derive(Clone, Default)]
struct Losses(Arc<Mutex<Vec<u64>>>);

impl EventSink for Losses {
    fn event(&mut self, event: &Event) -> Result<()> {
        let loss = match event {
            Event::Step { train_loss, .. } => train_loss,
            Event::Validation { val_loss, .. } => val_loss,
            _ => return Ok(()),
        };
        self.0.lock().unwrap().push(loss.to_bits());
        Ok(())
    }
    fn finish(&mut self, _: RunStatus) -> Result<()> {
        Ok(())
    }
}

fn config(logs: &Path, ranks: usize, keys: &str) -> Result<RunConfig<NoKeys, PointsConfig>> {
    let text = format!(
        "seed = 3\n[optimizer]\ntype = 'adamw'\nlr = 0.01\n[trainer]\n\
         default_root_dir = {logs:?}\nstrategy = 'fsdp'\ndevices = {ranks}\nloggers = []\n\
         enable_progress_bar = false\nval_check_interval = 7\naccumulate_grad_batches = 3\n{keys}"
    );
    RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)
}

/// Bits of the losses of rank 0's run, and of all predictions.
fn run(logs: &Path, ranks: usize, keys: &str) -> (Vec<u64>, Vec<u32>) {
    let losses = Losses::default();
    let predicted = run_ranks(ranks, |world| {
        let run = config(logs, ranks, keys)?;
        let trainer = Trainer::new(world).with_sink(Box::new(losses.clone()));
        let mut trained = trainer.fit::<Line>(&run)?;
        Ok(trained.predict()?.joined()?.expect("each rank has samples").1.flatten_all()?)
    });
    let predicted = predicted.unwrap();
    let bits = predicted.iter().flat_map(|x| x.to_vec1::<f32>().unwrap()).map(f32::to_bits);
    let losses = losses.0.lock().unwrap().clone();
    (losses, bits.collect())
}

#[test]
fn worker_count_does_not_change_a_run() {
    for ranks in [1, 2, 3] {
        let logs = tempfile::tempdir().unwrap();
        let (expected, predictions) = run(logs.path(), ranks, "max_steps = 20");
        assert_eq!(expected.len(), 22, "steps and validations");
        for (workers, ahead) in [(1, 1), (2, 2), (5, 3)] {
            let keys = format!("num_workers = {workers}\nprefetch_factor = {ahead}");
            let whole = run(logs.path(), ranks, &format!("max_steps = 20\n{keys}"));
            assert_eq!(whole, (expected.clone(), predictions.clone()), "{ranks} ranks, {keys}");

            let saved = logs.path().join(format!("{workers}"));
            let save = format!("[checkpoint]\ndir = {saved:?}");
            let (begun, _) = run(logs.path(), ranks, &format!("max_steps = 9\n{keys}\n{save}"));
            let keys = format!("max_steps = 20\n{keys}\nckpt_path = 'last'\n{save}");
            let (rest, again) = run(logs.path(), ranks, &keys);
            assert_eq!([begun, rest].concat(), expected, "{ranks} ranks, {keys}");
            assert_eq!(again, predictions);
        }
    }
}

#[test]
fn failing_sample_is_named() {
    let logs = tempfile::tempdir().unwrap();
    for (ranks, workers, panics) in [(1, 0, false), (1, 2, false), (2, 3, true), (1, 0, true)] {
        let keys = format!(
            "max_steps = 20\nnum_workers = {workers}\n[data]\nwrong = 5\npanics = {panics}"
        );
        let errors = run_ranks(ranks, |world| {
            let run = config(logs.path(), ranks, &keys)?;
            Ok(Trainer::new(world).fit::<Line>(&run).map(drop))
        });
        let errors = errors.unwrap().into_iter().map(Result::unwrap_err);
        let (of_sample, of_others): (Vec<Error>, Vec<Error>) =
            errors.partition(|error| matches!(error, Error::Data(_)));
        let [error] = &*of_sample else { panic!("one rank has the sample: {of_sample:?}") };
        let error = error.to_string();
        let what = if panics { "making the batch panicked: of a sort" } else { "cannot be read" };
        let named = error.starts_with("data: train samples ") && error.contains('5');
        assert!(named && error.ends_with(what), "{error}");
        assert!(of_others.iter().all(|error| matches!(error, Error::PeerFailed { .. })));
    }
}

#[test]
fn several_validation_sets_have_names() {
    let logs = tempfile::tempdir().unwrap();
    let mut first: Option<Vec<(String, f64)>> = None;
    for ranks in [1, 2, 3] {
        let evaluations = run_ranks(ranks, |world| {
            let run = config(
                logs.path(),
                ranks,
                "max_steps = 1\nnum_workers = 1\n[data]\nsets = ['near', 'far']",
            )?;
            Trainer::new(world).validate::<Line>(&run)
        });
        for Evaluation { loss, metrics, batches, .. } in evaluations.unwrap() {
            let per_set = |samples: u64| samples.div_ceil(2 * ranks as u64) * ranks as u64;
            assert_eq!(batches, per_set(SAMPLES) + per_set(SAMPLES - 1));
            let names: Vec<&str> = metrics.keys().map(String::as_str).collect();
            assert_eq!(
                names,
                ["number_of_set/far", "number_of_set/near", "val_loss/far", "val_loss/near"]
            );
            assert_eq!((metrics["number_of_set/near"], metrics["number_of_set/far"]), (0.0, 1.0));
            let [near, far] = [SAMPLES as f64, SAMPLES as f64 - 1.0];
            let sum = metrics["val_loss/near"] * near + metrics["val_loss/far"] * far;
            assert!((sum / (near + far) - loss).abs() < 1e-9 * loss.abs(), "{loss} {metrics:?}");
            assert_ne!(metrics["val_loss/near"], metrics["val_loss/far"]);
            let values: Vec<_> = metrics.into_iter().collect();
            for ((_, value), (name, expected)) in
                values.iter().zip(first.get_or_insert(values.clone()))
            {
                assert!(
                    (value - *expected).abs() <= 1e-6 * expected.abs(),
                    "{name}, {ranks} ranks"
                );
            }
        }
    }
    for sets in ["['a', 'a']", "['']"] {
        let run = config(logs.path(), 1, &format!("max_steps = 1\n[data]\nsets = {sets}")).unwrap();
        let error = Trainer::default().validate::<Line>(&run).unwrap_err().to_string();
        assert!(error.contains("each needs a name of its own"), "{error}");
    }
}
