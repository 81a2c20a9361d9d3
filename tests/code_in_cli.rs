//! A program that passes a callback and a parallelize function to its command line in code. The
//! test starts itself as that program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::time::Duration;

use fulgurite::cli::Cli;
use fulgurite::core::collective::flight::{FlightLog, Trouble};
use fulgurite::core::nn::BatchNorm;
use fulgurite::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

struct Double(Unit<Linear>);

#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NoKeys {}

struct Numbers;

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
        8
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<Tensor> {
        let numbers: Vec<f32> = indices.iter().map(|&i| i as f32 / 8.0).collect();
        Ok(Tensor::from_vec(numbers, (indices.len(), 1), device)?)
    }
}

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
}

impl Hooks<Numbers> for Double {}

#[derive(Default)]
struct SaysTheEnd;

impl Hooks for SaysTheEnd {
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        ctx.print(format!("the callback was there, on {} ranks", ctx.world_size));
        Ok(())
    }
}

impl Callback for SaysTheEnd {}

/// A model whose forward changes a buffer: the running statistics of a batch norm. Rank 1 of the
/// first generation ends by a signal in step 3, between the forwards of two micro-batches.
struct Normed {
    norm: BatchNorm,
    last: Unit<Linear>,
}

impl Normed {
    fn loss(&self, x: &Tensor) -> Result<Loss> {
        let error = (self.last.forward(&self.norm.forward(x)?)? - (x * 2.0)?)?;
        Ok(Loss::new(error.sqr()?.sum_all()?, x.dim(0)? as f64))
    }
}

impl LightningModule for Normed {
    type Config = NoKeys;
    type Data = Numbers;

    fn configure_model(_: &NoKeys, b: &ModuleBuilder) -> Result<Self> {
        let norm = BatchNorm::new(&b.pp("norm"), 1)?;
        Ok(Self { norm, last: b.unit("last", |b| Linear::new(b, 1, 1))? })
    }

    fn training_step(&mut self, x: &Tensor, ctx: &mut StepContext) -> Result<Loss> {
        let aborts = loses(&["step", "start"]) && generation() == Some(0);
        if aborts && (ctx.rank, ctx.step, ctx.batch_index) == (1, 3, 1) {
            std::process::abort();
        }
        if loses(&["pace"]) && ctx.rank == 1 {
            std::thread::sleep(Duration::from_millis(40));
        }
        if loses(&["calls"]) && (ctx.rank, ctx.step) == (1, 3) {
            ctx.process_group().barrier()?.wait()?;
        }
        if loses(&["never_ends"]) && (ctx.rank, ctx.step) == (1, 3) {
            std::thread::sleep(Duration::from_secs(60));
        }
        self.loss(x)
    }

    fn validation_step(&mut self, x: &Tensor, _: &mut StepContext) -> Result<Loss> {
        self.loss(x)
    }
}

impl Hooks<Numbers> for Normed {
    fn on_train_step_end(&mut self, ctx: &mut HookContext<Numbers>) -> Result<()> {
        if loses(&["bits"]) && generation() == Some(0) && (ctx.rank, ctx.step) == (1, 3) {
            let weight = ctx.fabric().module_tree()?.parameter("last.weight").unwrap().local()?;
            weight.values.slice_set(&(&weight.values * 1.5)?, 0, 0)?;
        }
        Ok(())
    }
}

/// Set in the process that acts as the program; its value is the program.
const AS_PROGRAM: &str = "FULGURITE_TEST_CODE_IN_CLI";
/// Where [`Normed`] loses a rank: `none`, `step`, or also at the `start` of the new process. With
/// `never_ends` a step of the rank never ends, and with `bits` a weight changes on it alone.
/// With `pace` all its steps are slow, and with `calls` it makes a collective more.
const LOSES: &str = "FULGURITE_TEST_LOSES";

fn loses(at: &[&str]) -> bool {
    std::env::var(LOSES).is_ok_and(|found| at.contains(&&*found))
}

/// The generation of this rank's process.
fn generation() -> Option<u64> {
    std::env::var("FULGURITE_GENERATION").ok()?.parse().ok()
}

/// Runs the program with these arguments.
fn run(directory: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let common = ["--set", "trainer.max_steps=1", "--set", "trainer.devices=2"];
    command.env(AS_PROGRAM, "1").args(args).args(common).current_dir(directory).output().unwrap()
}

