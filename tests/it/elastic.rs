//! Trainings that lose ranks and go on (`trainer.elastic`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::fabric::Fabric;
use fulgurite::core::run::RunConfig;
use fulgurite_test_message::assert_says;
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use toml::Table;

use crate::program::{Job, Run, Running, Scratch, assert_close, can_mount};

const STEPS: u64 = 60;

/// A run of [`STEPS`] steps, in which nothing is lost.
fn undisturbed<'a>(scratch: &'a Scratch, strategy: &str, devices: usize) -> Job<'a> {
    scratch.small().on(strategy, devices, 2).set(&[
        &format!("trainer.max_steps={STEPS}"),
        "trainer.elastic.enabled=true",
        "trainer.enable_plan=false",
    ])
}

fn strike(running: &Running, rank: usize, signal: Signal) {
    kill_process(running.rank(rank), signal).unwrap();
}

/// Kills a rank after step 10, and waits for the end of the run.
fn kill_once(job: &Job, rank: usize) -> Run {
    let running = job.start();
    running.reach(10);
    strike(&running, rank, Signal::KILL);
    running.wait()
}

/// Asserts that a run has gone on to its end, and returns its generations.
#[track_caller]
fn gone_on(run: &Run) -> Vec<Value> {
    assert_eq!(run.code(), Some(0), "{}{}", run.stdout, run.stderr);
    assert!(!run.stderr.contains("error"), "{}", run.stderr);
    let generations = run.events_of("generation");
    assert!(!generations.is_empty(), "{}{}", run.stdout, run.stderr);
    assert_eq!(run.summary()["steps"], STEPS);
    generations
}

/// Asserts that nothing is left in the memory and the temporary files of this host.
#[track_caller]
fn left_nothing(scratch: &Scratch, supervisor: i32) {
    let own = format!("fulgurite-elastic-{supervisor}-");
    for root in [Path::new("/dev/shm"), &scratch.temporary()] {
        let names = fs::read_dir(root).unwrap().flatten().map(|entry| entry.file_name());
        let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(&own)).collect();
        assert!(left.is_empty(), "{left:?} in {}", root.display());
    }
}

#[test]
fn killed_rank_is_replaced_to_the_bit() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 3);
    let expected = job.succeed().losses();
    for rank in [0, 1] {
        let run = kill_once(&job, rank);
        let generations = gone_on(&run);
        assert_eq!(
            (&generations[0]["generation"], &generations[0]["world_size"]),
            (&1.into(), &3.into())
        );
        assert_eq!(generations[0]["repeated_steps"], 0);
        assert_eq!(run.losses(), expected, "rank {rank} was killed");
        let run_dirs = fs::read_dir(scratch.path().join("fulgurite_logs")).unwrap().count();
        assert_eq!(run_dirs, 2 + rank, "the run goes on in its directory");
    }
}

#[test]
fn ranks_left_divide_the_samples() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 3);
    let expected = job.succeed().losses();
    for rank in [0, 2] {
        let run = kill_once(&job.clone().set(&["trainer.elastic.max_restarts=0"]), rank);
        assert_eq!(gone_on(&run)[0]["world_size"], 2);
        assert_close(&run.losses(), &expected, 1e-6);
        assert_eq!(run.summary()["world_size"], 2);
    }
}

#[test]
fn lost_shards_come_from_their_copies() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "fsdp", 3);
    let expected = job.succeed().losses();
    let copied = job.clone().set(&["trainer.elastic.replicas=1"]);
    for rank in [0, 1] {
        let running = copied.start();
        running.reach(10);
        strike(&running, rank, Signal::KILL);
        let supervisor = running.pid().as_raw_nonzero().get();
        let run = running.wait();
        let generation = &gone_on(&run)[0];
        assert_eq!(generation["from"], "the copies in the host's memory");
        assert!(generation["repeated_steps"].as_u64().unwrap() <= 2, "{generation}");
        assert_eq!(run.losses(), expected);
        left_nothing(&scratch, supervisor);
    }
}

