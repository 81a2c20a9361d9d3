//! Results of a run: logs, its directory, and the weights that later evaluations use.

use std::path::Path;

use fulgurite::core::checkpoint::staging_name;
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::module::Module as _;
use fulgurite::core::nn::Linear;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::Event;
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use serde::{Deserialize, Serialize};

use crate::toy::{Events, Numbers};

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    /// Name of a metric that each training step logs; likewise for validation.
    logs: Option<String>,
    validation_logs: Option<String>,
    /// The step in which training fails.
    fails_at: Option<u64>,
    /// The step after which training stops.
    stops_at: Option<u64>,
    /// Item count per sample in a validation.
    counts: Option<f64>,
}

/// Learns to double its input with two layers.
struct Double {
    encoder: Linear,
    head: Linear,
    keys: Keys,
}

impl LightningModule for Double {
    type Config = Keys;
    type Data = Numbers;

    fn configure_model(keys: &Keys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self {
            encoder: Linear::with_bias(&b.pp("model.encoder"), 1, 1)?,
            head: Linear::with_bias(&b.pp("head"), 1, 1)?,
            keys: keys.clone(),
        })
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        if self.keys.fails_at == Some(ctx.step) {
            return Err(Error::other("as was asked for"));
        }
        ctx.log("own", ctx.step as f64);
        if let Some(name) = &self.keys.logs {
            ctx.log(name, 1.0);
        }
        self.loss(x)
    }

    fn validation_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        if let Some(name) = &self.keys.validation_logs {
            ctx.log(name, 1.0);
        }
        let loss = self.loss(x)?;
        let count = self.keys.counts.unwrap_or(1.0) * loss.count();
        Ok(Loss::new(loss.sum().clone(), count))
    }

    fn predict_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Tensor> {
        self.head.forward(&self.encoder.forward(x)?)
    }
}

impl Double {
    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let y = self.head.forward(&self.encoder.forward(x)?)?;
        Ok(Loss::new((y - (x * 2.0)?)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Double {
    fn on_train_step_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        if self.keys.stops_at == Some(ctx.step) {
            ctx.stop();
        }
        Ok(())
    }
}

fn config(dir: &Path, keys: &[&str]) -> RunConfig<Keys, crate::toy::NoKeys> {
    let root = format!("trainer.default_root_dir={:?}", dir.join("runs"));
    let always = [
        "trainer.enable_progress_bar=false",
        "trainer.max_steps=4",
        "optimizer.lr=0.05",
        "scheduler=constant",
        &root,
    ];
    let layers = always.iter().chain(keys);
    let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
    RunConfig::from_layers(layers).unwrap()
}

fn fit(dir: &Path, keys: &[&str]) -> Result<()> {
    Trainer::default().fit::<Double>(&config(dir, keys)).map(drop)
}

fn fit_error(keys: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    fit(dir.path(), keys).unwrap_err().to_string()
}

/// The directories under the root, sorted.
fn directories(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir.join("runs")) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The steps with a value in a column of a run's CSV file.
fn logged(dir: &Path, run: &str, column: &str) -> Vec<u64> {
    let text = std::fs::read_to_string(dir.join("runs").join(run).join("metrics.csv")).unwrap();
    let mut lines = text.lines();
    let heads: Vec<&str> = lines.next().unwrap().split(',').collect();
    let at = heads.iter().position(|head| *head == column).unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        (!cells[at].is_empty()).then(|| cells[0].parse().unwrap())
    };
    lines.filter_map(row).collect()
}

#[test]
fn the_last_step_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let keys = ["trainer.max_steps=25", "trainer.log_every_n_steps=10"];
    fit(dir.path(), &keys).unwrap();
    assert_eq!(logged(dir.path(), "version_0", "train_loss"), [1, 10, 20, 25]);
    assert_eq!(logged(dir.path(), "version_0", "own"), [1, 10, 20, 25]);
    assert_eq!(logged(dir.path(), "version_0", "samples_per_s"), [1, 10, 20, 25]);
    // The run stops unexpectedly after step 13, which is still logged.
    fit(dir.path(), &[&keys[..], &["model.stops_at=13"]].concat()).unwrap();
    assert_eq!(logged(dir.path(), "version_1", "train_loss"), [1, 10, 13]);
    fit(dir.path(), &[&keys[..], &["model.fails_at=14"]].concat()).unwrap_err();
    assert_eq!(logged(dir.path(), "version_2", "train_loss"), [1, 10, 13]);
}

