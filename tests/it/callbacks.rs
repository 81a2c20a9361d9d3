//! Callbacks by name, and the state that a callback can access.

#![allow(unreachable_pub, reason = "what other modules use reads best with plain `pub`")]

use std::path::Path;

use fulgurite::callbacks::{EarlyStopping, ModelCheckpoint};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::module::ModuleTree;
use fulgurite::core::run::{LoadConfig, RunConfig};
use fulgurite::core::trainer::{Event, RunPurpose, SaveRequest, Stage};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use tempfile::TempDir;

use crate::toy::{Events, NoKeys};

/// Values of `score` in consecutive validations.
const SCORES: [f64; 8] = [5.0, 3.0, 4.0, 2.0, 2.5, 6.0, 7.0, 1.0];

pub struct Net {
    up: Unit<Linear>,
    down: Unit<Linear>,
}

impl LightningModule for Net {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let up = b.unit("net.up", |b| Linear::new(b, 1, 3))?;
        Ok(Self { up, down: b.unit("net.down", |b| Linear::new(b, 3, 1))? })
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.down.forward(&self.up.forward(x)?.tanh()?)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }

    fn configure_callbacks(&self) -> Vec<Box<dyn Callback>> {
        vec![Box::new(Scores)]
    }
}

impl Hooks<Numbers> for Net {}

/// Logs [`SCORES`]: the n-th score in the validation after step n.
struct Scores;

impl Callback for Scores {}

impl Hooks for Scores {
    fn on_validation_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage == Stage::Fit {
            ctx.log("score", SCORES[(ctx.step as usize - 1) % SCORES.len()]);
        }
        Ok(())
    }
}

/// Twelve samples in batches of 2.
pub struct Numbers;

impl DataModule for Numbers {
    type Config = NoKeys;
    type Batch = Tensor;

    fn setup(_: &NoKeys, _: &DataContext) -> Result<Self> {
        Ok(Self)
    }

    fn batch_size(_: &NoKeys) -> usize {
        2
    }

    fn len(&self, _: Split) -> u64 {
        12
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let numbers: Vec<f32> = indices.iter().map(|&i| i as f32 / 10.0).collect();
        Ok(Tensor::from_vec(numbers, (indices.len(), 1), device)?)
    }
}

pub fn all(events: &Events) -> Vec<Event> {
    events.0.lock().unwrap().clone()
}

pub fn config(dir: &Path, keys: &[&str]) -> RunConfig<NoKeys, NoKeys> {
    let root = format!("trainer.default_root_dir={:?}", dir.join("runs"));
    let kept = format!("checkpoint.dir={:?}", dir.join("kept"));
    let always = [
        "trainer.loggers=[]",
        "trainer.val_check_interval=1",
        "checkpoint.save_last=false",
        "optimizer.lr=0.01",
        &root,
        &kept,
    ];
    let layers = always.iter().chain(keys);
    RunConfig::from_layers(layers.fold(ConfigLayers::new(), |l, set| l.set(set).unwrap())).unwrap()
}

/// Trains on one rank in a temporary directory.
pub fn fit(keys: &[&str]) -> (TempDir, Vec<Event>, fulgurite::core::Result<Trained>) {
    let dir = tempfile::tempdir().unwrap();
    let (events, result) = fit_in(dir.path(), keys);
    (dir, events, result)
}

pub type Trained = fulgurite::core::trainer::Trained<Net>;

pub fn fit_in(dir: &Path, keys: &[&str]) -> (Vec<Event>, fulgurite::core::Result<Trained>) {
    let events = Events::default();
    let trainer = Trainer::default().with_sink(Box::new(events.clone()));
    let result = trainer.fit::<Net>(&config(dir, keys));
    (all(&events), result)
}

fn steps(events: &[Event]) -> u64 {
    events.iter().filter(|event| matches!(event, Event::Step { .. })).count() as u64
}

pub fn kept(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir.join("kept")) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