fn tests() {
    let directory = tempfile::tempdir().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let fit = run(directory.path(), &["fit", "--set", "trainer.strategy=fsdp"]);
    let stdout = text(&fit.stdout);
    assert!(fit.status.success(), "{}", text(&fit.stderr));
    assert!(stdout.contains("the callback was there, on 2 ranks"), "{stdout}");
    // The function is called, and may be refused, before ranks start.
    let checked = |strategy: &str| {
        let set = format!("trainer.strategy={strategy}");
        run(directory.path(), &["config", "check", "--set", &set])
    };
    assert!(checked("fsdp").status.success());
    let refused = checked("ddp");
    assert_eq!(refused.status.code(), Some(1));
    let stderr = text(&refused.stderr);
    assert!(stderr.contains("strategy `ddp` takes no parallelize function"), "{stderr}");
    buffers_go_on_without_the_lost_step();
    checkpoints_are_those_without_a_loss();
    records_name_what_went_wrong();
    changed_bits_are_found();
    slow_rank_is_named();
    println!("test result: ok");
}

/// Trains [`Normed`] on two ranks in the folder.
fn train_normed(directory: &Path, loses: &str, sets: &[&str]) -> Output {
    let common = [
        "trainer.max_steps=6",
        "trainer.devices=2",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=1",
    ];
    Command::new(std::env::current_exe().unwrap())
        .args(["fit", "--output", "json"])
        .args(common.iter().chain(sets).flat_map(|set| ["--set", set]))
        .env(AS_PROGRAM, "normed")
        .env(LOSES, loses)
        .current_dir(directory)
        .output()
        .unwrap()
}

