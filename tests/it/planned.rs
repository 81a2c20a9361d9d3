//! Plans: that of the README's run, and what a dry run leaves alone.

use std::process::Command;
use std::sync::Mutex;

use fulgurite::core::module::stage;
use fulgurite::core::run_plan::{Hardware, RunPlan};
use fulgurite::core::trainer::SaveRequest;
use fulgurite::prelude::*;
use fulgurite_core::config::ConfigLayers;
use fulgurite_core::run::RunConfig;
use fulgurite_core::trainer::{RunStatus, SavedState};
use serde_json::Value;

use crate::program::program;
use crate::toy::{NoKeys, Numbers};

/// A change of these numbers is a change of what the example sends.
#[test]
fn readme_run_has_its_plan() {
    let output = Command::new(program())
        .args(["plan", "--json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout).expect("one object");
    let number = |key: &str| plan[key].as_u64().unwrap_or_else(|| panic!("no {key} in {plan}"));
    assert_eq!((number("world_size"), number("calls_per_step")), (2, 34));
    assert_eq!(number("traffic_bytes_per_step"), 18_802_742);
    assert!(number("peak_bytes") > 4 * number("parameters"), "weights in f32 and more");
    assert!(plan["step_s"].as_f64().is_some_and(|secs| secs > 0.0));
}

fn hardware() -> Hardware {
    let text = include_str!("../../src/cli/hardware/cpu.toml");
    Hardware::parse(text, "cpu").unwrap()
}

/// The hooks that the dry run of [`Telling`] has called.
static CALLED: Mutex<Vec<&str>> = Mutex::new(Vec::new());

fn called(hook: &'static str) -> Result<()> {
    CALLED.lock().unwrap().push(hook);
    Ok(())
}

/// Tells the world of its run, and asks for checkpoints.
struct Telling(Linear);

impl LightningModule for Telling {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Linear::new(&b.pp("layer"), 1, 1)?))
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        Ok(Loss::new(self.0.forward(x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Telling {
    fn on_train_step_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        ctx.save_checkpoint(SaveRequest::default());
        ctx.save_on_exception(SaveRequest::default())?;
        called("step")
    }
    fn on_exception(&mut self, _: &Error, _: &mut HookContext<Numbers>) -> Result<()> {
        called("exception")
    }
    fn on_fit_end(&mut self, _: &mut HookContext<Numbers>) -> Result<()> {
        called("fit end")
    }
    fn teardown(&mut self, _: &RunStatus, _: &mut HookContext<Numbers>) -> Result<()> {
        called("teardown")
    }
    fn on_save_checkpoint(&mut self, _: &mut SavedState) -> Result<()> {
        called("save")
    }
}

#[test]
fn dry_runs_neither_save_nor_tell() {
    let layers = ConfigLayers::new().set("trainer.max_epochs=1").unwrap();
    let run = RunConfig::<NoKeys, NoKeys>::from_layers(layers).unwrap();
    let plan = RunPlan::of::<Telling>(&run, 1, &|| None, &hardware()).unwrap();
    assert_eq!((plan.world_size, plan.parameters), (1, 1));
    // One rank is run, two steps of it.
    assert_eq!(*CALLED.lock().unwrap(), ["step", "step"]);
}

/// Units of 8, 4, 2 and 1 columns.
struct Narrowing {
    layers: Vec<Unit<Linear>>,
}

impl LightningModule for Narrowing {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let widths = [1, 8, 4, 2, 1];
        let layer =
            |i: usize| b.unit(&format!("layers.{i}"), |b| Linear::new(b, widths[i], widths[i + 1]));
        let layers = (0..4).map(layer).collect::<Result<Vec<_>>>()?;
        b.stages::<Linear>(&[] as &[&str], &layers);
        Ok(Self { layers })
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let y = stage::through(&self.layers, || Ok(x.clone()), |layer, x| layer.forward(x))?;
        Ok(Loss::new(y.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Narrowing {}

/// The second rank tells what its stages give after the first rank was run dry.
#[test]
fn stages_may_give_different_shapes() {
    let strategy = r#"trainer.strategy={type="model_parallel",pipeline_parallel_size=2,pipeline_schedule="interleaved_1f1b"}"#;
    let layers = ["trainer.devices=2", strategy, "trainer.accumulate_grad_batches=2"];
    let layers = layers.iter().try_fold(ConfigLayers::new(), |layers, set| layers.set(set));
    let run = RunConfig::<NoKeys, NoKeys>::from_layers(layers.unwrap()).unwrap();
    let plan = RunPlan::of::<Narrowing>(&run, 2, &|| None, &hardware()).unwrap();
    let sent = |group: &str| {
        let of = plan.collectives.iter().find(|one| one.group == group && one.op == "send");
        of.map(|one| (one.calls, one.bytes)).unwrap()
    };
    // For each of 2 micro-batches of 2 rows, each message has a head of 128 bytes. Forwards go from
    // stage 0 to 1 (8 columns) and from 2 to 3 (2), backwards from 2 to 1 (4).
    assert_eq!(sent("pipeline 0 to 1"), (12, 2 * (3 * 128 + 2 * 4 * (8 + 2 + 4))));
    assert_eq!(sent("pipeline 1 to 0"), (12, 2 * (3 * 128 + 2 * 4 * (8 + 2 + 4))));
    assert_eq!((plan.parameters, plan.micro_batches), (8 + 32 + 8 + 2, 2));
}