/// The values logged under a name, with their steps.
fn logged(events: &[Event], name: &str) -> Vec<(u64, f64)> {
    let value = |event: &Event| {
        let (step, scalars) = event.scalars()?;
        Some((step, *scalars.get(name)?))
    };
    events.iter().filter_map(value).collect()
}

#[test]
fn early_stopping_without_improvement() {
    let stopping = |options: &str| {
        let callbacks = format!(
            "trainer.callbacks=[{{ type = 'early_stopping', monitor = 'score', {options} }}]"
        );
        let (_dir, events, result) = fit(&["trainer.max_steps=8", &callbacks]);
        let reason = result.unwrap().read_callback(|callback: &EarlyStopping| {
            callback.stopping_reason().unwrap_or("it has not").to_owned()
        });
        (steps(&events), reason.unwrap())
    };
    let (steps, reason) = stopping("patience = 2");
    assert_eq!(steps, 6, "4 was no improvement, 2 was, 2.5 and 6 were none");
    assert_says!(reason, "score has not improved on 2.000000 in 2 validations");
    assert_eq!(stopping("patience = 4").0, 8, "1 is an improvement");
    assert_eq!(stopping("stopping_threshold = 3.0").0, 2);
    assert_eq!(stopping("mode = 'max', patience = 2").0, 3);

    let callbacks = "trainer.callbacks=[{ type = 'early_stopping', monitor = 'scores' }]";
    let (_dir, _, result) = fit(&["trainer.max_steps=8", callbacks]);
    assert_says!(result.unwrap_err(), "`trainer.callbacks`, early_stopping … no metric `scores` …");
}

#[test]
fn patience_survives_a_resume() {
    let callbacks =
        "trainer.callbacks=[{ type = 'early_stopping', monitor = 'score', patience = 2 }]";
    let dir = tempfile::tempdir().unwrap();
    let keys = ["checkpoint.save_last=true", callbacks, "trainer.ckpt_path=last"];
    // The fifth validation is the first without improvement.
    fit_in(dir.path(), &[&keys[..], &["trainer.max_steps=5"]].concat()).1.unwrap();
    let (events, result) = fit_in(dir.path(), &[&keys[..], &["trainer.max_steps=8"]].concat());
    result.unwrap();
    assert_eq!(steps(&events), 1);
}

#[test]
fn best_checkpoints_are_named_and_kept() {
    let callbacks = "trainer.callbacks=[\
        { type = 'model_checkpoint', monitor = 'score', save_top_k = 2, \
          filename = 'best-{step}-{score:.1}' },\
        { type = 'model_checkpoint', every_n_steps = 4, save_weights_only = true, \
          filename = 'weights-{step:03}', auto_insert_metric_name = false }]";
    let (dir, _, result) = fit(&["trainer.max_steps=5", callbacks]);
    let trained = result.unwrap();
    let best = trained.read_callback(|callback: &ModelCheckpoint| {
        (callback.best_model_name().map(str::to_owned), callback.best_model_score())
    });
    assert_eq!(best, Some((Some("best-step=4-score=2.0".to_owned()), Some(2.0))));
    let all = ["best-step=4-score=2.0", "best-step=5-score=2.5", "last", "weights-004"];
    assert_eq!(kept(dir.path()), all);

    // `last` is the newest complete checkpoint. The resumed run knows the kept checkpoints and
    // never removes the one that it resumed from.
    let keys = ["trainer.max_steps=8", callbacks, "trainer.ckpt_path=last"];
    let (events, result) = fit_in(dir.path(), &keys);
    result.unwrap();
    assert!(matches!(&events[0], Event::Resume { step: 5, .. }), "{:?}", events[0]);
    let [best, from, new] =
        ["best-step=4-score=2.0", "best-step=5-score=2.5", "best-step=8-score=1.0"];
    let all = [best, from, new, "last", "weights-008"];
    assert_eq!(kept(dir.path()), all);

    // Weights alone can be validated or start a training run, but cannot resume one.
    let weights = format!("trainer.ckpt_path={:?}", dir.path().join("kept/weights-008"));
    Trainer::default().validate::<Net>(&config(dir.path(), &[&weights])).unwrap();
    let keys = ["trainer.max_steps=9", &weights];
    let (_, result) = fit_in(dir.path(), &keys);
    let error = result.unwrap_err().to_string().replace(dir.path().to_str().unwrap(), "DIR");
    assert_says!(error, "checkpoint DIR/kept/weights-008: it has weights alone … cannot go on …");
    fit_in(dir.path(), &[&keys[..], &["checkpoint.weights_only=true"]].concat()).1.unwrap();
}