#[test]
fn copies_take_the_planned_bytes() {
    let scratch = Scratch::with_tokens();
    let keys = ["trainer.elastic.replicas=1", "trainer.max_steps=100000"];
    let job = undisturbed(&scratch, "fsdp", 3).set(&keys);
    let sets: Vec<&str> =
        job.assignments("-", "-").into_iter().flat_map(|set| ["--set", set]).collect();
    let plan = scratch.job(&[&["plan", "--json"], &sets[..]].concat()).succeed();
    let plan: Value = serde_json::from_str(plan.stdout.lines().last().unwrap()).unwrap();
    let copies = &plan["copies"];
    assert_eq!((&copies["every_n_steps"], &copies["sent_bytes"]), (&1.into(), &0.into()));
    // Two copies and the ranks' buffers.
    let planned = copies["host_bytes"].as_u64().unwrap() / 3;
    let running = job.start();
    let own = format!("fulgurite-elastic-{}-", running.pid().as_raw_nonzero());
    let written = running.until("a whole copy", |_| {
        let dirs = fs::read_dir("/dev/shm").unwrap().flatten();
        let mut dirs = dirs.filter(|dir| dir.file_name().to_string_lossy().starts_with(&own));
        let states = fs::read_dir(dirs.next()?.path().join("states")).ok()?.flatten();
        let is_whole = |path: &Path| path.join("manifest.json").is_file();
        let state = states.map(|state| state.path()).find(|state| is_whole(state))?;
        let mut bytes = 0;
        for folder in ["model", "optimizer"] {
            for file in fs::read_dir(state.join(folder)).ok()?.flatten() {
                let file = fs::read(file.path()).ok()?;
                let (header, rest) = file.split_first_chunk()?;
                bytes += rest.len() as u64 - u64::from_le_bytes(*header);
            }
        }
        // Otherwise its successor may have been removing it meanwhile.
        is_whole(&state).then_some(bytes)
    });
    assert_eq!(written, planned, "without headers");
}

#[test]
fn full_memory_leaves_an_older_copy() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "fsdp", 2).set(&["trainer.max_steps=250"]);
    let expected = job.succeed().losses();
    let running = job
        .set(&["trainer.elastic.replicas=1"])
        .mounting(
            // Again and again, as each new copy removes one.
            "mount -t tmpfs -o size=32m none /dev/shm; \
             (until [ -e fill ]; do sleep 0.02; done; \
              for i in 1 2 3 4 5 6 7 8; do cat /dev/zero >> /dev/shm/fill || true; sleep 0.05; done) & \
             \"$@\"",
        )
        .start();
    running.reach(10);
    scratch.file("fill", "");
    running.until("a failed copy", |this| this.said("no copy of the state was made").then_some(()));
    running.reach_next();
    strike(&running, 1, Signal::KILL);
    let run = running.wait();
    assert_eq!(run.code(), Some(0), "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("No space left on device"), "{}", run.stderr);
    let generation = &run.events_of("generation")[0];
    assert_eq!(generation["from"], "the copies in the host's memory");
    assert!(generation["repeated_steps"].as_u64().unwrap() >= 2, "{generation}");
    assert_eq!(run.losses(), expected);
}

#[test]
fn lost_shards_come_from_the_last_checkpoint() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "fsdp", 2);
    let expected = job.succeed().losses();
    let run = kill_once(&job.clone().set(&["checkpoint.every_n_steps=8"]), 1);
    let generation = &gone_on(&run)[0];
    assert_eq!(generation["from"], "the last checkpoint");
    assert!(generation["step"].as_u64().unwrap().is_multiple_of(8), "{generation}");
    assert_eq!(run.losses(), expected);
    let generation = &gone_on(&kill_once(&job, 0))[0];
    assert_eq!(
        (&generation["from"], &generation["step"]),
        (&"the start of the run".into(), &0.into())
    );
}

#[test]
fn replica_of_shards_needs_no_copy() {
    let scratch = Scratch::with_tokens();
    let strategy = "{ type = \"hsdp\", data_parallel_replicate_size = 2 }";
    let job = undisturbed(&scratch, strategy, 4);
    let expected = job.succeed().losses();
    let run = kill_once(&job, 2);
    let generation = &gone_on(&run)[0];
    assert_eq!(
        (&generation["from"], &generation["repeated_steps"]),
        (&"the memory of ranks [0, 1]".into(), &0.into())
    );
    assert_eq!(run.losses(), expected);
}

