//! Logged values are exact, however samples are distributed over ranks.

use std::collections::BTreeMap;

use fulgurite::core::collective::Counter;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::metric::{Average, ConfusionMatrix, F1Score, MetricTable};
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Event, Histogram};
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::program::{Job, Scratch};
use crate::toy::{Events, NoKeys};

/// Number of validation samples: odd.
const VALIDATION: u64 = 13;
const TRAINING: u64 = 12;

/// A fixed head that predicts one of three classes.
struct Classifier(Linear);

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct SamplesConfig {
    batch_size: usize,
}

impl Default for SamplesConfig {
    fn default() -> Self {
        Self { batch_size: 2 }
    }
}

struct Samples;

/// A value in 0..1 that only depends on the sample.
fn number(sample: u64, of: u64) -> f64 {
    let bits = (sample * 31 + of * 17 + 7).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    bits as f64 / (1u64 << 24) as f64
}

impl DataModule for Samples {
    type Config = SamplesConfig;
    /// Inputs, targets and sample indices.
    type Batch = (Tensor, Tensor, Vec<u64>);

    fn setup(_: &SamplesConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &SamplesConfig) -> usize {
        config.batch_size
    }

    fn shuffle(_: &SamplesConfig) -> bool {
        false
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { TRAINING } else { VALIDATION }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Self::Batch> {
        let n = indices.len();
        let x: Vec<f32> =
            indices.iter().flat_map(|&i| (0..3).map(move |j| number(i, j) as f32)).collect();
        let targets: Vec<u32> = indices.iter().map(|&i| (number(i, 9) * 3.0) as u32).collect();
        let x = Tensor::from_vec(x, (n, 3), device)?;
        Ok((x, Tensor::from_vec(targets, n, device)?, indices.to_vec()))
    }
}

impl LightningModule for Classifier {
    type Config = NoKeys;
    type Data = Samples;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("head"), 3, 3)?))
    }

    fn training_step(
        &mut self,
        (x, targets, samples): &(Tensor, Tensor, Vec<u64>),
        ctx: &mut StepContext,
    ) -> Result<Loss> {
        let mean = samples.iter().map(|&i| number(i, 5)).sum::<f64>() / samples.len() as f64;
        let by_both = LogOptions::default().on_epoch(true);
        ctx.log("mean", mean);
        ctx.log_with("both", mean, by_both);
        ctx.log_with("of_epoch", mean, by_both.on_step(false));
        let largest = samples.iter().map(|&i| number(i, 5)).fold(0.0, f64::max);
        ctx.log_with("largest", largest, LogOptions::default().reduce(Reduce::Max));
        cross_entropy(&self.0.forward(x)?, targets)
    }

    fn validation_step(
        &mut self,
        (x, targets, _): &(Tensor, Tensor, Vec<u64>),
        ctx: &mut StepContext,
    ) -> Result<Loss> {
        // The inputs are the scores themselves.
        let hits = predicted_classes(x)?.0.eq(targets)?.to_vec1::<u8>()?;
        let hits: u32 = hits.into_iter().map(u32::from).sum();
        // In the style of a Lightning user.
        ctx.log("val_acc", f64::from(hits) / targets.dim(0)? as f64);
        ctx.log("val_accuracy", Accuracy::of(x, targets)?);
        ctx.log("val_f1", F1Score::of(x, targets, Average::Macro)?);
        let names = ["a", "b", "c"].map(str::to_owned);
        ctx.log("matrix", ConfusionMatrix::of(x, targets)?.with_names(&names)?);
        let loss = cross_entropy(&self.0.forward(x)?, targets)?;
        ctx.log("val_perplexity", Perplexity::of(&loss)?);
        ctx.log_histogram("inputs", x)?;
        if ctx.batch_index == 0 {
            ctx.log_text("sample", format!("*of* rank {}", ctx.rank));
        }
        let counted = f64::from(u8::from(!ctx.is_padding));
        ctx.log_with("batches", counted, LogOptions::default().reduce(Reduce::Sum));
        Ok(loss)
    }
}

impl Hooks<Samples> for Classifier {
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext<Samples>) -> Result<()> {
        ctx.log("rank", ctx.rank as f64);
        Ok(())
    }
}

/// The events of a run on `ranks` ranks, and rank 0's number of collectives.
fn run(ranks: usize, batch_size: usize, keys: &str) -> (Vec<Event>, u64) {
    run_saving(ranks, batch_size, keys, "save_last = false")
}