#[test]
fn checkpoints_follow_the_monitored_metric() {
    let keys = [
        "trainer.max_steps=6",
        "trainer.val_check_interval=2",
        "checkpoint.monitor=score",
        "checkpoint.save_top_k=1",
    ];
    let (dir, _, result) = fit(&keys);
    let trained = result.unwrap();
    assert_eq!(kept(dir.path()), ["last", "step-00000004", "step-00000006"]);
    let path = |step: &str| Some(dir.path().join("kept").join(step));
    assert_eq!(trained.outcome().best_checkpoint, path("step-00000004"));
    assert_eq!(trained.outcome().last_checkpoint, path("step-00000006"));
    // A validation after training is not part of the training run.
    let mut trained = trained;
    assert!(!trained.validate().unwrap().metrics.contains_key("score"));

    let best = ["trainer.ckpt_path=best", "checkpoint.monitor=score"];
    let events = Events::default();
    let trainer = Trainer::default().with_sink(Box::new(events.clone()));
    trainer.validate::<Net>(&config(dir.path(), &best)).unwrap();
    let resumed = all(&events).into_iter().find_map(|event| match event {
        Event::Resume { path, .. } => Some(path),
        _ => None,
    });
    assert_eq!(resumed, path("step-00000004"));

    // Between validations the score belongs to an earlier step and is ignored.
    let keys = ["checkpoint.every_n_steps=1", "checkpoint.save_top_k=5"];
    let (dir, _, result) = fit(&[
        &["trainer.max_steps=6", "trainer.val_check_interval=3", "checkpoint.monitor=score"],
        &keys[..],
    ]
    .concat());
    assert_eq!(
        result.unwrap().outcome().best_checkpoint,
        Some(dir.path().join("kept/step-00000003"))
    );
    assert_eq!(kept(dir.path()), ["last", "step-00000003", "step-00000006"]);
}

#[test]
fn directory_of_another_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = ["trainer.max_steps=2", "checkpoint.save_last=true"];
    fit_in(dir.path(), &keys).1.unwrap();
    let error = fit_in(dir.path(), &keys).1.unwrap_err().to_string();
    assert_says!(
        error.replace(dir.path().to_str().unwrap(), "DIR"),
        "`checkpoint.dir`: DIR/kept … another … step 2 … `checkpoint.overwrite = true` …"
    );
    assert_eq!(kept(dir.path()), ["last", "step-00000002"]);
    // Also refused before any rank starts.
    let early = |more: &[&str]| {
        let run = config(dir.path(), &[&keys[..], more].concat());
        Trainer::check::<Net>(&run, RunPurpose::Fit, &|| None)
    };
    assert_eq!(early(&[]).unwrap_err().to_string(), error);
    for more in ["checkpoint.overwrite=true", "trainer.ckpt_path=last", "trainer.fast_dev_run=true"]
    {
        early(&[more]).unwrap();
    }
    for more in ["checkpoint.overwrite=true", "trainer.ckpt_path=last"] {
        fit_in(dir.path(), &[&keys[..], &[more]].concat()).1.unwrap();
    }
}