#[test]
fn replicas_and_stages_of_other_meshes_go_on() {
    let scratch = Scratch::with_tokens();
    for (strategy, devices, from) in [
        (
            "{ type = \"model_parallel\", tensor_parallel_size = 2, data_parallel_replicate_size = 2, \
             parallelize = \"llama\" }",
            4,
            "the memory of ranks [",
        ),
        (
            "{ type = \"model_parallel\", pipeline_parallel_size = 2 }",
            2,
            "the copies in the host's memory",
        ),
    ] {
        let job = undisturbed(&scratch, strategy, devices)
            .set(&["trainer.elastic.replicas=1", "trainer.accumulate_grad_batches=2"]);
        let expected = job.succeed().losses();
        let run = kill_once(&job, 1);
        let found = &gone_on(&run)[0]["from"];
        assert!(found.as_str().unwrap().starts_with(from), "{found}");
        assert_eq!(run.losses(), expected, "{strategy}");
    }
}

#[test]
fn averages_of_schedule_free_optimizers_go_on() {
    let scratch = Scratch::with_tokens();
    let keys = [
        "optimizer={ type = \"schedule_free_adamw\", lr = 2.5e-3 }",
        "scheduler=\"constant\"",
        "trainer.val_check_interval=1",
        "data.validation_fraction=0.3",
        "trainer.elastic.replicas=1",
    ];
    for strategy in ["ddp", "fsdp"] {
        let mut job = undisturbed(&scratch, strategy, 2);
        job.replace("scheduler.warmup_steps=3", "scheduler=\"constant\"");
        let job = job.set(&keys);
        let before = job.succeed();
        let run = kill_once(&job, 1);
        gone_on(&run);
        assert_eq!(run.losses(), before.losses());
        assert_eq!(validations(&run), validations(&before));
    }
}

#[test]
fn stopped_rank_is_replaced() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 2);
    let expected = job.succeed().losses();
    let running = job.start();
    running.reach(10);
    strike(&running, 1, Signal::STOP);
    let run = running.wait();
    gone_on(&run);
    assert_eq!(run.losses(), expected);
}

#[test]
fn validations_and_averages_go_on() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 2).set(&[
        "trainer.ema_decay=0.9",
        "trainer.val_check_interval=1",
        "data.validation_fraction=0.3",
        "checkpoint.every_n_steps=20",
    ]);
    let before = job.succeed();
    let run = kill_once(&job, 1);
    gone_on(&run);
    assert_eq!(run.losses(), before.losses());
    assert_eq!(validations(&run), validations(&before));
    let saved = |run: &Run| -> Vec<Value> {
        run.events_of("checkpoint").into_iter().map(|mut e| e["step"].take()).collect()
    };
    assert_eq!(saved(&run), saved(&before));
}

#[test]
fn second_loss_during_the_change_is_survived() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 3);
    let expected = job.succeed().losses();
    let running = job.start();
    running.reach(10);
    let others = running.members();
    strike(&running, 1, Signal::KILL);
    // The new rank 1.
    let new = running.until("a new process", |this| {
        this.members().into_iter().find(|pid| !others.contains(pid))
    });
    kill_process(new, Signal::KILL).unwrap();
    let run = running.wait();
    let generations = gone_on(&run);
    assert_eq!(generations.last().unwrap()["generation"], 2);
    assert_eq!(run.losses(), expected);
}

#[test]
fn too_few_ranks_end_the_run() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 2)
        .set(&["trainer.elastic.max_restarts=0", "trainer.elastic.min_ranks=2"]);
    let run = kill_once(&job, 1);
    assert_eq!(run.code(), Some(137), "{}", run.stderr);
    insta::assert_snapshot!(last_lines(&run, 2), @r"
    warning: rank 1 was killed by signal 9 (SIGKILL), and the job cannot go on: 1 rank left, and the strategy and trainer.elastic.min_ranks = 2 need more
    error: rank 1 was killed by signal 9 (SIGKILL)
    ");
}

