//! Late reads (`trainer.late_reads`): loss and norm stay on the device; training is identical, bit
//! by bit.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::execution::read;
use fulgurite::core::fabric::StepNumbers;
use fulgurite::core::nn::SwiGluMlp;
use fulgurite::core::run::{ClipAlgorithm, RunConfig};
use fulgurite::core::trainer::{Event, SaveRequest};
use fulgurite::prelude::*;
use fulgurite_transports::run_ranks;
use serde::{Deserialize, Serialize};

use crate::toy::{Events, NoKeys, Rows, WIDTH};

const ON: &str = "trainer.late_reads=true";
const OFF: &str = "trainer.late_reads=false";

/// A fault in one step, on the last two ranks, because tensor-parallel ranks share one loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Fault {
    #[default]
    Loss,
    /// The loss is finite, its gradient is not.
    Gradient,
    /// The item count of the loss is NaN.
    Count,
    /// The item count is zero on all ranks.
    Ignored,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DeepConfig {
    fault: Fault,
    fails_at: Option<u64>,
    /// The compute dtype of layers.
    dtype: Option<Half>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Half {
    Bf16,
    F16,
}

/// Layers that each learn their own input.
struct Deep {
    layers: Vec<Unit<SwiGluMlp>>,
    config: DeepConfig,
}

impl LightningModule for Deep {
    type Config = DeepConfig;
    type Data = Rows;

    fn configure_model(config: &DeepConfig, b: &ModuleBuilder) -> Result<Self> {
        let layer = |i| b.unit(&format!("layers.{i}"), |b| SwiGluMlp::new(b, WIDTH, 12));
        Ok(Self { layers: (0..2).map(layer).collect::<Result<_>>()?, config: config.clone() })
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        let loss = self.validation_step(x, ctx)?;
        if self.config.fails_at == Some(ctx.step) && self.config.fault == Fault::Ignored {
            return loss.ignored();
        }
        if self.config.fails_at != Some(ctx.step) || ctx.rank + 2 < ctx.world_size {
            return Ok(loss);
        }
        let nothing = (loss.sum() - loss.sum().detach())?;
        let sum = match self.config.fault {
            Fault::Loss => (loss.sum() * f64::NAN)?,
            // The square root has no derivative at 0.
            Fault::Gradient => (loss.sum() + nothing.sqr()?.sqrt()?)?,
            Fault::Count => return Ok(Loss::new(loss.sum().clone(), f64::NAN)),
            Fault::Ignored => return Ok(loss),
        };
        Ok(Loss::new(sum, loss.count()))
    }

    fn validation_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(x)
    }
}