/// Trains it with `trainer.elastic`. Returns the events.
fn train(directory: &Path, loses: &str, sets: &[&str]) -> Vec<Value> {
    let run = train_normed(directory, loses, &[sets, &["trainer.elastic.enabled=true"]].concat());
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let lines = String::from_utf8(run.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The values of events by step. What was cut off by a loss is reported again.
fn by_step(events: &[Value], kind: &str, key: &str) -> BTreeMap<u64, f64> {
    let all = events.iter().filter(|event| event["event"] == kind);
    all.map(|event| (event["step"].as_u64().unwrap(), event[key].as_f64().unwrap())).collect()
}

/// After the loss of a rank, buffers are those before the step that is taken again. A new process
/// that does not come in time is lost too.
fn buffers_go_on_without_the_lost_step() {
    let directory = tempfile::tempdir().unwrap();
    let ddp = "trainer.strategy=ddp";
    let expected = train(directory.path(), "none", &[ddp]);
    for (loses, sets, generation) in
        [("step", &[ddp][..], 1.0), ("start", &[ddp, "trainer.elastic.join_timeout_secs=2"], 2.0)]
    {
        let found = train(directory.path(), loses, sets);
        let generations = by_step(&found, "generation", "generation");
        assert_eq!(generations, BTreeMap::from([(2, generation)]));
        for (kind, key) in [("step", "train_loss"), ("validation", "val_loss")] {
            assert_eq!(by_step(&expected, kind, key).len(), 6);
            assert_eq!(by_step(&found, kind, key), by_step(&expected, kind, key), "{loses}: {key}");
        }
    }
}

/// The checkpoints and the end of a run are those without the loss.
fn checkpoints_are_those_without_a_loss() {
    let callbacks = "trainer.callbacks=[\
        { type = 'model_checkpoint', monitor = 'val_loss', mode = 'max', save_top_k = 2, filename = 'best-{step}' }, \
        { type = 'early_stopping', monitor = 'val_loss', mode = 'max', patience = 4 }]";
    let sets =
        [callbacks, "trainer.max_steps=20", "checkpoint.dir=saved", "checkpoint.every_n_steps=1"];
    for more in [
        &["trainer.strategy=ddp", "checkpoint.keep_last=3"][..],
        &["trainer.strategy=ddp", "checkpoint.save_top_k=2", "checkpoint.monitor=val_loss"],
        &[
            "trainer.strategy=fsdp",
            "trainer.elastic.replicas=1",
            "checkpoint.async_save=true",
            "checkpoint.keep_last=3",
        ],
    ] {
        let sets = [&sets, more].concat();
        let run = |loses: &str| {
            let directory = tempfile::tempdir().unwrap();
            let events = train(directory.path(), loses, &sets);
            let saved = std::fs::read_dir(directory.path().join("saved")).unwrap();
            let saved = saved.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            (by_step(&events, "step", "train_loss"), saved.collect::<BTreeSet<_>>())
        };
        let (expected, found) = (run("none"), run("step"));
        assert!(expected.0.len() < 20, "no early stop in {} steps", expected.0.len());
        assert_eq!(found, expected, "{more:?}");
    }
}

/// Both ranks write their records, also the one that is stuck in its own code.
fn records_name_what_went_wrong() {
    let trouble = |loses: &str| {
        let directory = tempfile::tempdir().unwrap();
        let sets = ["trainer.strategy=ddp", "trainer.timeout_secs=2"];
        let run = train_normed(directory.path(), loses, &sets);
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert!(!run.status.success());
        let dir = "fulgurite_logs/version_0/flight";
        assert!(stderr.contains(&format!("`fulgurite flight {dir}`")), "{stderr}");
        let logs: Vec<FlightLog> = (0..2)
            .map(|rank| directory.path().join(dir).join(format!("rank-{rank:05}.jsonl")))
            .map(|path| FlightLog::read(BufReader::new(File::open(path).unwrap())).unwrap())
            .collect();
        Trouble::find(&logs)
    };
    let [hangs] = &trouble("never_ends")[..] else { panic!("one call") };
    assert_eq!((&hangs.behind[..], hangs.differs), (&[1][..], false));
    assert!(hangs.calls[&0].failed);
    // Rank 1 waits in a barrier of `world`, rank 0 in the group that sums gradients.
    let mut circle = trouble("calls");
    circle.sort_by_key(|call| call.behind.clone());
    let waits: Vec<_> = circle.iter().map(|call| (&*call.group, &call.behind[..])).collect();
    assert_eq!(waits, [("world", &[0][..]), ("data_parallel_replicate", &[1])], "{circle:?}");
    assert_eq!(circle[0].calls[&1].op, "barrier");
}

/// A weight that changes on one rank is found. If it is found at once, an elastic training goes on
/// as if it had not changed.
fn changed_bits_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let sets = ["trainer.strategy=ddp", "trainer.check_replicas_every_n_steps=2"];
    let three = [&sets[..], &["trainer.devices=3"]].concat();
    let run = train_normed(directory.path(), "bits", &three);
    let stderr = String::from_utf8_lossy(&run.stderr);
    let expected =
        "after step 4 replicas differ: rank 1 holds other values than ranks 0, 2 in 1 of";
    assert!(!run.status.success() && stderr.contains(expected), "{stderr}");
    assert!(stderr.contains("Go on from a checkpoint of step 2 or before"), "{stderr}");
    let two = train_normed(directory.path(), "bits", &sets);
    let stderr = String::from_utf8_lossy(&two.stderr);
    assert!(stderr.contains("ranks 0, 1 hold different values"), "{stderr}");
    let each =
        ["trainer.strategy=ddp", "trainer.check_replicas_every_n_steps=1", "trainer.devices=3"];
    let expected = train(directory.path(), "none", &each);
    let found = train(directory.path(), "bits", &each);
    assert_eq!(by_step(&found, "generation", "step").into_keys().collect::<Vec<_>>(), [3]);
    assert_eq!(by_step(&found, "step", "train_loss"), by_step(&expected, "step", "train_loss"));
}

fn slow_rank_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let sets =
        ["trainer.strategy=ddp", "trainer.slow_rank_factor=2", "trainer.log_every_n_steps=1"];
    let run = train_normed(directory.path(), "pace", &sets);
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && stderr.contains("WARN rank 1 on "), "{stderr}");
    // The new process in its place is slow too.
    let elastic = ["trainer.elastic.replace_slow_ranks=true", "trainer.elastic.max_restarts=1"];
    let replaced = train(directory.path(), "pace", &[&sets[..], &elastic].concat());
    let sizes = by_step(&replaced, "generation", "world_size");
    assert_eq!(sizes.into_values().collect::<Vec<_>>(), [2.0, 1.0]);
}

fn main() -> ExitCode {
    match std::env::var(AS_PROGRAM).as_deref() {
        Err(_) => {
            tests();
            return ExitCode::SUCCESS;
        }
        Ok("normed") => {
            if loses(&["start"]) && generation() == Some(1) {
                std::thread::sleep(Duration::from_secs(60));
            }
            return Cli::new("normed", "Has a batch norm").run::<Normed>();
        }
        Ok(_) => {}
    }
    Cli::new("double", "Learns to double")
        .with_callback(SaysTheEnd::default)
        .parallelize(|model: &mut ModuleTree, _: &DeviceMesh| {
            model.shard_model(&[&|unit: &str| unit == "double"], FullyShard::default())
        })
        .run::<Double>()
}