#[test]
fn all_ranks_may_be_lost_at_once() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 2);
    let expected = job.succeed().losses();
    for (set, from) in [
        ("checkpoint.every_n_steps=8", "the last checkpoint"),
        ("trainer.elastic.replicas=1", "the copies in the host's memory"),
    ] {
        let strategy = if from.contains("copies") { "fsdp" } else { "ddp" };
        let running = job.clone().on(strategy, 2, 2).set(&[set]).start();
        running.reach(10);
        let ranks = [running.rank(0), running.rank(1)];
        for signal in [Signal::STOP, Signal::KILL] {
            ranks.iter().for_each(|rank| kill_process(*rank, signal).unwrap());
        }
        let run = running.wait();
        assert_eq!(gone_on(&run)[0]["from"], from);
        assert_close(&run.losses(), &expected, 1e-6);
    }
}

#[test]
fn checkpoints_of_another_run_are_not_taken() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "fsdp", 2).set(&["checkpoint.dir=kept"]);
    job.clone().set(&["checkpoint.every_n_steps=60"]).succeed();
    let again = job.set(&["checkpoint.overwrite=true"]);
    let generation = &gone_on(&kill_once(&again, 0))[0];
    assert_eq!(generation["step"], 0, "this run has saved nothing yet");
}

#[test]
fn ranks_lost_at_the_start_leave_the_batch() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 3);
    let expected = job.succeed().losses();
    let running = job.set(&["trainer.elastic.max_restarts=0"]).start();
    strike(&running, 1, Signal::KILL);
    let run = running.wait();
    assert_eq!(run.summary()["world_size"], 2, "{}", run.stderr);
    assert_close(&run.losses(), &expected, 1e-6);
}

#[test]
fn own_errors_still_end_the_run() {
    let scratch = Scratch::new();
    scratch.token_files((0..200).map(|i| if i == 130 { 60 } else { i % 50 }));
    let job = undisturbed(&scratch, "ddp", 2).set(&["data.path=tokens"]);
    let error = job.fail();
    assert!(error.contains("id 60 is out of range"), "{error}");
}

#[test]
fn settings_that_cannot_go_on_are_refused() {
    let scratch = Scratch::with_tokens();
    let job = undisturbed(&scratch, "ddp", 2);
    let failing = |set: &str| job.clone().set(&[set]).fail();
    assert_says!(
        failing("trainer.elastic.min_ranks=3"),
        "error: `trainer.elastic.min_ranks`: found 3 … `trainer.devices` = 2 are all ranks"
    );
    assert_says!(
        failing("trainer.elastic.replicas=2"),
        "error: `trainer.elastic.replicas` … 0 or 1, found 2 … one memory"
    );
    assert_says!(
        failing("trainer.elastic.join_timeout_secs=0"),
        "error: `trainer.elastic.join_timeout_secs` … at least 1, found 0"
    );
    let diloco = "trainer.strategy={ type = \"diloco\", sync_every = 5 }";
    let error = job.clone().set(&[diloco, "trainer.elastic.replicas=1"]).fail();
    assert!(error.contains("`trainer.elastic.replicas`: this strategy lets"), "{error}");
    let layers = ConfigLayers::new().set("trainer.elastic.enabled=true").unwrap();
    let run = RunConfig::<Table, Table>::from_layers(layers).unwrap();
    let error = Fabric::from_config(&run).unwrap().launch().err().unwrap().to_string();
    assert!(error.contains("a loop over Fabric cannot go on"), "{error}");
    let torchrun = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ];
    let started = torchrun.iter().fold(job, |job, (name, value)| job.env(name, value));
    let error = started.fail();
    assert!(
        error.contains("works with ranks that this program or `fulgurite run` starts"),
        "{error}"
    );
}

/// The losses of validations by step. A validation that was cut off runs again.
fn validations(run: &Run) -> BTreeMap<u64, f64> {
    let of = |e: &Value| Some((e["step"].as_u64()?, e["val_loss"].as_f64()?));
    run.events_of("validation").iter().map(|e| of(e).unwrap()).collect()
}

/// The last lines of stderr.
fn last_lines(run: &Run, count: usize) -> String {
    let lines: Vec<&str> = run.stderr.lines().collect();
    lines[lines.len() - count..].join("\n")
}