/// Like [`run`], with these keys of `[checkpoint]`.
fn run_saving(ranks: usize, batch_size: usize, keys: &str, checkpoint: &str) -> (Vec<Event>, u64) {
    let logs = tempfile::tempdir().unwrap();
    let text = format!(
        "seed = 3\n[trainer]\ndefault_root_dir = {:?}\nstrategy = 'ddp'\ndevices = {ranks}\n\
         loggers = []\nenable_progress_bar = false\n{keys}\n[data]\nbatch_size = {batch_size}\n\
         [checkpoint]\n{checkpoint}",
        logs.path()
    );
    let results = run_ranks(ranks, |world| {
        let layers = ConfigLayers::new().text("run.toml", &text)?;
        let config: RunConfig<NoKeys, SamplesConfig> = RunConfig::from_layers(layers)?;
        let counter = Counter::default();
        let counting = counter.watch(world);
        let events = Events::default();
        let trainer = Trainer::new(counting).with_sink(Box::new(events.clone()));
        trainer.fit::<Classifier>(&config)?;
        let events = events.0.lock().unwrap().clone();
        let calls = counter.snapshot().values().map(|record| record.calls).sum();
        Ok((events, calls))
    });
    results.unwrap().swap_remove(0)
}

/// The metrics of one kind of event, in order.
fn logged(
    events: &[Event],
    kind: fn(&Event) -> Option<&BTreeMap<String, f64>>,
) -> Vec<BTreeMap<String, f64>> {
    events.iter().filter_map(kind).cloned().collect()
}

fn of_steps(event: &Event) -> Option<&BTreeMap<String, f64>> {
    let Event::Step { metrics, .. } = event else { return None };
    Some(metrics)
}

fn of_validations(event: &Event) -> Option<&BTreeMap<String, f64>> {
    let Event::Validation { metrics, .. } = event else { return None };
    Some(metrics)
}

fn of_tables(event: &Event) -> Option<&MetricTable> {
    let Event::Table { step: 1, name, table } = event else { return None };
    (name == "matrix").then_some(table)
}

fn of_others(event: &Event) -> Option<&BTreeMap<String, f64>> {
    let Event::Metrics { metrics, .. } = event else { return None };
    Some(metrics)
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-6, "{found} instead of {expected}");
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let numbers: Vec<f64> = numbers.collect();
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[test]
fn validation_metrics_on_any_rank_count() {
    let class = |i| (0..3).max_by(|&a, &b| number(i, a).total_cmp(&number(i, b))).unwrap();
    let hit = |i| f64::from(u8::from(class(i) == (number(i, 9) * 3.0) as u64));
    let truth = mean((0..VALIDATION).map(hit));
    let mut all = Vec::new();
    // 13 samples in batches of 6: the last batch has one sample, so some ranks have none.
    for (ranks, batch_size) in [(1, 6), (2, 3), (3, 2)] {
        let (events, _) = run(ranks, batch_size, "max_steps = 1\nval_check_interval = 1");
        let found = logged(&events, of_validations).swap_remove(0);
        close(found["val_accuracy"], truth);
        close(found["val_acc"], truth);
        let tables: Vec<&MetricTable> = events.iter().filter_map(of_tables).collect();
        assert_eq!(
            (tables.len(), tables[0].columns()),
            (1, ["a", "b", "c"].map(str::to_owned).as_slice())
        );
        close((0..3).map(|class| tables[0].row(class)[class]).sum(), truth * 13.0);
        close((0..3).flat_map(|class| tables[0].row(class)).sum(), 13.0);
        let Some(Event::Validation { val_loss, .. }) =
            events.iter().find(|event| of_validations(event).is_some())
        else {
            panic!("no validation")
        };
        close(found["val_perplexity"].ln(), *val_loss);
        // Ranks without a sample compute a step, but do not count.
        assert_eq!(found["batches"], [3.0, 5.0, 7.0][ranks - 1]);
        all.push(found);
    }
    for (name, value) in all[0].iter().filter(|(name, _)| *name != "batches") {
        all.iter().for_each(|other| close(other[name], *value));
    }
}

#[test]
fn texts_of_rank_0_histograms_of_all() {
    let expected = Histogram::of_values(
        (0..VALIDATION).flat_map(|i| (0..3).map(move |j| f64::from(number(i, j) as f32))),
    );
    for (ranks, batch_size) in [(1, 6), (2, 3), (3, 2)] {
        let (events, _) = run(ranks, batch_size, "max_steps = 1\nval_check_interval = 1");
        let after = events.iter().skip_while(|event| of_validations(event).is_none()).skip(1);
        let media: Vec<&Event> = after.take(3).collect();
        let [Event::Text { step: 1, name, text }, _, Event::Histogram { step: 1, histogram, .. }] =
            media[..]
        else {
            panic!("{media:?}")
        };
        assert_eq!((name.as_str(), text.as_str()), ("sample", "*of* rank 0"));
        assert_eq!(histogram.count(), VALIDATION * 3);
        assert!(histogram.buckets().eq(expected.buckets()));
        assert_eq!((histogram.min(), histogram.max()), (expected.min(), expected.max()));
        close(histogram.sum(), expected.sum());
    }
}

