//! Trainings of a small decoder under any mesh, and their comparison.

#![allow(unreachable_pub, reason = "what other modules use reads best with plain `pub`")]

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::data::TokenBatch;
use fulgurite::core::parallel::ContextParallel;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{Event, LogOptions, Reduce};
use fulgurite::prelude::*;
use fulgurite_models::{Decoder, ModelConfig};
use fulgurite_test_support::training::gather_weights;
use fulgurite_transports::run_ranks;

use crate::toy::Events;

const VOCABULARY: u64 = 24;
pub const LENGTH: u64 = 8;

/// Sequences of ids.
pub struct Texts(TextsConfig);

impl DataModule for Texts {
    type Config = TextsConfig;
    type Batch = TokenBatch;

    fn setup(config: &TextsConfig, _: &DataContext) -> Result<Self> {
        Ok(Self(config.clone()))
    }

    fn batch_size(config: &TextsConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 48 } else { 10 }
    }

    fn shard_sequence(batch: TokenBatch, context: &ContextParallel) -> Result<TokenBatch> {
        batch.shard_sequence(context)
    }

    fn batch(&self, split: Split, indices: &[u64], device: &Device) -> Result<TokenBatch> {
        let length = match self.0.lengths_vary && indices.first().is_some_and(|row| row % 2 == 1) {
            true => LENGTH / 2,
            false => LENGTH,
        };
        let id = |row: u64, place: u64| ((row * 7 + place * (row % 3 + 1)) % VOCABULARY) as u32;
        let ids = |shift: u64| -> Result<Tensor> {
            let all = indices.iter().flat_map(|&row| (0..length).map(move |i| id(row, i + shift)));
            let all: Vec<u32> = all.collect();
            Ok(Tensor::from_vec(all, (indices.len(), length as usize), device)?)
        };
        let (mut inputs, mut targets) = (ids(0)?, ids(1)?.to_dtype(DType::I64)?);
        if split == Split::Train && indices.iter().any(|row| row % 2 == 1) {
            match self.0.wrong {
                Some(Wrong::Input) => inputs = (inputs * 100.0)?,
                Some(Wrong::Target) => targets = (targets * 100.0)?,
                None => {}
            }
        }
        Ok(TokenBatch { inputs, targets, documents: None })
    }
}

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TextsConfig {
    batch_size: usize,
    /// The mistake in samples of the training.
    wrong: Option<Wrong>,
    /// Whether half of the micro-batches have half of the length.
    lengths_vary: bool,
}

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wrong {
    Input,
    Target,
}

/// A decoder that logs from its steps.
pub struct Lm(Decoder);

impl LightningModule for Lm {
    type Config = ModelConfig;
    type Data = Texts;

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Decoder::new(&config.clone().decoder()?, b)?))
    }

    fn training_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        ctx.log_with("begun", 1.0, LogOptions::default().reduce(Reduce::Sum));
        ctx.log_with(
            "begun_in_epoch",
            1.0,
            LogOptions::default().reduce(Reduce::Sum).on_step(false).on_epoch(true),
        );
        let loss = self.0.loss(&batch.inputs, &batch.targets)?;
        ctx.log("logged", loss.mean()?);
        ctx.log("no_number", f64::NAN);
        Ok(loss)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, likely) = self.0.evaluate(&batch.inputs, &batch.targets)?;
        ctx.log("likely", likely.to_dtype(DType::F32)?.mean_all()?);
        Ok(loss)
    }

    fn predict_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Tensor> {
        Ok(self.0.evaluate(&batch.inputs, &batch.targets)?.1)
    }
}

impl<D> Hooks<D> for Lm {}

/// The results of a training.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Run {
    pub losses: Vec<f64>,
    norms: Vec<f64>,
    metrics: BTreeMap<String, f64>,
    weights: BTreeMap<String, Vec<f32>>,
    buffers: BTreeMap<String, Vec<f32>>,
}

/// A decoder with six units.
pub const MODEL: &str = "model_type = 'llama'\nvocab_size = 24\nhidden_size = 16\n\
    intermediate_size = 24\nnum_hidden_layers = 6\nnum_attention_heads = 2\n\
    num_key_value_heads = 2\nmax_position_embeddings = 16\nattention_dropout = 0.1\n";

pub fn config(
    logs: &Path,
    ranks: usize,
    keys: &Keys<'_>,
) -> Result<RunConfig<ModelConfig, TextsConfig>> {
    let Keys { strategy, model, data, trainer, optimizer } = keys;
    // In f16 the first steps look for the scale of the loss.
    let steps = if trainer.contains("'16-") { 24 } else { 3 };
    let text = format!(
        "seed = 3\n[optimizer]\ntype = '{optimizer}'\nlr = 0.01\n[model]\n{model}\n[data]\n{data}\n\
         [trainer]\ndefault_root_dir = {logs:?}\nstrategy = {strategy}\ndevices = {ranks}\n\
         loggers = []\nenable_progress_bar = false\nmax_steps = {steps}\nlog_every_n_steps = 1\n\
         gradient_clip_val = 0.5\n{trainer}"
    );
    RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)
}

/// Parts of a configuration in TOML.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    pub strategy: &'a str,
    pub model: &'a str,
    pub data: &'a str,
    pub trainer: &'a str,
    pub optimizer: &'a str,
}

