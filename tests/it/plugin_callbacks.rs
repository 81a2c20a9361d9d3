//! Callbacks that save on failure, print the model, and search for a learning rate.

use std::path::Path;
use std::sync::Mutex;

use fulgurite::callbacks::{LearningRateFinder, LearningRateFinderConfig};
use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{CallbackConfig as _, Event};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use crate::toy::{Events, NoKeys, Numbers};

/// One line in a unit, and one outside units.
struct Net {
    up: Unit<Linear>,
    down: Linear,
}

impl LightningModule for Net {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let up = b.unit("up", |b| Linear::with_bias(b, 1, 64))?;
        Ok(Self { up, down: Linear::new(&b.pp("down"), 64, 1)? })
    }

    fn training_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        let error = (self.down.forward(&self.up.forward(x)?.tanh()?)? - (x + 3.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Net {}

fn config(dir: &Path, keys: &[&str]) -> RunConfig<NoKeys, NoKeys> {
    let root = format!("trainer.default_root_dir={:?}", dir.join("runs"));
    let kept = format!("checkpoint.dir={:?}", dir.join("kept"));
    let always = ["trainer.loggers=[]", "optimizer.lr=0.01", &root, &kept];
    let layers = always.iter().chain(keys);
    RunConfig::from_layers(layers.fold(ConfigLayers::new(), |l, set| l.set(set).unwrap())).unwrap()
}

/// Fails before or after the update of its step.
struct Fails {
    at: u64,
    after_update: bool,
}

impl Callback for Fails {}

impl Hooks for Fails {
    fn on_after_backward(&mut self, ctx: &mut HookContext) -> Result<()> {
        let fails = ctx.step + 1 == self.at && !self.after_update;
        if fails { Err(Error::other("out of luck")) } else { Ok(()) }
    }

    fn on_before_zero_grad(&mut self, ctx: &mut HookContext) -> Result<()> {
        let fails = ctx.step + 1 == self.at && self.after_update;
        if fails { Err(Error::other("out of luck")) } else { Ok(()) }
    }
}

const SAVES: &str = "trainer.callbacks=['on_exception_checkpoint']";
const ENDS: [&str; 2] = ["trainer.max_steps=7", "checkpoint.save_last=false"];

#[test]
fn failing_run_saves_its_last_whole_step() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Trainer::default().fit::<Net>(&config(dir.path(), &ENDS)).unwrap();
    for (at, after_update) in [(5, false), (5, true), (1, false)] {
        let dir = tempfile::tempdir().unwrap();
        let run = config(dir.path(), &[&ENDS[..], &[SAVES]].concat());
        let trainer = Trainer::default().with_callback(Box::new(Fails { at, after_update }));
        let error = trainer.fit::<Net>(&run).err().unwrap().to_string();
        assert_eq!(error, "out of luck");
        let saved = dir.path().join("kept/on_exception");
        // Not saved within an update, nor before the first step.
        assert_eq!(saved.is_dir(), at == 5 && !after_update);
        if saved.is_dir() {
            let from = format!("trainer.ckpt_path={saved:?}");
            let run = config(dir.path(), &[&ENDS[..], &[&from]].concat());
            let rest = Trainer::default().fit::<Net>(&run).unwrap();
            assert_eq!(rest.outcome().last_loss, whole.outcome().last_loss);
            assert_eq!(rest.outcome().steps, 7);
        }
    }
    // Several ranks cannot save together after a failure.
    let dir = tempfile::tempdir().unwrap();
    let on_two = ["trainer.devices=2", "trainer.strategy=ddp"];
    let run = config(dir.path(), &[&ENDS[..], &[SAVES], &on_two].concat());
    let error = run_ranks(2, |world| Trainer::new(world).fit::<Net>(&run).map(drop)).unwrap_err();
    assert_says!(error, "a checkpoint on an error … one rank … has 2 … `checkpoint.every_n_steps`");
}

/// Output of all runs in this test program.
static PRINTED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn print(text: &str) {
    PRINTED.lock().unwrap().push(text.to_owned());
}

#[test]
fn summary_lists_the_shards_of_a_rank() {
    let dir = tempfile::tempdir().unwrap();
    let printed = |strategy: &str, ranks: usize| {
        let of_run = [
            "trainer.callbacks=['model_summary']",
            &format!("trainer.devices={ranks}"),
            &format!("trainer.strategy={strategy}"),
            "trainer.freeze=['down.weight']",
            "trainer.max_steps=1",
        ];
        let run = config(dir.path(), &[&of_run[..], &["checkpoint.save_last=false"]].concat());
        PRINTED.lock().unwrap().clear();
        run_ranks(ranks, |world| Trainer::new(world).with_print(print).fit::<Net>(&run).map(drop))
            .unwrap();
        let printed = std::mem::take(&mut *PRINTED.lock().unwrap());
        assert_eq!(printed.len(), 1, "{printed:?}");
        printed.concat()
    };
    insta::assert_snapshot!(printed("single_device", 1), @r#"
    unit                  parameters       trainable            bytes
    up                           128             128              512
    outside of units              64               0              256
    all                          192             128              768
    "#);
    insta::assert_snapshot!(printed("fsdp", 2), @r#"
    unit                  parameters       trainable  bytes on rank 0
    up                           128             128              256
    outside of units              64               0              256
    all                          192             128              512
    whole on rank 0, as the strategy's conditions leave them uncut or one part has everything (1): down.weight
    "#);
    insta::assert_snapshot!(printed("ddp", 2), @r#"
    unit                  parameters       trainable  bytes on rank 0
    up                           128             128              512
    outside of units              64               0              256
    all                          192             128              768
    every rank holds all of it: the strategy cuts nothing
    "#);
}

#[test]
fn found_learning_rate_trains() {
    let dir = tempfile::tempdir().unwrap();
    for ranks in [1, 2] {
        let devices = format!("trainer.devices={ranks}");
        let keys = [
            "trainer.callbacks=[{ type = 'learning_rate_finder', num_training_steps = 60 }]",
            "trainer.max_steps=200",
            "trainer.log_every_n_steps=50",
            "checkpoint.save_last=false",
            "trainer.limit_val_batches=0",
            &devices,
            if ranks > 1 { "trainer.strategy=fsdp" } else { "trainer.strategy=ddp" },
        ];
        let run = config(dir.path(), &keys);
        let found = run_ranks(ranks, |world| {
            let trained = Trainer::new(world).with_print(|_| ()).fit::<Net>(&run)?;
            let finder = trained.read_callback(LearningRateFinder::clone).unwrap();
            let steps = trained.outcome().steps;
            assert_eq!(finder.curve().len() as u64, steps);
            assert!(steps <= 60);
            Ok(finder.suggestion())
        });
        let found = found.unwrap();
        let lr = found[0].unwrap();
        assert!(found.iter().all(|other| *other == Some(lr)), "{found:?}");
        assert!((1e-4..1.0).contains(&lr), "{lr}");
    }
    let kept = std::fs::read_dir(dir.path().join("kept"));
    assert!(kept.is_err() || kept.unwrap().next().is_none());
}

#[test]
fn resume_after_rate_search_keeps_own_rate() {
    let dir = tempfile::tempdir().unwrap();
    let keys = [
        "trainer.max_steps=25",
        "trainer.min_steps=25",
        "trainer.log_every_n_steps=1",
        "checkpoint.save_last=false",
    ];
    let finder = LearningRateFinderConfig { num_training_steps: 20, ..Default::default() };
    let events = Events::default();
    let trainer = Trainer::default()
        .with_sink(Box::new(events.clone()))
        .with_callback(finder.build().unwrap())
        .with_print(|_| ());
    for _ in 0..2 {
        trainer.fit::<Net>(&config(dir.path(), &keys)).unwrap();
        let events = std::mem::take(&mut *events.0.lock().unwrap());
        let rates: Vec<f64> = events
            .iter()
            .filter_map(|event| match event {
                Event::Step { lr, .. } => Some(*lr),
                _ => None,
            })
            .collect();
        let of_curve = trainer.read_callback(|c: &LearningRateFinder| c.curve().len()).unwrap();
        assert!((12..=20).contains(&of_curve), "{rates:?}");
        assert!((rates[0] / 1e-8 - 1.0).abs() < 1e-12);
        assert!(rates[of_curve - 1] > 1e-6);
        assert_eq!(rates[of_curve..], vec![0.01; 25 - of_curve]);
    }
}

#[test]
fn rate_search_survives_non_finite_losses() {
    static PRINTED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let dir = tempfile::tempdir().unwrap();
    let finder = LearningRateFinderConfig {
        max_lr: 1e30,
        early_stop_threshold: 0.0,
        ..LearningRateFinderConfig::default()
    };
    let trainer = Trainer::default()
        .with_callback(finder.build().unwrap())
        .with_print(|text| PRINTED.lock().unwrap().push(text.to_owned()));
    let error = trainer.fit::<Net>(&config(dir.path(), &["trainer.max_steps=200"])).unwrap_err();
    assert!(matches!(error, Error::NonFinite { .. }), "{error}");
    let found = trainer.read_callback(LearningRateFinder::suggestion).unwrap().unwrap();
    assert!((1e-4..1.0).contains(&found), "{found}");
    let suggested = format!("suggested learning rate: {found:.3e}");
    assert!(PRINTED.lock().unwrap().iter().any(|text| text.contains(&suggested)));
}