#[test]
fn micro_batches_grow_from_an_epoch_on() {
    // Six batches per epoch.
    let callbacks = "trainer.callbacks=[{ type = 'gradient_accumulation_scheduler', \
                     scheduling = { 1 = 2, 3 = 3 } }]";
    let keys = ["trainer.max_epochs=4", "trainer.limit_val_batches=0", callbacks];
    let (_dir, events, result) = fit(&keys);
    result.unwrap();
    assert_eq!(steps(&events), 6 + 3 + 3 + 2);

    // A run resumed within an epoch keeps the number of micro-batches.
    let dir = tempfile::tempdir().unwrap();
    let go_on = ["trainer.ckpt_path=last", "checkpoint.save_last=true"];
    let first = [&keys[1..], &go_on, &["trainer.max_steps=8"]].concat();
    let second = [&keys[..], &go_on].concat();
    let mut resumed = fit_in(dir.path(), &first).0;
    resumed.extend(fit_in(dir.path(), &second).0);
    assert_eq!(logged(&resumed, "train_loss"), logged(&events, "train_loss"));

    // Without the callback, the configured number applies.
    let dir = tempfile::tempdir().unwrap();
    fit_in(dir.path(), &first).1.unwrap();
    let plain = fit_in(dir.path(), &[&keys[..2], &go_on].concat()).0;
    assert_eq!(steps(&plain), (4 * 6) - (6 + 2 * 2));

    // A schedule knows the number of steps from the start.
    let (_dir, events, result) = fit(&[&keys[..], &["scheduler={ type = 'linear' }"]].concat());
    result.unwrap();
    let rates = logged(&events, "lr");
    let falls = rates.windows(2).map(|pair| pair[0].1 - pair[1].1);
    assert!(falls.clone().all(|fall| (fall - 0.01 / 14.0).abs() < 1e-9), "{rates:?}");

    // Refused if the number of micro-batches is derived from the global batch size.
    let (_dir, _, result) = fit(&[&keys[..], &["trainer.global_batch_size=4"]].concat());
    assert_says!(result.unwrap_err(), "a callback asks for 2 … `trainer.global_batch_size` …");
}

#[test]
fn step_limit_beyond_any_counter() {
    for limit in ["trainer.max_epochs", "trainer.max_steps"] {
        for last_batch in ["wrap", "partial", "drop"] {
            let last_batch = format!("trainer.last_batch={last_batch}");
            let limit = format!("{limit}={}", i64::MAX);
            let keys = [&*limit, &*last_batch, "trainer.max_time=1"];
            fit(&keys).2.unwrap();
        }
    }
}

#[test]
fn model_checkpoints_have_separate_state() {
    let one =
        "{ type = 'model_checkpoint', monitor = 'score', mode = 'max', filename = 'one-{step}' }";
    let two = "{ type = 'model_checkpoint', monitor = 'score', mode = 'max', filename = 'two-{step}', \
               save_top_k = 2 }";
    let dir = tempfile::tempdir().unwrap();
    for (callbacks, steps) in [([one, two], 4), ([two, one], 8)] {
        let callbacks = format!("trainer.callbacks=[{}]", callbacks.join(", "));
        let steps = format!("trainer.max_steps={steps}");
        let keys = [&*callbacks, &*steps, "trainer.ckpt_path=last", "checkpoint.save_last=true"];
        fit_in(dir.path(), &keys).1.unwrap();
    }
    let mut kept = kept(dir.path());
    kept.retain(|name| name.starts_with("one") || name.starts_with("two"));
    assert_eq!(kept, ["one-step=7", "two-step=6", "two-step=7"]);
}

#[test]
fn learning_rate_falls_on_plateau() {
    let callbacks = "trainer.callbacks=[{ type = 'reduce_lr_on_plateau', monitor = 'score', \
                     factor = 0.5, patience = 0 }]";
    let keys = ["checkpoint.save_last=true", "trainer.ckpt_path=last", callbacks];
    let dir = tempfile::tempdir().unwrap();
    let mut lr = Vec::new();
    // Also in a resumed run.
    for max_steps in ["trainer.max_steps=5", "trainer.max_steps=8"] {
        let (events, result) = fit_in(dir.path(), &[&keys[..], &[max_steps]].concat());
        result.unwrap();
        lr.extend(logged(&events, "lr").into_iter().map(|(_, lr)| lr * 100.0));
    }
    // 4 is no better than 3; 2.5, 6 and 7 are no better than 2.
    assert_eq!(lr, [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.125, 0.0625]);
}