#[test]
fn reserved_names_are_refused() {
    for name in ["epoch", "step", "train_loss", "lr", "grad_norm", "val_loss"] {
        let expected = format!("logging `{name}`: the trainer logs ");
        for key in ["logs", "validation_logs"] {
            let error =
                fit_error(&[&format!("model.{key}={name:?}"), "trainer.log_every_n_steps=3"]);
            assert!(error.starts_with(&expected), "{key}: {error}");
            assert!(error.contains("under this name; choose another"), "{error}");
        }
    }
    assert_says!(fit_error(&["model.logs=\"samples_per_s\""]), "logging `samples_per_s` … logs …");
}

#[test]
fn impossible_validation_counts_fail() {
    let error = fit_error(&["model.counts=nan", "trainer.num_sanity_val_steps=0"]);
    assert!(error.starts_with("the count of the loss on rank 0 is NaN: "), "{error}");
    assert!(error.ends_with("(in val_loss of step 4)"), "{error}");
}

#[test]
fn failed_starts_leave_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let none = [""; 0];
    fit(dir.path(), &["model.fails_at=1"]).unwrap_err();
    assert_eq!(directories(dir.path()), none);
    fit(dir.path(), &["trainer.ckpt_path=nowhere"]).unwrap_err();
    fit(dir.path(), &["trainer.freeze=['nothing']"]).unwrap_err();
    assert_eq!(directories(dir.path()), none);
    fit(dir.path(), &["model.fails_at=2"]).unwrap_err();
    assert_eq!(directories(dir.path()), ["version_0"]);
    fit(dir.path(), &["trainer.fast_dev_run=true"]).unwrap();
    let trained = Trainer::default().fit::<Double>(&config(dir.path(), &[])).unwrap();
    assert_eq!(trained.outcome().run_dir, dir.path().join("runs").join("version_1"));
    drop(trained);
    assert_eq!(directories(dir.path()), ["version_0", "version_1"]);
}

#[test]
fn evaluations_keep_only_logs() {
    let dir = tempfile::tempdir().unwrap();
    let (run, quiet) = (config(dir.path(), &[]), config(dir.path(), &["trainer.loggers=[]"]));
    Trainer::default().predict::<Double>(&run).unwrap();
    Trainer::default().test::<Double>(&quiet).unwrap();
    Trainer::default().validate::<Double>(&quiet).unwrap();
    assert_eq!(directories(dir.path()), [""; 0]);
    Trainer::default().test::<Double>(&run).unwrap();
    Trainer::default().test::<Double>(&run).unwrap();
    Trainer::default().validate::<Double>(&run).unwrap();
    assert_eq!(directories(dir.path()), ["test_0", "test_1", "validate_0"]);
    fit(dir.path(), &[]).unwrap();
    assert_eq!(directories(dir.path())[2..], ["validate_0", "version_0"]);
}