#[test]
fn step_and_epoch_means_are_logged() {
    let range = |from: u64, to: u64| mean((from..to).map(|i| number(i % TRAINING, 5)));
    // 12 samples in global batches of 6: two steps per epoch.
    for (ranks, batch_size, accumulate) in [(1, 6, 1), (2, 3, 1), (3, 1, 2), (1, 2, 3)] {
        let keys = format!(
            "max_epochs = 2\nlog_every_n_steps = 3\nlimit_val_batches = 0\n\
             accumulate_grad_batches = {accumulate}"
        );
        let (events, _) = run(ranks, batch_size, &keys);
        let steps = logged(&events, of_steps);
        assert_eq!(steps.len(), 4);
        // The first, third and last steps are logged.
        assert!(steps[1].is_empty());
        for (step, first) in [(0, 0), (2, 12), (3, 18)] {
            let names: Vec<&str> = steps[step].keys().map(String::as_str).collect();
            assert_eq!(names, ["both_step", "largest", "mean"]);
            close(steps[step]["mean"], range(first, first + 6));
            close(steps[step]["both_step"], range(first, first + 6));
            let largest = (first..first + 6).map(|i| number(i % TRAINING, 5)).fold(0.0, f64::max);
            assert_eq!(steps[step]["largest"], largest);
        }
        let others = logged(&events, of_others);
        let mean_rank = (ranks - 1) as f64 / 2.0;
        assert_eq!(others.len(), 4, "two epochs, with what they and their hooks log");
        for (epoch, hook) in [(0, 1), (2, 3)] {
            close(others[epoch]["both_epoch"], range(0, 12));
            close(others[epoch]["of_epoch"], range(0, 12));
            assert_eq!(others[epoch].len(), 2);
            close(others[hook]["rank"], mean_rank);
        }
    }
}

#[test]
fn resume_within_epoch_logs_whole_epoch() {
    // Two steps per epoch; the second step ends it.
    let whole = run(2, 3, "max_steps = 2\nlimit_val_batches = 0").0;
    let whole = logged(&whole, of_others);
    for ranks in [2, 3] {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = format!("dir = {:?}", dir.path());
        run_saving(2, 3, "max_steps = 1\nlimit_val_batches = 0", &checkpoint);
        let keys = "max_steps = 2\nlimit_val_batches = 0\nckpt_path = 'last'";
        let resumed = run_saving(ranks, 6 / ranks, keys, &checkpoint).0;
        let resumed = logged(&resumed, of_others);
        for name in ["of_epoch", "both_epoch"] {
            let (found, expected) = (resumed[0][name], whole[0][name]);
            match ranks {
                2 => assert_eq!(found.to_bits(), expected.to_bits(), "{name}"),
                _ => close(found, expected),
            }
        }
    }
}

#[test]
fn unused_metrics_are_not_communicated() {
    // One run logs all ten steps; the other logs only the first and the last.
    let calls = |keys: &str| run(2, 6, &format!("limit_val_batches = 0\n{keys}")).1;
    let all = calls("max_epochs = 10\nlog_every_n_steps = 1");
    let first = calls("max_epochs = 10\nlog_every_n_steps = 50");
    // Sums take one all-reduce, extremes another.
    assert_eq!(all - first, 2 * 8);
}

#[test]
fn example_predicts_the_same_on_any_mesh() {
    let scratch = Scratch::with_tokens();
    let small = scratch.small().set(&[
        "data.validation_fraction=0.2",
        "trainer.max_steps=2",
        "trainer.val_check_interval=1",
        "model.vocab_size=56",
    ]);
    let metrics = |job: &Job| {
        let run = job.succeed();
        let validations = run.events_of("validation");
        assert_eq!(validations.len(), 2);
        let number = |event: &Value, name: &str| event["metrics"][name].as_f64().unwrap();
        validations
            .iter()
            .flat_map(|event| {
                let loss = event["val_loss"].as_f64().unwrap();
                let perplexity = number(event, "val_perplexity");
                assert!((perplexity.ln() - loss).abs() < 1e-6, "{event}");
                [number(event, "val_accuracy"), perplexity]
            })
            .collect::<Vec<_>>()
    };
    let expected = metrics(&small.clone().on("single_device", 1, 6));
    assert!(expected[0] > 0.0, "some are right by chance: {expected:?}");
    let tensor_parallel = "{ type = \"model_parallel\", tensor_parallel_size = 2, \
                           parallelize = { type = \"llama\", loss_parallel = true } }";
    for (strategy, devices, batch_size) in [("ddp", 2, 3), ("fsdp", 3, 2), (tensor_parallel, 2, 6)]
    {
        let found = metrics(&small.clone().on(strategy, devices, batch_size));
        for (found, expected) in found.iter().zip(&expected) {
            let relative = (found - expected).abs() / expected;
            assert!(relative < 1e-6, "{strategy}: {found} instead of {expected}");
        }
    }
}
