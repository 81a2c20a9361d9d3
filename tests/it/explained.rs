//! Messages to the user of a run from code: error locations, the model, and progress of
//! evaluations.

use std::sync::{Arc, Mutex};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{EvaluationProgress, Event, EventSink, RunStart, RunStatus};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use serde::{Deserialize, Serialize};

use crate::toy::{NoKeys, Numbers};

/// A layer that fits the input, and one that does not.
struct Misfit {
    fits: Unit<Linear>,
    misfit: Unit<Linear>,
    config: MisfitConfig,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct MisfitConfig {
    /// The place that uses the misfit layer.
    wrong_in: String,
}

impl Misfit {
    fn loss(&self, x: &Tensor, place: &str) -> Result<Loss> {
        let y = self.fits.forward(x)?;
        let y = match self.config.wrong_in == place {
            true => (self.misfit.forward(&y)? + 1.0)?,
            false => y,
        };
        Ok(Loss::new(y.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl LightningModule for Misfit {
    type Config = MisfitConfig;
    type Data = Numbers;

    fn configure_model(config: &MisfitConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            fits: b.unit("layers.0", |b| Linear::new(&b.pp("fits"), 1, 2))?,
            misfit: b.unit("layers.1", |b| Linear::new(&b.pp("misfit"), 3, 2))?,
            config: config.clone(),
        })
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(x, "training")
    }

    fn validation_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(x, "validation")
    }
}

impl Hooks<Numbers> for Misfit {}

/// Events that a progress display receives.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<String>>>);

impl Shown {
    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }
}

impl EventSink for Shown {
    fn begin(&mut self, run: &RunStart) {
        self.note(format!("{} {:?}\n{}", run.items, run.max_steps, run.model));
    }
    fn evaluating(
        &mut self,
        EvaluationProgress { what, done, batches, .. }: EvaluationProgress<'_>,
    ) {
        self.note(format!("{what} {done}/{batches}"));
    }
    fn event(&mut self, event: &Event) -> Result<()> {
        if let Event::Step { step, .. } = event {
            self.note(format!("step {step}"));
        }
        Ok(())
    }
    fn finish(&mut self, status: RunStatus) -> Result<()> {
        self.note(format!("{status:?}"));
        Ok(())
    }
}

fn fit(wrong_in: &str) -> (Result<()>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let layers = ConfigLayers::new()
        .set(&format!("trainer.default_root_dir={:?}", dir.path()))
        .and_then(|layers| layers.set(&format!("model.wrong_in={wrong_in:?}")))
        .and_then(|layers| layers.set("trainer.loggers=[]"))
        .and_then(|layers| layers.set("trainer.enable_progress_bar=false"))
        .and_then(|layers| layers.set("trainer.unused_parameters=ignore"))
        .and_then(|layers| layers.set("trainer.num_sanity_val_steps=0"))
        .and_then(|layers| layers.set("trainer.limit_val_batches=2"))
        .and_then(|layers| layers.set("trainer.max_steps=2"))
        .and_then(|layers| layers.set("trainer.val_check_interval=2"));
    let run = RunConfig::<MisfitConfig, NoKeys>::from_layers(layers.unwrap()).unwrap();
    let shown = Shown::default();
    let trainer = Trainer::default().with_sink(Box::new(shown.clone()));
    let result = trainer.fit::<Misfit>(&run).map(drop);
    let shown = shown.0.lock().unwrap().clone();
    (result, shown)
}

#[test]
fn shape_error_names_module_and_step() {
    assert_says!(fit("training").0.unwrap_err(), "module `layers.1.misfit` … got [2, 2] … step 1)");
    assert_says!(fit("validation").0.unwrap_err(), "module `layers.1.misfit` … [2, 2] … batch 0)");
}

#[test]
fn sinks_see_model_and_evaluation_batches() {
    let (result, shown) = fit("");
    result.unwrap();
    insta::assert_snapshot!(shown.join("\n"), @r#"
    samples Some(2)
    module    parameters
    layers.0           2
    layers.1           6
    all                8, 8 trained, in 2 units
    step 1
    step 2
    validation 0/2
    validation 1/2
    validation 2/2
    Success
    "#);
}
