//! Ranks that were started differently end before the first step and report the differences.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite::core::trainer::{OptimizerSetup, Optimizers};
use fulgurite::prelude::*;
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

use crate::program::{Job, Run, Running, Scratch};
use crate::toy::{NoKeys, Numbers};

const KEY: &str = "a key of sixteen characters or more";

/// Two processes as a launcher such as torchrun starts them, each with its own assignments.
fn as_torchrun(scratch: &Scratch, of_ranks: [&[&str]; 2]) -> [Run; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let keys = ["trainer.strategy=ddp", "trainer.devices=2"];
        scratch
            .small()
            .set(&keys)
            .set(of_ranks[rank])
            .env("RANK", rank)
            .env("LOCAL_RANK", rank)
            .env("WORLD_SIZE", 2)
            .env("LOCAL_WORLD_SIZE", 2)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port)
            .env("FULGURITE_JOB_KEY", KEY)
            .start()
    };
    [0, 1].map(start).map(Running::wait)
}

/// Asserts that no rank trained, and that each one reports it.
#[track_caller]
fn assert_refused(runs: &[Run], says: &str) {
    for run in runs {
        assert!(run.stderr.contains(says), "{says:?} is missing:\n{}", run.stderr);
        assert!(matches!(run.code(), Some(1 | 79)), "{:?}", run.status);
        assert!(run.events_of("step").is_empty(), "{}", run.stdout);
    }
}

#[test]
fn differing_keys_are_named_on_every_rank() {
    let scratch = Scratch::with_tokens();
    let cases: [(&str, [&[&str]; 2]); 7] = [
        ("`optimizer.lr` is 0.003 on rank 0 and 0.5 on rank 1", [&[], &["optimizer.lr=0.5"]]),
        (
            "`optimizer.type` is \"adamw\" on rank 0 and \"sgd\" on rank 1",
            [&[], &["optimizer=sgd"]],
        ),
        (
            "`trainer.strategy.type` is \"ddp\" on rank 0 and \"fsdp\" on rank 1",
            [&[], &["trainer.strategy=fsdp"]],
        ),
        ("`trainer.max_steps` is 8 on rank 0 and 9 on rank 1", [&[], &["trainer.max_steps=9"]]),
        ("`seed` is 42 on rank 0 and 7 on rank 1", [&[], &["seed=7"]]),
        ("`data.shuffle` is false on rank 0 and true on rank 1", [&[], &["data.shuffle=true"]]),
        (
            "`trainer.process_group.type` is \"auto\" on rank 0 and \"tcp\" on rank 1",
            [&[], &["trainer.process_group=tcp"]],
        ),
    ];
    for (says, of_ranks) in cases {
        assert_refused(&as_torchrun(&scratch, of_ranks), says);
    }
}

#[test]
fn differing_data_is_named_on_every_rank() {
    let scratch = Scratch::with_tokens();
    let ids = |i: u32| ((i * i + 7 * i) % 101 % 50) as u16;
    scratch.tokens("shorter.u16", (0..380).map(ids));
    scratch.tokens("turned.u16", (0..400).rev().map(ids));
    for (file, says) in [
        ("shorter.u16", "the number of training samples is 57 on rank 0 and 54 on rank 1"),
        ("turned.u16", "the ranks differ in the data: the training data is one file of 400 tokens"),
    ] {
        let path = format!("data.path={file}");
        assert_refused(&as_torchrun(&scratch, [&[], &[&path]]), says);
    }
}

#[test]
fn keys_of_a_host_may_differ() {
    let scratch = Scratch::with_tokens();
    scratch.file("copy.u16", std::fs::read(scratch.path().join("tokens.u16")).unwrap());
    let of_second = [
        "data.path=copy.u16",
        "trainer.num_workers=2",
        "trainer.default_root_dir=elsewhere",
        "trainer.loggers=[]",
        "trainer.enable_progress_bar=false",
        "trainer.memory_check=off",
    ];
    let runs = as_torchrun(&scratch, [&[], &of_second]);
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert_eq!(runs[0].losses().len(), 8);
}

#[test]
fn agents_with_other_configurations_are_refused() {
    let scratch = Scratch::with_tokens();
    let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |node: &str, key: &str| {
        let job: Job<'_> =
            scratch.small().set(&["trainer.strategy=ddp", "trainer.num_nodes=2", key]);
        let args = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", &endpoint];
        job.env("FULGURITE_JOB_KEY", KEY)
            .under_agent(&[&args[..], &["--node-rank", node]].concat())
            .start()
    };
    let runs =
        [start("0", "optimizer.lr=0.001"), start("1", "optimizer.lr=0.5")].map(Running::wait);
    for run in &runs {
        assert!(!run.status.success());
        assert!(run.events_of("step").is_empty());
    }
    let says = "`optimizer.lr` is 0.001 on rank 0 and 0.5 on rank 1";
    let all = format!("{}{}", runs[0].stderr, runs[1].stderr);
    assert!(all.contains(says), "{all}");
}

