//! Results of training, and their use.

use std::path::Path;

use fulgurite::core::checkpoint::FullOptions;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;

use crate::toy::{Events, NoKeys, Numbers, SAMPLES};

/// Learns to double.
struct Double(Unit<Linear>);

impl LightningModule for Double {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(b.unit("double", |b| Linear::new(b, 1, 1))?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.0.forward(x)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }

    fn test_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        ctx.log("tested", x.mean_all()?.to_scalar::<f32>()?);
        self.training_step(x, ctx)
    }

    fn predict_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Hooks<Numbers> for Double {
    fn on_test_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.log("test_starts", 1.0);
        Ok(())
    }
    fn on_test_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.log("test_ends", ctx.metrics["test_loss"]);
        Ok(())
    }
    fn on_predict_start(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.log("predict_starts", 1.0);
        Ok(())
    }
    fn on_predict_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.log("predict_ends", 1.0);
        Ok(())
    }
}

fn config(logs: &Path, ranks: usize, keys: &str) -> Result<RunConfig<NoKeys, NoKeys>> {
    let text = format!(
        "seed = 3\n[optimizer]\ntype = 'adamw'\nlr = 0.1\n[trainer]\n\
         default_root_dir = {logs:?}\nstrategy = 'fsdp'\ndevices = {ranks}\nloggers = []\n\
         enable_progress_bar = false\nmax_steps = 60\n{keys}"
    );
    RunConfig::from_layers(ConfigLayers::new().text("run.toml", &text)?)
}

#[test]
fn trained_module_evaluates_predicts_and_saves() {
    for ranks in [1, 3] {
        let logs = tempfile::tempdir().unwrap();
        let saved = logs.path().join("weights");
        let predictions = run_ranks(ranks, |world| {
            let events = Events::default();
            let run = config(logs.path(), ranks, "")?;
            let trainer = Trainer::new(world.clone()).with_sink(Box::new(events.clone()));
            let mut trained = trainer.fit::<Double>(&run)?;
            let outcome = trained.outcome().clone();
            assert_eq!(outcome.steps, 60);
            assert!(outcome.last_loss < 0.01 * outcome.first_loss, "{outcome:?}");
            assert_eq!(trained.data().len(Split::Train), SAMPLES);

            // The last validation followed the last whole epoch; validating again gives the same
            // result.
            let validated = trained.validate()?;
            assert_eq!(trained.validate()?, validated);
            let tested = trained.test()?;
            assert!((tested.metrics["tested"] - 1.3).abs() < 1e-6, "{tested:?}");
            assert!(tested.loss > validated.loss, "{tested:?} {validated:?}");

            let one = trained
                .forward(|double| double.0.forward(&Tensor::new(&[[1f32]], &Device::Cpu)?))?;
            assert!((one.to_vec2::<f32>()?[0][0] - 2.0).abs() < 0.3, "{one}");
            trained.module_mut();

            let state = std::collections::BTreeMap::<String, f64>::new();
            trained.fabric().save_full(&saved, None, &state, &FullOptions::default())?;
            let predicted = trained.predict()?;

            // Another trainer computes the same from the checkpoint.
            let keys = format!("ckpt_path = {saved:?}");
            let run = config(logs.path(), ranks, &keys)?;
            let again = Trainer::new(world.clone()).with_sink(Box::new(events.clone()));
            assert_eq!(again.test::<Double>(&run)?, tested);
            let again = Trainer::new(world).predict::<Double>(&run)?;
            for ((samples, output), (same, again)) in predicted.batches.iter().zip(&again.batches) {
                assert_eq!((samples, output.to_vec2::<f32>()?), (same, again.to_vec2::<f32>()?));
            }
            let events = events.0.lock().unwrap();
            let test = events.iter().find_map(|event| match event {
                Event::Test { test_loss, .. } => Some(*test_loss),
                _ => None,
            });
            let ends = events.iter().filter_map(|event| match event {
                Event::Metrics { metrics, .. } => metrics.get("test_ends").copied(),
                _ => None,
            });
            if trained.fabric().is_global_zero() {
                assert_eq!(test, Some(tested.loss));
                assert_eq!(ends.collect::<Vec<_>>(), [tested.loss]);
            }
            Ok(predicted)
        })
        .unwrap();
        let mut all: Vec<(i64, f32)> = Vec::new();
        for predicted in &predictions {
            let Some((samples, outputs)) = predicted.joined().unwrap() else { continue };
            let outputs = outputs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            all.extend(samples.to_vec1::<i64>().unwrap().into_iter().zip(outputs));
        }
        all.sort_by_key(|(sample, _)| *sample);
        let samples: Vec<i64> = all.iter().map(|(sample, _)| *sample).collect();
        assert_eq!(
            samples,
            (0..SAMPLES as i64).collect::<Vec<_>>(),
            "each once, over {ranks} ranks"
        );
        assert!(all.is_sorted_by(|a, b| a.1 < b.1), "as their inputs: {all:?}");
        let file = logs.path().join("predictions.safetensors");
        predictions[0].save(&file).unwrap();
        let read = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        assert_eq!(read["outputs"].dims()[0], read["samples"].dims()[0]);
    }
}

#[test]
fn predictions_are_one_file_on_any_ranks() {
    let logs = tempfile::tempdir().unwrap();
    let file = |ranks: usize| {
        let path = logs.path().join(format!("{ranks}/predictions.safetensors"));
        run_ranks(ranks, |world| {
            let run = config(logs.path(), ranks, "limit_predict_batches = 0.5")?;
            let predictions = Trainer::new(world.clone()).predict::<Double>(&run)?;
            predictions.save_all(&*world, &path)
        })
        .unwrap();
        let tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let samples = tensors["samples"].to_vec1::<i64>().unwrap();
        (samples, tensors["outputs"].to_vec2::<f32>().unwrap())
    };
    for ranks in [1, 2, 3] {
        let (samples, outputs) = file(ranks);
        assert!(samples.is_sorted() && samples.len() == outputs.len() && !samples.is_empty());
        // The weight is the same for all samples, which are 2 + i / 10.
        let weight = outputs[0][0] / (2.0 + samples[0] as f32 / 10.0);
        for (sample, output) in samples.iter().zip(&outputs) {
            let expected = weight * (2.0 + *sample as f32 / 10.0);
            assert!((output[0] - expected).abs() < 1e-5, "{ranks}: {sample}: {output:?}");
        }
    }
}