#[test]
fn rates_are_logged_with_steps() {
    let callbacks = "trainer.callbacks=['device_stats_monitor', \
                     { type = 'throughput_monitor', peak_tflops = 1.0 }]";
    let keys = ["trainer.max_steps=5", "trainer.log_every_n_steps=2", callbacks];
    let (_dir, events, result) = fit(&keys);
    result.unwrap();
    let at = |name: &str| logged(&events, name).iter().map(|(step, _)| *step).collect::<Vec<_>>();
    for name in ["items_per_sec", "device/mfu", "device/flops_per_sec", "time", "cpu/rss_mib"] {
        assert_eq!(at(name), [1, 2, 4, 5], "{name}");
    }
    assert_eq!(at("cpu/percent"), [2, 4, 5]);
    let values = |name: &str| logged(&events, name).into_iter().map(|(_, value)| value);
    for (flops, items) in values("flops_per_sec").zip(values("items_per_sec")) {
        assert!((flops / (6.0 * 6.0 * items) - 1.0).abs() < 1e-12, "six parameters");
    }
}

/// Inspects everything that a callback can access.
#[derive(Default)]
struct Curious {
    weights_before: f64,
    lr: Vec<f64>,
}

impl Callback for Curious {}

impl Hooks for Curious {
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        let tree = ctx.fabric().module_tree()?;
        assert!(tree.trainable().all(|parameter| parameter.local_grad().is_some()));
        self.lr.push(ctx.optimizer().unwrap().learning_rate()?);
        Ok(())
    }

    fn on_before_zero_grad(&mut self, ctx: &mut HookContext) -> Result<()> {
        let tree = ctx.fabric().module_tree()?;
        assert!(tree.trainable().all(|parameter| parameter.local_grad().is_some()));
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let fabric = ctx.fabric();
        assert!(fabric.module_tree()?.trainable().all(|p| p.local_grad().is_none()));
        // The module on all ranks, in evaluation scope.
        let _no_grad = no_grad();
        let _scope = fabric.forward_scope(false, ctx.step, 0);
        let net = ctx.module::<Net>().unwrap();
        let y = net.up.forward(&Tensor::new(&[[1f32]], &Device::Cpu)?)?;
        let sum = f64::from(y.sum_all()?.to_scalar::<f32>()?);
        assert_ne!(sum, std::mem::replace(&mut self.weights_before, sum), "it has learnt");
        assert!(ctx.module::<Other>().is_none());
        if ctx.step == 2 {
            ctx.save_checkpoint(SaveRequest::default());
        }
        Ok(())
    }
}

struct Other;

impl LightningModule for Other {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, _: &ModuleBuilder) -> Result<Self> {
        Ok(Self)
    }

    fn training_step(&mut self, _: &Tensor, _: &mut StepContext) -> Result<Loss> {
        Err(Error::other("never"))
    }
}

impl Hooks<Numbers> for Other {}

#[test]
fn callback_sees_module_and_gradients() {
    let dir = tempfile::tempdir().unwrap();
    let callbacks = "trainer.callbacks=[{ type = 'gradient_norms', depth = 2 }]";
    let norms = |ranks: usize, strategy: &str, place: &str| {
        let keys = [
            "trainer.max_steps=3",
            "trainer.log_every_n_steps=1",
            callbacks,
            &format!("trainer.devices={ranks}"),
            &format!("trainer.strategy={strategy}"),
        ];
        let events = Events::default();
        let run = config(&dir.path().join(place), &keys);
        run_ranks(ranks, |world| {
            let trainer = Trainer::new(world)
                .with_callback(Box::new(Curious::default()))
                .with_sink(Box::new(events.clone()));
            let trained = trainer.fit::<Net>(&run)?;
            let lr = trained.read_callback(|curious: &Curious| curious.lr.clone());
            assert_eq!(lr, trainer.read_callback(|curious: &Curious| curious.lr.clone()));
            assert_eq!(lr, Some(vec![0.01; 3]));
            Ok(())
        })
        .unwrap();
        assert_eq!(kept(&dir.path().join(place)), ["last", "step-00000002"]);
        let events = all(&events);
        let [up, down, all] = ["grad_norm/net.up", "grad_norm/net.down", "grad_norm"].map(|name| {
            logged(&events, name).into_iter().map(|(_, norm)| norm).collect::<Vec<_>>()
        });
        assert_eq!(up.len(), 3);
        for ((up, down), all) in up.iter().zip(&down).zip(&all) {
            assert!((up.hypot(*down) / all - 1.0).abs() < 1e-12, "{up} {down} {all}");
        }
        up
    };
    let alone = norms(1, "single_device", "one");
    for (ranks, strategy) in [(2, "ddp"), (3, "fsdp")] {
        // Another number of ranks changes the global batches.
        assert_ne!(norms(ranks, strategy, strategy), alone);
    }
}