impl Deep {
    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let dtype = match self.config.dtype {
            None => DType::F32,
            Some(Half::Bf16) => DType::BF16,
            Some(Half::F16) => DType::F16,
        };
        let mut y = x.to_dtype(dtype)?;
        for layer in &self.layers {
            y = (layer.forward(&y)? + y)?;
        }
        Ok(Loss::new((y.to_dtype(DType::F32)? - x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Rows> for Deep {}

/// State of a rank: its shards, optimizer state, averages and scalars.
#[derive(Debug, Clone, PartialEq)]
struct State {
    tensors: BTreeMap<String, Vec<f64>>,
    scalars: BTreeMap<String, f64>,
}

fn state(ctx: &mut HookContext) -> Result<State> {
    let values =
        |tensor: &Tensor| -> Result<Vec<f64>> { Ok(tensor.to_dtype(DType::F64)?.to_vec1()?) };
    let mut tensors = BTreeMap::new();
    for parameter in ctx.fabric().module_tree()?.parameters() {
        tensors.insert(parameter.fqn().to_owned(), values(&parameter.local()?.values)?);
    }
    let optimizer = ctx.optimizer_mut().expect("there is one");
    for state in optimizer.state_tensors()? {
        tensors.insert(format!("{} {}", state.fqn, state.name), values(&state.values)?);
    }
    Ok(State { tensors, scalars: optimizer.scalars() })
}

/// The states of a rank after each step, and the state at which an error ended the run.
#[derive(Debug, Clone, Default, PartialEq)]
struct Seen {
    steps: Vec<State>,
    failed: Option<(u64, State)>,
}

#[derive(Clone)]
struct Watch {
    seen: Arc<Mutex<Vec<Seen>>>,
    hooks: WatchHooks,
    /// The norm that the callback read before the update.
    norm: f64,
    losses: Arc<Mutex<Vec<f64>>>,
}

/// The hooks that [`Watch`] uses.
#[derive(Clone, Copy, Default)]
struct WatchHooks {
    /// Looks at the loss of each step, and at the step that the loss is of.
    looks: bool,
    asks_to_save: bool,
    /// Clips to this norm before the update.
    max_norm: Option<f64>,
}

impl Callback for Watch {}

impl Hooks for Watch {
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.hooks.asks_to_save {
            ctx.save_on_exception(SaveRequest::default())?;
        }
        Ok(())
    }

    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        if self.hooks.looks {
            let optimizer = ctx.optimizer().expect("there is one");
            self.norm = optimizer.gradient_norm()?;
        }
        if let Some(max_norm) = self.hooks.max_norm {
            let fabric = ctx.fabric();
            fabric.clip_gradients_norm(ctx.optimizer_mut().expect("there is one"), max_norm)?;
        }
        Ok(())
    }

    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let state = state(ctx)?;
        self.seen.lock().unwrap()[ctx.rank].steps.push(state);
        if self.hooks.looks {
            assert_eq!(ctx.metric_step("train_loss"), Some(ctx.step));
            let (loss, norm) = (ctx.metrics["train_loss"], ctx.metrics["grad_norm"]);
            assert_eq!(norm, self.norm);
            if ctx.rank == 0 {
                self.losses.lock().unwrap().push(loss);
            }
        }
        Ok(())
    }

    fn on_exception(&mut self, _: &Error, ctx: &mut HookContext) -> Result<()> {
        let state = state(ctx)?;
        self.seen.lock().unwrap()[ctx.rank].failed = Some((ctx.step, state));
        Ok(())
    }
}

/// A training run: its events in order, the states of each rank, and rank 0's reads (immediate,
/// late).
struct Run {
    result: Result<()>,
    events: Vec<Event>,
    seen: Vec<Seen>,
    reads: [u64; 2],
    losses: Vec<f64>,
}

impl Run {
    /// Loss, norm and rate of each step, and losses of validations, with their steps.
    fn curve(&self) -> Vec<(u64, [f64; 3])> {
        let of = |event: &Event| match event {
            Event::Step { step, train_loss, grad_norm, lr, .. } => {
                Some((*step, [*train_loss, *grad_norm, *lr]))
            }
            Event::Validation { step, val_loss, .. } => Some((*step, [*val_loss, 0.0, 0.0])),
            _ => None,
        };
        self.events.iter().filter_map(of).collect()
    }
}

fn train_in(dir: &Path, ranks: usize, keys: &[&str], hooks: WatchHooks) -> Run {
    let (root, kept) = (dir.join("runs"), dir.join("kept"));
    let (root, kept) =
        (format!("trainer.default_root_dir={root:?}"), format!("checkpoint.dir={kept:?}"));
    let always = [
        "trainer.loggers=[]",
        "trainer.enable_progress_bar=false",
        "trainer.max_steps=8",
        "trainer.num_sanity_val_steps=0",
        "optimizer.lr=0.01",
        &root,
        &kept,
    ];
    let layers = always.iter().chain(keys);
    let layers = layers.fold(ConfigLayers::new(), |layers, set| layers.set(set).unwrap());
    let run = RunConfig::from_layers(layers).unwrap();
    let events = Events::default();
    let watch = Watch {
        seen: Arc::new(Mutex::new(vec![Seen::default(); ranks])),
        hooks,
        norm: 0.0,
        losses: Arc::default(),
    };
    let reads = Mutex::new([0; 2]);
    let result = run_ranks(ranks, |world| {
        let rank = world.rank();
        let trainer = Trainer::new(world).with_sink(Box::new(events.clone()));
        let result = trainer.with_callback(Box::new(watch.clone())).fit::<Deep>(&run);
        if rank == 0 {
            let of = |counts: BTreeMap<&str, u64>| {
                counts.get("loss and gradient norm").copied().unwrap_or(0)
            };
            *reads.lock().unwrap() = [of(read::counts()), of(read::later_counts())];
        }
        result.map(drop)
    });
    let (events, seen) = (events.0.lock().unwrap().clone(), watch.seen.lock().unwrap().clone());
    let losses = watch.losses.lock().unwrap().clone();
    Run { result: result.map(drop), events, seen, reads: reads.into_inner().unwrap(), losses }
}

fn train(ranks: usize, keys: &[&str]) -> Run {
    train_in(tempfile::tempdir().unwrap().path(), ranks, keys, WatchHooks::default())
}

const TP: &str = "trainer.strategy={ type = \"model_parallel\", data_parallel_shard_size = \"rest\", tensor_parallel_size = 2, \
                  parallelize = { type = \"plan\", plan = { \"layers.*.gate_proj\" = \"colwise\", \
                  \"layers.*.up_proj\" = \"colwise\", \"layers.*.down_proj\" = \"rowwise\" } } }";
const STRATEGIES: [(usize, &str); 8] = [
    (1, "trainer.strategy=\"single_device\""),
    (2, "trainer.strategy=\"ddp\""),
    (3, "trainer.strategy=\"fsdp\""),
    (4, "trainer.strategy={ type = \"hsdp\", data_parallel_shard_size = 2 }"),
    (2, TP),
    (4, TP),
    (2, "trainer.strategy={ type = \"fsdp\", cpu_offload = true }"),
    (2, "trainer.strategy={ type = \"fsdp\", accumulation_sync = \"reduce_scatter\" }"),
];
const SGD: &str = "optimizer={ type = \"sgd\", lr = 0.1, momentum = 0.9, state_dtype = \"bf16\" }";
const MUON: &str =
    "optimizer={ type = \"muon\", lr = 0.02, adamw = { lr = 0.003 }, state_dtype = \"bf16\" }";
const ADAFACTOR: &str = "optimizer={ type = \"adafactor\", lr = 0.02 }";
const OPTIONS: [&[&str]; 8] = [
    &[],
    &["trainer.gradient_clip_val=0.05"],
    &[
        "trainer.gradient_clip_val=0.002",
        "trainer.gradient_clip_algorithm=\"value\"",
        "trainer.ema_decay=0.9",
    ],
    &["trainer.accumulate_grad_batches=3", "trainer.ema_decay=0.5", "trainer.val_check_interval=2"],
    &["optimizer.state_dtype=\"bf16\"", "trainer.precision=\"bf16-true\"", "model.dtype=\"bf16\""],
    &[SGD, "trainer.gradient_clip_val=0.05"],
    &[MUON, "trainer.gradient_clip_val=0.05"],
    &[ADAFACTOR, "trainer.ema_decay=0.9"],
];

#[test]
fn late_reads_train_identically() {
    for (ranks, strategy) in STRATEGIES {
        for options in OPTIONS {
            let keys = [&[strategy, "trainer.log_every_n_steps=3"], options].concat();
            let at_once = train(ranks, &[&keys[..], &[OFF]].concat());
            let late = train(ranks, &[&keys[..], &[ON]].concat());
            late.result.as_ref().unwrap_or_else(|error| panic!("{keys:?}: {error}"));
            assert!(at_once.curve().len() >= 8);
            assert_eq!(late.curve(), at_once.curve(), "{keys:?}");
            assert!(late.seen == at_once.seen, "{keys:?}: other weights or state");
            // Of eight steps, the first, third, sixth and last are logged.
            assert_eq!((at_once.reads, late.reads), ([8, 0], [4, 4]), "{keys:?}");
        }
    }
}

#[test]
fn non_finite_step_is_an_error() {
    for (ranks, strategy) in STRATEGIES {
        // The error is found: at the end of the next step; by the next, logged step; at a
        // validation; at a checkpoint, which is not saved; at the end of the run; in a logged step.
        for (fails_at, options) in [
            (4, &["trainer.ema_decay=0.5", "trainer.gradient_clip_val=0.05"][..]),
            (5, &["trainer.log_every_n_steps=3", SGD]),
            (4, &["trainer.val_check_interval=4", "trainer.accumulate_grad_batches=2"]),
            (4, &["checkpoint.every_n_steps=4", "optimizer.state_dtype=\"bf16\""]),
            (8, &["trainer.ema_decay=0.5"]),
            (6, &["trainer.log_every_n_steps=3"]),
        ] {
            for fault in ["loss", "gradient"] {
                let (at, fault) =
                    (format!("model.fails_at={fails_at}"), format!("model.fault={fault:?}"));
                let keys = [&[strategy, &*at, &*fault, "checkpoint.save_last=true"], options];
                let keys = keys.concat();
                let dir = tempfile::tempdir().unwrap();
                let late = train_in(
                    dir.path(),
                    ranks,
                    &[&keys[..], &[ON]].concat(),
                    WatchHooks::default(),
                );
                let at_once = train(ranks, &[&keys[..], &[OFF]].concat());
                let (error, expected) =
                    (late.result.as_ref().unwrap_err(), at_once.result.as_ref().unwrap_err());
                assert_eq!(error.to_string(), expected.to_string(), "{keys:?}");
                assert!(
                    matches!(error, Error::NonFinite { step, .. } if *step == fails_at),
                    "{keys:?}: {error}"
                );
                assert_eq!(late.curve(), at_once.curve(), "{keys:?}");
                for (late, at_once) in late.seen.iter().zip(&at_once.seen) {
                    assert!(late.failed.is_some(), "{keys:?}");
                    assert!(late.failed == at_once.failed, "{keys:?}: another state is left");
                }
                let checkpoints = std::fs::read_dir(dir.path().join("kept"));
                let saved = checkpoints.into_iter().flatten().flatten();
                let saved: Vec<_> = saved.map(|entry| entry.file_name()).collect();
                assert!(saved.is_empty(), "{keys:?}: {saved:?}");
            }
        }
    }
}

#[test]
fn impossible_counts_are_found_at_once() {
    for (ranks, strategy) in STRATEGIES {
        for fails_at in [1, 4, 8] {
            let at = format!("model.fails_at={fails_at}");
            let keys = [strategy, &at, "model.fault=\"count\"", "trainer.ema_decay=0.5"];
            let late = train(ranks, &[&keys[..], &[ON]].concat());
            let at_once = train(ranks, &[&keys[..], &[OFF]].concat());
            let (error, expected) =
                (late.result.as_ref().unwrap_err(), at_once.result.as_ref().unwrap_err());
            // Ranks that share samples have the same count; the error may name any of them.
            let any_rank = |error: &fulgurite::core::Error| {
                error
                    .to_string()
                    .replace("on rank 1", "on rank 0")
                    .replace("on rank 3", "on rank 2")
            };
            assert_eq!(any_rank(error), any_rank(expected), "{keys:?}");
            let told = "is NaN: a `Loss` is a sum and the number of its items";
            assert!(error.to_string().contains(told), "{keys:?}: {error}");
            assert!(
                error.to_string().contains(&format!("in step {fails_at}")),
                "{keys:?}: {error}"
            );
            // Earlier steps are reported, and their state remains.
            assert_eq!(late.curve(), at_once.curve(), "{keys:?}");
            assert_eq!(late.curve().last().map_or(0, |last| last.0), fails_at - 1, "{keys:?}");
            for (late, at_once) in late.seen.iter().zip(&at_once.seen) {
                assert!(late.failed.is_some(), "{keys:?}");
                assert!(late.failed == at_once.failed, "{keys:?}: another state is left");
            }
        }
    }
}

#[test]
fn steps_without_items_are_skipped() {
    for (ranks, strategy) in STRATEGIES {
        for ignored in [1, 4, 8] {
            let at = format!("model.fails_at={ignored}");
            let keys = [strategy, &at, "model.fault=\"ignored\"", "trainer.ema_decay=0.5", SGD];
            let late = train(ranks, &[&keys[..], &[ON]].concat());
            let at_once = train(ranks, &[&keys[..], &[OFF]].concat());
            late.result.as_ref().unwrap_or_else(|error| panic!("{keys:?}: {error}"));
            assert_eq!(format!("{:?}", late.curve()), format!("{:?}", at_once.curve()), "{keys:?}");
            assert!(late.seen == at_once.seen, "{keys:?}: other weights or state");
            for event in &late.events {
                if let Event::Step { step, train_loss, .. } = event {
                    assert_eq!(train_loss.is_nan(), *step == ignored, "{keys:?}: step {step}");
                }
            }
            if ignored > 1 {
                let [before, after] =
                    [ignored - 2, ignored - 1].map(|i| &late.seen[0].steps[i as usize]);
                assert_eq!(before.tensors, after.tensors, "{keys:?}");
            }
            let skipped = |event: &Event| match event {
                Event::Step { metrics, .. } => metrics.get("skipped_steps").copied(),
                Event::Summary { skipped_steps, .. } => Some(*skipped_steps as f64),
                _ => None,
            };
            let skipped: Vec<f64> = late.events.iter().filter_map(skipped).collect();
            assert_eq!(skipped, vec![1.0; 10 - ignored as usize], "{keys:?}");
        }
    }
}

#[test]
fn runs_without_items_fail() {
    let keys = ["trainer.strategy=\"ddp\"", "model.fails_at=1", "model.fault=\"ignored\""];
    let run = train(2, &[&keys[..], &["trainer.max_steps=1"]].concat());
    assert_eq!(
        run.result.unwrap_err().to_string(),
        "data: nothing has counted in any of 1 step, so that no parameter was changed: every target is \
         ignored (`ignore_index`), or `Loss::new` is given a count of 0"
    );
}

#[test]
fn run_resumes_from_a_checkpoint() {
    for (ranks, strategy) in [(1, "trainer.strategy=\"single_device\""), (2, TP)] {
        let keys = [strategy, ON, "trainer.log_every_n_steps=100", "trainer.ema_decay=0.5"];
        let whole = train(ranks, &keys);
        let dir = tempfile::tempdir().unwrap();
        let saving = ["trainer.max_steps=4", "checkpoint.every_n_steps=4"];
        let first =
            train_in(dir.path(), ranks, &[&keys[..], &saving].concat(), WatchHooks::default());
        let resuming = [&keys[..], &["trainer.ckpt_path=\"last\""]].concat();
        let second = train_in(dir.path(), ranks, &resuming, WatchHooks::default());
        assert_eq!([first.curve(), second.curve()].concat(), whole.curve());
        for (rank, whole) in whole.seen.iter().enumerate() {
            let both = [&first.seen[rank].steps[..], &second.seen[rank].steps].concat();
            assert!(both == whole.steps, "{strategy}: other weights or state");
        }
        // The first step of a run is logged, but not the first step after a resume. The last step
        // always is.
        assert_eq!((first.reads, second.reads), ([2, 2], [1, 3]));
    }
}

#[test]
fn hook_gets_the_loss_of_its_step() {
    let keys = ["trainer.strategy=\"ddp\"", ON, "trainer.log_every_n_steps=4"];
    let run = train_in(
        tempfile::tempdir().unwrap().path(),
        2,
        &keys,
        WatchHooks { looks: true, ..Default::default() },
    );
    run.result.as_ref().unwrap();
    let of_step = |event: &Event| match event {
        Event::Step { train_loss, .. } => Some(*train_loss),
        _ => None,
    };
    let losses: Vec<f64> = run.events.iter().filter_map(of_step).collect();
    assert_eq!((losses.len(), &run.losses), (8, &losses));
    // Three steps are logged; the values of the other five are read late, once each.
    assert_eq!(run.reads, [8, 5]);
}

#[test]
fn a_hook_clips_a_late_step_too() {
    for options in [OPTIONS[0], OPTIONS[1], OPTIONS[2]] {
        let keys =
            [&["trainer.strategy=\"fsdp\"", "trainer.log_every_n_steps=3"], options].concat();
        let hooks = WatchHooks { max_norm: Some(1e-4), ..Default::default() };
        let clipped = |late| {
            let dir = tempfile::tempdir().unwrap();
            train_in(dir.path(), 2, &[&keys[..], &[late]].concat(), hooks)
        };
        let (at_once, late) = (clipped(OFF), clipped(ON));
        late.result.as_ref().unwrap();
        assert_eq!((at_once.reads[1], late.reads[1]), (0, 4), "{options:?}: steps that are late");
        assert_eq!(late.curve(), at_once.curve(), "{options:?}");
        assert!(late.seen == at_once.seen, "{options:?}: other weights or state");
        assert!(at_once.seen != train(2, &[&keys[..], &[OFF]].concat()).seen, "the hook clips");
    }
}

#[test]
fn immediate_reads_where_required() {
    let one = "trainer.strategy=\"single_device\"";
    for keys in [
        &["trainer.strategy={ type = \"diloco\", sync_every = 2 }"][..],
        &[one, "trainer.precision=\"16-mixed\"", "model.dtype=\"f16\""],
        &[one, "trainer.detect_anomaly=true"],
        &[one, "trainer.late_reads=\"auto\""],
        &[one, "trainer.log_every_n_steps=1"],
    ] {
        let run = train(1, &[&[ON], keys].concat());
        run.result.unwrap_or_else(|error| panic!("{keys:?}: {error}"));
        assert_eq!(run.reads[1], 0, "{keys:?}");
    }
    // The state before an error is still saved as a checkpoint.
    let dir = tempfile::tempdir().unwrap();
    let keys = [one, ON, "trainer.log_every_n_steps=100", "model.fails_at=5"];
    let run =
        train_in(dir.path(), 1, &keys, WatchHooks { asks_to_save: true, ..Default::default() });
    assert!(matches!(run.result, Err(Error::NonFinite { step: 5, .. })));
    assert_eq!(run.reads[1], 0);
    assert!(dir.path().join("kept/step-00000004").exists());
}

/// A custom loop on two ranks, with late or immediate reads. Returns losses and norms of 8 steps,
/// or of those before an error; then the weights, and how often rank 0 waited for its device.
fn own_loop(late: bool, strategy: &str, config: &DeepConfig) -> (Vec<(f64, f64)>, State, u64) {
    let clip = Some((0.5, ClipAlgorithm::Norm));
    let layers = ConfigLayers::new().set(&format!("trainer.strategy={strategy}")).unwrap();
    let run = RunConfig::<DeepConfig, NoKeys>::from_layers(layers).unwrap();
    let ranks = run_ranks(2, |world| {
        let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
        let adamw = AdamW { lr: 0.01, ..AdamW::default() };
        let (deep, mut optimizer) = fabric.setup(|b| Deep::configure_model(config, b), &adamw)?;
        let waits = || read::counts().values().sum::<u64>();
        let (mut numbers, mut last, before) = (Vec::new(), None, waits());
        for (step, batch) in fabric.setup_data::<Rows>(&run.data)?.take(8).enumerate() {
            let loss = batch?.forward(|x| deep.loss(x))?;
            let factor = if config.fails_at == Some(step as u64) { f64::NAN } else { 1.0 };
            fabric.backward(&Loss::new((loss.sum() * factor)?, loss.count()))?;
            let read: Result<_> = match late {
                true => match last.replace(optimizer.clip_and_step(clip)?) {
                    Some(last) => optimizer.read(last).map(Some),
                    None => Ok(None),
                },
                false => (|| {
                    let loss = fabric.step_totals(&[])?.mean();
                    let grad_norm = fabric.clip_gradients_norm(&mut optimizer, 0.5)?;
                    optimizer.step()?;
                    Ok(Some(StepNumbers { loss, grad_norm }))
                })(),
            };
            match read {
                Ok(read) => numbers.extend(read),
                Err(Error::NonFinite { .. }) if config.fails_at.is_some() => break,
                Err(error) => return Err(error),
            }
        }
        let waits = waits() - before;
        if config.fails_at.is_none() {
            numbers.extend(last.map(|last| optimizer.read(last)).transpose()?);
        }
        let values = |parameter: &Parameter| -> Result<(String, Vec<f64>)> {
            let values = parameter.local()?.values.to_dtype(DType::F64)?.to_vec1()?;
            Ok((parameter.fqn().to_owned(), values))
        };
        let tensors =
            fabric.module_tree()?.parameters().iter().map(values).collect::<Result<_>>()?;
        let numbers: Vec<_> = numbers.iter().map(|step| (step.loss, step.grad_norm)).collect();
        Ok((numbers, State { tensors, scalars: optimizer.scalars() }, waits))
    });
    ranks.unwrap().swap_remove(0)
}

#[test]
fn custom_loop_with_late_reads() {
    for strategy in ["ddp", "fsdp"] {
        let config = DeepConfig::default();
        let (late, ordinary) =
            (own_loop(true, strategy, &config), own_loop(false, strategy, &config));
        assert_eq!((late.0.len(), late.2), (8, 0), "{strategy}: it waits for nothing");
        assert_eq!((&late.0, &late.1), (&ordinary.0, &ordinary.1), "{strategy}");
        assert!(ordinary.2 >= 8, "{strategy}: {}", ordinary.2);

        let config = DeepConfig { fails_at: Some(4), ..config };
        let (late, ordinary) =
            (own_loop(true, strategy, &config), own_loop(false, strategy, &config));
        assert_eq!((late.0, late.1), (ordinary.0, ordinary.1), "{strategy}: as before step 5");
    }
}

#[test]
fn impossible_clip_limit_is_refused() {
    let layers = ConfigLayers::new().set("trainer.strategy=single_device").unwrap();
    let run = RunConfig::<DeepConfig, NoKeys>::from_layers(layers).unwrap();
    let errors = run_ranks(1, |world| {
        let mut fabric = Fabric::with_world(world, &run.trainer, run.seed, None)?;
        let config = DeepConfig::default();
        let (deep, mut optimizer) =
            fabric.setup(|b| Deep::configure_model(&config, b), &AdamW::default())?;
        let x = Tensor::ones((4, WIDTH), DType::F32, &Device::Cpu)?;
        fabric.backward(&deep.loss(&x)?)?;
        let mut error =
            |limit, by| optimizer.clip_and_step(Some((limit, by))).unwrap_err().to_string();
        Ok([error(-1.0, ClipAlgorithm::Norm), error(f64::NAN, ClipAlgorithm::Value)])
    });
    let [of_norm, of_value] = errors.unwrap().swap_remove(0);
    assert_eq!(of_norm, "max_norm = -1: clipping needs a number greater than 0");
    assert_eq!(of_value, "clip_value = NaN: clipping needs a number greater than 0");
}

#[test]
fn f16_late_loop_reads_at_once() {
    let config = DeepConfig { dtype: Some(Half::F16), ..DeepConfig::default() };
    let strategy = r#"{ type = "fsdp", mixed_precision = { param_dtype = "f16" } }"#;
    let (late, ordinary) = (own_loop(true, strategy, &config), own_loop(false, strategy, &config));
    assert_eq!((&late.0, &late.1), (&ordinary.0, &ordinary.1));
    assert!(late.2 >= 8);
}