pub fn train(ranks: usize, keys: Keys<'_>) -> Result<Run> {
    let logs = tempfile::tempdir().unwrap();
    let mut runs = run_ranks(ranks, |world| {
        let events = Events::default();
        let run = config(logs.path(), ranks, &keys)?;
        let trainer = Trainer::new(world.clone()).with_sink(Box::new(events.clone()));
        let trained = trainer.fit::<Lm>(&run)?;
        let tree = trained.fabric().module_tree()?;
        let buffers = tree.persistent_buffers().map(|buffer| {
            let values = buffer.value()?.to_dtype(DType::F32)?.flatten_all()?;
            Ok((buffer.fqn().to_owned(), values.to_vec1()?))
        });
        let mut result = Run {
            buffers: buffers.collect::<Result<_>>()?,
            weights: gather_weights(tree, &*world)?,
            metrics: trained.outcome().metrics.clone(),
            ..Run::default()
        };
        result.metrics.retain(|name, _| {
            ["logged", "likely", "val_loss", "begun", "begun_in_epoch"].contains(&name.as_str())
        });
        for event in events.0.lock().unwrap().iter() {
            if let Event::Step { train_loss, grad_norm, .. } = event {
                result.losses.push(*train_loss);
                result.norms.push(*grad_norm);
            }
        }
        Ok(result)
    })?;
    let first = runs.swap_remove(0);
    for other in runs {
        assert_eq!(other.weights, first.weights);
        assert_eq!(other.buffers, first.buffers);
        assert_eq!(other.metrics, first.metrics);
    }
    Ok(first)
}

pub fn pipelined(ranks: usize, options: &str, keys: Keys<'_>) -> Result<Run> {
    let strategy = format!("{{ type = 'model_parallel', {options} }}");
    train(ranks, Keys { strategy: &strategy, ..keys })
}

pub fn keys<'a>(data: &'a str, trainer: &'a str) -> Keys<'a> {
    Keys { strategy: "'single_device'", model: MODEL, data, trainer, optimizer: "adamw" }
}

/// Lists in a random order that is possible, of stages that ranks have at random.
pub fn random_lists(random: &mut fastrand::Rng, ranks: usize, micro_batches: usize) -> String {
    let stages = ranks + random.usize(0..=4 - ranks);
    let mut rank_of: Vec<usize> = (0..stages).map(|stage| stage % ranks).collect();
    random.shuffle(&mut rank_of);
    let mut lists = vec![Vec::new(); ranks];
    let (mut forwards, mut inputs) = (vec![0; stages], vec![0; stages]);
    let mut weights = vec![0; stages];
    while weights.iter().any(|done| *done < micro_batches) {
        let stage = random.usize(0..stages);
        let list = &mut lists[rank_of[stage]];
        let input_is_there = stage == 0 || forwards[stage] < forwards[stage - 1];
        let grad_is_there = match stage + 1 == stages {
            true => inputs[stage] < forwards[stage],
            false => inputs[stage] < inputs[stage + 1].min(forwards[stage]),
        };
        match random.u8(0..4) {
            0 | 1 if forwards[stage] < micro_batches && input_is_there => {
                list.push(format!("{stage}F{}", forwards[stage]));
                forwards[stage] += 1;
            }
            2 if grad_is_there && weights[stage] == inputs[stage] && random.bool() => {
                list.push(format!("{stage}B{}", inputs[stage]));
                (inputs[stage], weights[stage]) = (inputs[stage] + 1, weights[stage] + 1);
            }
            2 if grad_is_there => {
                list.push(format!("{stage}I{}", inputs[stage]));
                inputs[stage] += 1;
            }
            3 if weights[stage] < inputs[stage] => {
                list.push(format!("{stage}W{}", weights[stage]));
                weights[stage] += 1;
            }
            _ => {}
        }
    }
    lists.iter().map(|list| list.join(",") + "\n").collect()
}

impl Run {
    /// Whether the last step was taken: in f16 steps that overflow are skipped.
    pub fn has_trained(&self) -> bool {
        self.norms.last().is_some_and(|norm| norm.is_finite())
    }
}

/// Compares bits. The norm is summed in another order, and compared to 1e-12.
pub fn assert_same(what: &str, run: &Run, expected: &Run) {
    assert_eq!(run.losses, expected.losses, "{what}");
    assert_eq!(run.weights, expected.weights, "{what}");
    assert_eq!(run.buffers, expected.buffers, "{what}");
    assert_eq!(run.metrics, expected.metrics, "{what}");
    assert_eq!(run.norms.len(), expected.norms.len(), "{what}");
    for (a, b) in run.norms.iter().zip(&expected.norms) {
        let both_overflowed = !a.is_finite() && !b.is_finite();
        assert!(both_overflowed || (a - b).abs() <= 1e-12 * b, "{what}: {a} {b}");
    }
}

pub fn assert_close(what: &str, run: &Run, expected: &Run) {
    assert_within(2e-5, what, run, expected);
}

pub fn assert_within(tolerance: f64, what: &str, run: &Run, expected: &Run) {
    let close = |a: f64, b: f64| {
        let both_overflowed = !a.is_finite() && !b.is_finite();
        both_overflowed || (a - b).abs() <= tolerance * b.abs().max(1e-3)
    };
    assert_eq!(run.losses.len(), expected.losses.len(), "{what}");
    for (a, b) in
        run.losses.iter().zip(&expected.losses).chain(run.norms.iter().zip(&expected.norms))
    {
        assert!(
            close(*a, *b),
            "{what}: {:?} {:?} {:?} {:?}",
            run.losses,
            expected.losses,
            run.norms,
            expected.norms
        );
    }
    // Counts of batches differ with the ranks that have batches of their own.
    let of_batch = |name: &&String| !name.starts_with("begun");
    for name in expected.metrics.keys().filter(of_batch) {
        let value = &expected.metrics[name];
        assert!(close(run.metrics[name], *value), "{what}: {name}: {} {value}", run.metrics[name]);
    }
    for (name, weights) in &expected.weights {
        for (a, b) in run.weights[name].iter().zip(weights) {
            assert!(f64::from((a - b).abs()) <= tolerance, "{what}: {name}: {a} {b}");
        }
    }
}