/// Evaluations never use initial weights.
#[test]
fn evaluations_take_trained_weights() {
    let dir = tempfile::tempdir().unwrap();
    let kept = format!("checkpoint.dir={:?}", dir.path().join("kept"));
    let evaluate = |keys: &[&str]| {
        let run = config(dir.path(), &[&["trainer.loggers=[]", &kept], keys].concat());
        let events = Events::default();
        let trainer = Trainer::default().with_sink(Box::new(events.clone()));
        let loss = trainer.test::<Double>(&run).unwrap().loss;
        assert!(trainer.validate::<Double>(&run).is_ok());
        let from = |event: &Event| match event {
            Event::Resume { path, .. } => Some(path.file_name()?.to_str()?.to_owned()),
            _ => None,
        };
        (loss, events.0.lock().unwrap().iter().find_map(from))
    };
    let (initial, from) = evaluate(&[]);
    assert_eq!(from, None);
    // At this rate the loss grows from step to step.
    let training = ["checkpoint.every_n_steps=1", "optimizer={ type = \"sgd\", lr = 2.0 }"];
    let best = ["checkpoint.monitor=\"val_loss\"", "checkpoint.save_top_k=-1"];
    let validated = ["trainer.val_check_interval=1", &kept];
    fit(dir.path(), &[&training[..], &best, &validated].concat()).unwrap();
    let (last, from) = evaluate(&[]);
    assert_eq!(from.as_deref(), Some("step-00000004"));
    assert_eq!(last, evaluate(&["trainer.ckpt_path=last"]).0);
    let (of_best, from) = evaluate(&best);
    assert_eq!(of_best, evaluate(&[&best[..], &["trainer.ckpt_path=best"]].concat()).0);
    assert!(from.is_some_and(|from| from != "step-00000004"));
    assert!(initial != last && of_best != last);
    // Without a directory, the newest run's checkpoint.
    let dir = tempfile::tempdir().unwrap();
    fit(dir.path(), &["checkpoint.save_last=true"]).unwrap();
    let run = config(dir.path(), &["trainer.loggers=[]"]);
    assert_ne!(Trainer::default().test::<Double>(&run).unwrap().loss, initial);
}

#[test]
fn subtree_is_frozen_by_its_path() {
    for (frozen, path) in [("model", "model.encoder"), ("model.encoder", "model.encoder")] {
        let dir = tempfile::tempdir().unwrap();
        let freeze = format!("trainer.freeze=[{frozen:?}]");
        let run = config(dir.path(), &[&freeze]);
        let trained = Trainer::default().fit::<Double>(&run).unwrap();
        let tree = trained.fabric().module_tree().unwrap();
        let names: Vec<&str> = tree.trainable().map(|p| p.fqn()).collect();
        assert_eq!(names, ["head.weight", "head.bias"], "{path}");
    }
    assert_says!(fit_error(&["trainer.freeze=[\"encoders\"]"]), "`trainer.freeze` … `encoders` …");
}

/// 22 stars and a letter that never occurs: backtracking would not terminate.
#[test]
fn many_stars_take_linear_time() {
    let stars = "*e".repeat(22);
    let error = fit_error(&[&format!("trainer.freeze=[\"{stars}z\"]")]);
    assert!(error.starts_with("`trainer.freeze`: no parameter matches"), "{error}");
}

/// The resumed run saves to its own directory.
#[test]
fn killed_runs_leave_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    fit(dir.path(), &["checkpoint.save_last=true"]).unwrap();
    let place = dir.path().join("runs/version_0/checkpoints");
    let unfinished = staging_name("step-00000009");
    std::fs::create_dir_all(place.join(&unfinished)).unwrap();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for lock in [".lock".to_owned(), format!(".{unfinished}.lock")] {
        std::fs::write(place.join(lock), format!("host {host}\npid 1\nstarted 1\njob \nsince 1\n"))
            .unwrap();
    }
    fit(dir.path(), &["trainer.ckpt_path=last", "trainer.max_steps=6"]).unwrap();
    let left = std::fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<String> = left.map(|name| name.into_string().unwrap()).collect();
    assert!(left.contains(&"step-00000004".to_owned()), "{left:?}");
    assert!(!left.iter().any(|name| name.starts_with('.') || *name == unfinished), "{left:?}");
}