#[test]
fn module_from_values_and_from_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = config(dir.path(), &["trainer.max_steps=3", "checkpoint.save_last=true"]);
    let whole = Trainer::default().fit::<Net>(&run).unwrap();
    let overwrite = ["trainer.max_steps=3", "checkpoint.overwrite=true"];
    let build = |b: &ModuleBuilder| Net::configure_model(&NoKeys {}, b);
    let run = config(dir.path(), &overwrite);
    let made = Trainer::default().fit_with(&run, build, Numbers).unwrap();
    assert_eq!(made.outcome().last_loss, whole.outcome().last_loss);

    let outputs = |net: &Net| {
        let x = Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?;
        Ok(net.down.forward(&net.up.forward(&x)?.tanh()?)?.flatten_all()?.to_vec1::<f32>()?)
    };
    let kept = dir.path().join("kept/step-00000003");
    let loaded = Net::load_from_checkpoint(&kept).unwrap();
    assert_eq!(loaded.forward(outputs).unwrap(), whole.forward(outputs).unwrap());

    // Load part of the checkpoint, as a run does.
    let part = LoadConfig { exclude: vec!["net.up".to_owned()], ..LoadConfig::default() };
    let part = Net::load_from_checkpoint_with(&kept, &part).unwrap();
    let values = |tree: &ModuleTree, i: usize| {
        let value = tree.parameters()[i].value().unwrap();
        value.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let [part, loaded] = [&part, &loaded].map(|net| net.fabric().module_tree().unwrap());
    assert_ne!(values(part, 0), values(loaded, 0));
    assert_eq!(values(part, 1), values(loaded, 1));
    let wrong = LoadConfig { exclude: vec!["net.".to_owned()], ..LoadConfig::default() };
    let error = Net::load_from_checkpoint_with(&kept, &wrong).unwrap_err().to_string();
    assert_says!(error, "`checkpoint.load.exclude` … `net.` has an empty segment …");

    let error = Other::load_from_checkpoint(&kept).unwrap_err().to_string();
    let error = error.replace(dir.path().to_str().unwrap(), "DIR");
    assert_says!(error, "module ``: the model declared no parameters … ModuleBuilder …");
    let weights = kept.join("model");
    let error = Net::load_from_checkpoint(&weights).unwrap_err().to_string();
    assert_says!(
        error.replace(dir.path().to_str().unwrap(), "DIR"),
        "checkpoint DIR/kept/step-00000003/model … no manifest.json … `step-00000010` …"
    );
}

#[test]
fn trainer_is_reusable() {
    let dir = tempfile::tempdir().unwrap();
    let events = Events::default();
    let trainer = Trainer::default()
        .with_callback(Box::new(Curious::default()))
        .with_sink(Box::new(events.clone()));
    let run = |name: &str| config(&dir.path().join(name), &["trainer.max_steps=2"]);
    trainer.fit::<Net>(&run("a")).unwrap();
    trainer.fit::<Net>(&run("b")).unwrap();
    trainer.validate::<Net>(&run("c")).unwrap();
    assert_eq!(trainer.read_callback(|curious: &Curious| curious.lr.len()), Some(4));
    let summaries = all(&events).iter().filter(|e| matches!(e, Event::Summary { .. })).count();
    assert_eq!(summaries, 3);
}
