//! Pipelines: stages of the model on ranks of their own, against one device.

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::data::TokenBatch;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_models::{Decoder, ModelConfig};
use fulgurite_test_support::training::gather_weights;
use fulgurite_transports::run_ranks;

use crate::toy::{Events, NoKeys};

const VOCABULARY: u64 = 24;
const LENGTH: u64 = 6;

/// Sequences of ids.
struct Texts;

impl DataModule for Texts {
    type Config = TextsConfig;
    type Batch = TokenBatch;

    fn setup(_: &TextsConfig, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(config: &TextsConfig) -> usize {
        config.batch_size
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 48 } else { 10 }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<TokenBatch> {
        let id = |row: u64, place: u64| ((row * 7 + place * (row % 3 + 1)) % VOCABULARY) as u32;
        let ids = |shift: u64| -> Result<Tensor> {
            let all = indices.iter().flat_map(|&row| (0..LENGTH).map(move |i| id(row, i + shift)));
            let all: Vec<u32> = all.collect();
            Ok(Tensor::from_vec(all, (indices.len(), LENGTH as usize), device)?)
        };
        Ok(TokenBatch { inputs: ids(0)?, targets: ids(1)?.to_dtype(DType::I64)?, documents: None })
    }
}

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TextsConfig {
    batch_size: usize,
}

/// A decoder that logs from its steps.
struct Lm(Decoder);

impl LightningModule for Lm {
    type Config = ModelConfig;
    type Data = Texts;

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Decoder::new(&config.clone().decoder()?, b)?))
    }

    fn training_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let loss = self.0.loss(&batch.inputs, &batch.targets)?;
        ctx.log("logged", &loss.sum_tensor()?);
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

/// What a training gave.
#[derive(Debug, Clone, PartialEq, Default)]
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    metrics: BTreeMap<String, f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

const MODEL: &str = "model_type = 'llama'\nvocab_size = 24\nhidden_size = 16\n\
    intermediate_size = 24\nnum_hidden_layers = 4\nnum_attention_heads = 2\n\
    num_key_value_heads = 2\nmax_position_embeddings = 16\nattention_dropout = 0.1\n";

fn config(
    logs: &Path,
    ranks: usize,
    keys: &Keys<'_>,
) -> Result<RunConfig<ModelConfig, TextsConfig>> {
    let Keys { strategy, model, data, trainer } = keys;
    let text = format!(
        "seed = 3\n[optimizer]\ntype = 'adamw'\nlr = 0.01\n[model]\n{MODEL}{model}\n[data]\n{data}\n\
         [trainer]\ndefault_root_dir = {logs:?}\nstrategy = {strategy}\ndevices = {ranks}\n\
         loggers = []\nenable_progress_bar = false\nmax_steps = 3\nlog_every_n_steps = 1\n\
         gradient_clip_val = 0.5\n{trainer}"
    );
    RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)
}

#[derive(Clone, Copy)]
struct Keys<'a> {
    strategy: &'a str,
    model: &'a str,
    data: &'a str,
    trainer: &'a str,
}

fn train(ranks: usize, keys: Keys<'_>) -> Result<Run> {
    let logs = tempfile::tempdir().unwrap();
    let mut runs = run_ranks(ranks, |world| {
        let events = Events::default();
        let run = config(logs.path(), ranks, &keys)?;
        let trainer = Trainer::new(world.clone()).with_sink(Box::new(events.clone()));
        let trained = trainer.fit::<Lm>(&run)?;
        let mut result = Run {
            weights: gather_weights(trained.fabric().module_tree()?, &*world)?,
            metrics: trained.outcome().metrics.clone(),
            ..Run::default()
        };
        result.metrics.retain(|name, _| ["logged", "likely", "val_loss"].contains(&name.as_str()));
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
        assert_eq!(other.metrics, first.metrics);
    }
    Ok(first)
}

fn pipelined(ranks: usize, options: &str, keys: Keys<'_>) -> Result<Run> {
    let strategy = format!("{{ type = 'model_parallel', {options} }}");
    train(ranks, Keys { strategy: &strategy, ..keys })
}

fn keys<'a>(data: &'a str, trainer: &'a str) -> Keys<'a> {
    Keys { strategy: "'single_device'", model: "", data, trainer }
}

#[test]
fn every_schedule_equals_one_device() {
    for micro_batches in [4, 8] {
        let accumulate = format!("accumulate_grad_batches = {micro_batches}");
        let keys = keys("batch_size = 2", &accumulate);
        let expected = train(1, keys).unwrap();
        assert_eq!(expected.losses.len(), 3);
        for (ranks, schedule) in [
            (2, "gpipe"),
            (2, "1f1b"),
            (3, "1f1b"),
            (4, "1f1b"),
            (2, "interleaved_1f1b"),
            (2, "zb_h1"),
            (2, "zb_v"),
            (2, "dual_pipe_v"),
        ] {
            let options =
                format!("pipeline_parallel_size = {ranks}, pipeline_schedule = '{schedule}'");
            let run = pipelined(ranks, &options, keys).unwrap();
            assert_eq!(run.losses, expected.losses, "{options}");
            assert_eq!(run.weights, expected.weights, "{options}");
            assert_eq!(run.metrics, expected.metrics, "{options}");
            for (a, b) in run.norms.iter().zip(&expected.norms) {
                assert!((a - b).abs() <= 1e-12 * b, "{options}: {a} {b}");
            }
        }
    }
}