/// One weight. Only rank 0 logs a metric.
struct Weight(fulgurite::core::nn::Linear);

impl LightningModule for Weight {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(fulgurite::core::nn::Linear::new(&b.pp("weight"), 1, 1)?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        if ctx.rank == 0 {
            ctx.log("only_on_rank_0", 1.0);
        }
        Ok(Loss::new(self.0.forward(x)?.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl Hooks<Numbers> for Weight {}

/// A callback that only one rank has.
struct Lonely;

impl Hooks for Lonely {}
impl Callback for Lonely {}

/// The errors of two ranks, run as threads, that train [`Weight`].
fn errors(trainer: impl Fn(usize, Trainer) -> Trainer + Sync, keys: [&str; 2]) -> Vec<String> {
    errors_of::<Weight>(trainer, keys)
}

fn errors_of<M: LightningModule<Config = NoKeys, Data = Numbers>>(
    trainer: impl Fn(usize, Trainer) -> Trainer + Sync,
    keys: [&str; 2],
) -> Vec<String> {
    let logs = tempfile::tempdir().unwrap();
    let root = format!("trainer.default_root_dir={:?}", logs.path());
    run_ranks(2, |world| {
        let rank = world.rank();
        let layers =
            ["trainer.devices=2", "trainer.max_steps=3", "trainer.enable_progress_bar=false"]
                .into_iter()
                .chain([root.as_str(), keys[rank]])
                .try_fold(ConfigLayers::new(), |all, set| all.set(set))?;
        let run = RunConfig::<NoKeys, NoKeys>::from_layers(layers)?;
        let result = trainer(rank, Trainer::new(world)).fit::<M>(&run);
        Ok(result.map(drop).unwrap_err().to_string())
    })
    .unwrap()
}

#[test]
fn all_ranks_get_the_same_error() {
    let errors = errors(|_, trainer| trainer, ["optimizer.weight_decay=0.5", "optimizer.lr=0.5"]);
    assert_eq!(errors[0], errors[1]);
    assert_says!(errors[0], "the ranks differ … `optimizer.lr` is 0.001 … 0.5 on rank 1 …");
}

#[test]
fn callbacks_of_one_rank_are_named() {
    let with = |rank: usize, trainer: Trainer| match rank {
        0 => trainer.with_callback(Box::new(Lonely)),
        _ => trainer,
    };
    let errors = errors(with, ["seed=1", "seed=1"]);
    assert_eq!(errors[0], errors[1]);
    let says = "the ranks differ in the program: callback 0 is ";
    assert!(errors[0].starts_with(says), "{}", errors[0]);
    assert!(errors[0].contains("Lonely on rank 0 and absent on rank 1"), "{}", errors[0]);
}

/// Like [`Weight`], with an optimizer that differs at every construction.
struct OwnOptimizer(Weight);

impl LightningModule for OwnOptimizer {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(keys: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Weight::configure_model(keys, b)?))
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        self.0.training_step(x, ctx)
    }

    fn configure_optimizers(&self, configured: OptimizerSetup) -> Result<Optimizers> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let lr = f64::from(1 + MADE.fetch_add(1, Ordering::Relaxed));
        let optimizer = Box::new(AdamW { lr, ..AdamW::default() });
        Ok(OptimizerSetup { optimizer, ..configured }.into())
    }
}

impl Hooks<Numbers> for OwnOptimizer {}

#[test]
fn optimizers_made_by_code_are_compared() {
    let errors = errors_of::<OwnOptimizer>(|_, trainer| trainer, ["seed=1", "seed=1"]);
    assert_eq!(errors[0], errors[1]);
    let says = "the ranks differ in the optimizers: `lr` of group 0 of the optimizer is ";
    assert!(errors[0].starts_with(says), "{}", errors[0]);
}

#[test]
fn metrics_of_one_rank_are_named_at_once() {
    // In training, and in the validation before it, which runs a training step by default.
    for sanity_steps in [0, 2] {
        let steps = format!("trainer.num_sanity_val_steps={sanity_steps}");
        let all = errors(|_, trainer| trainer, [&steps, &steps]).join("\n");
        assert!(all.contains("only_on_rank_0"), "{all}");
        assert!(!all.contains("timed out"), "{all}");
    }
}
