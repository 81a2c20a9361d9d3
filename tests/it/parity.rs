//! Equal losses for all strategies and numbers of processes, and the output format that other
//! programs rely on.

use crate::program::{Job, Run, Scratch, assert_close};

const STRATEGIES: [(&str, usize); 11] = [
    ("single_device", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("{ type = \"fsdp2\", reshard_after_forward = false }", 2),
    ("{ type = \"fsdp2\", reshard_after_forward = true }", 3),
];

/// Runs `job` in all ways, with 12 samples per step for each micro-batch of a rank.
fn compare(job: &Job, accumulate: usize) {
    let expected = job.clone().on("single_device", 1, 12 * accumulate).succeed();
    let job = job.clone().set(&[&format!("trainer.accumulate_grad_batches={accumulate}")]);
    for (strategy, devices) in STRATEGIES {
        let run = job.clone().on(strategy, devices, 12 / devices).succeed();
        assert_eq!(run.summary()["world_size"], devices, "{strategy}");
        assert_close(&run.losses(), &expected.losses(), 1e-5);
        assert_close(&run.steps("grad_norm"), &expected.steps("grad_norm"), 1e-4);
        assert_eq!(run.steps("lr"), expected.steps("lr"));
    }
}

#[test]
fn all_strategies_match_one_device() {
    let scratch = Scratch::with_tokens();
    // 57 samples: the run passes the end of the data.
    compare(&scratch.small().set(&["trainer.max_steps=20", "optimizer.lr=1e-2"]), 1);
}

#[test]
fn strategies_match_with_ties_and_dropout() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&[
        "model.tie_word_embeddings=true",
        "model.dropout=0.2",
        "trainer.freeze=['model.layers.0.mlp.*.weight']",
        "trainer.gradient_clip_val=0.2",
        "data.shuffle=true",
    ]);
    compare(&job, 1);
}

#[test]
fn three_micro_batches_match_one() {
    let scratch = Scratch::with_tokens();
    compare(&scratch.small().set(&["model.dropout=0.1"]), 3);
}

#[test]
fn repeated_runs_are_bitwise_equal() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["model.dropout=0.1", "data.shuffle=true"]);
    let run = |strategy| {
        let run = job.clone().on(strategy, 2, 3).succeed();
        (run.losses(), run.steps("grad_norm"))
    };
    let ddp = run("ddp");
    assert_eq!(run("ddp"), ddp);
    let fsdp = run("fsdp");
    assert_eq!(run("fsdp"), fsdp);
    assert_eq!(fsdp.0, ddp.0);
}

#[test]
fn externally_started_ranks_connect() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 3);
    let expected = job.succeed();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            job.clone()
                .env("RANK", rank)
                .env("LOCAL_RANK", rank)
                .env("WORLD_SIZE", 2)
                .env("LOCAL_WORLD_SIZE", 2)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port)
                .start()
        })
        .collect();
    let runs: Vec<Run> = ranks.into_iter().map(crate::program::Running::wait).collect();
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert_eq!(runs[0].losses(), expected.losses());
    assert_eq!(runs[0].summary()["world_size"], 2);
    assert_eq!(runs[1].stdout, "");
}

/// Two ranks with separate disks, as on two hosts: only rank 0's disk has the initial weights.
// checklist: torchtune: broadcast_from_rank0
#[test]
fn weights_of_rank_0_are_broadcast() {
    let (first, second) = (Scratch::with_tokens(), Scratch::with_tokens());
    let saving = ["checkpoint.dir=kept", "checkpoint.every_n_steps=8"];
    first.small().set(&saving).succeed();
    let from = ["trainer.ckpt_path=kept/step-00000008", "checkpoint.weights_only=true"];
    let expected = first.small().on("fsdp", 2, 3).set(&from).succeed();
    assert_ne!(expected.losses(), first.small().on("fsdp", 2, 3).succeed().losses());
    let run = |more: &[&str]| -> Vec<Run> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |(rank, scratch): (usize, &Scratch)| {
            let job = scratch.small().on("fsdp", 2, 3).set(&from).set(more);
            job.env("RANK", rank)
                .env("LOCAL_RANK", rank)
                .env("WORLD_SIZE", 2)
                .env("LOCAL_WORLD_SIZE", 2)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port)
                .start()
        };
        let started: Vec<_> = [&first, &second].into_iter().enumerate().map(start).collect();
        started.into_iter().map(crate::program::Running::wait).collect()
    };
    let runs = run(&["checkpoint.load.broadcast_from_rank0=true"]);
    assert!(runs.iter().all(|run| run.status.success()), "{}{}", runs[0].stderr, runs[1].stderr);
    assert_eq!(runs[0].losses(), expected.losses());
    let runs = run(&[]);
    assert!(runs.iter().all(|run| !run.status.success()));
    assert!(runs[1].stderr.contains("kept/step-00000008"), "{}", runs[1].stderr);
}

#[test]
fn samples_of_tokens_come_in_order() {
    let scratch = Scratch::with_tokens();
    let bytes = std::fs::read(scratch.path().join("tokens.u16")).unwrap();
    let ids: Vec<u16> = bytes.chunks(2).map(|id| u16::from_le_bytes([id[0], id[1]])).collect();
    // Without learning, the loss of a step identifies its samples.
    let job = scratch.small().set(&["scheduler=constant", "optimizer.lr=0", "data.seq_len=7"]);

    // Sample i is tokens[7 i .. 7 i + 8]; here the samples are laid out in sequence.
    scratch.tokens("samples.u16", (0..24).flat_map(|i| ids[7 * i..7 * i + 8].to_vec()));
    let one_by_one = job.clone().on("single_device", 1, 1).set(&[
        "trainer.max_steps=24",
        "data.path=samples.u16",
        "data.stride=8",
    ]);
    let of_sample: Vec<f64> = one_by_one.succeed().losses().into_values().collect();
    assert!(of_sample.windows(2).all(|pair| pair[0] != pair[1]));

    let expected = (0..6_u64)
        .map(|s| (s + 1, of_sample[4 * s as usize..][..4].iter().sum::<f64>() / 4.0))
        .collect();
    for (strategy, devices) in [("single_device", 1), ("fsdp", 2), ("ddp", 4)] {
        let run = job.clone().on(strategy, devices, 4 / devices).set(&["trainer.max_steps=6"]);
        assert_close(&run.succeed().losses(), &expected, 1e-6);
    }
}

#[test]
fn rank_takes_contiguous_samples_of_a_step() {
    let scratch = Scratch::new();
    // Sample i contains only the token i. The vocabulary of 10 tokens covers samples 0 to 9, so the
    // rank that gets sample 10 fails first.
    scratch.token_files((0..20).flat_map(|i| [i; 8]));
    let job = scratch.small().set(&["model.vocab_size=10", "data.path=tokens"]);
    let error = |accumulate: usize, batch_size| {
        let accumulate = format!("trainer.accumulate_grad_batches={accumulate}");
        job.clone().on("ddp", 2, batch_size).set(&[&accumulate]).fail()
    };
    // Steps of 4 samples: the third has 8, 9 on rank 0 and 10, 11 on rank 1.
    for (accumulate, batch_size) in [(1, 2), (2, 1)] {
        let error = error(accumulate, batch_size);
        assert!(error.lines().any(|line| line.starts_with("error: rank 1 failed: ")), "{error}");
    }
    // Steps of 8: the second has 8 to 11 on rank 0 and 12 to 15 on rank 1. Only sample 9 is wrong,
    // so rank 0 fails.
    scratch.token_files((0..20).flat_map(|i| [if i == 9 { 10 } else { 1 }; 8]));
    let error = error(2, 2);
    assert!(error.lines().any(|line| line.starts_with("error: rank 0 failed: ")), "{error}");
}

#[test]
fn json_lines_fields_are_stable() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().on("fsdp", 2, 2).set(&[
        "data.validation_fraction=0.2",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "checkpoint.every_n_steps=2",
        "checkpoint.dir=kept",
        "checkpoint.overwrite=true",
    ]);
    let run = job.succeed();
    let mut events: Vec<_> = run.events();
    assert_eq!(events.remove(0)["event"], "data");
    let order: Vec<_> = events
        .iter()
        .map(|e| format!("{} {}", e["event"].as_str().unwrap(), e["step"].as_u64().unwrap_or(0)))
        .collect();
    assert_eq!(
        order,
        [
            "step 1",
            "step 2",
            "validation 2",
            "checkpoint 2",
            "step 3",
            "step 4",
            "validation 4",
            "checkpoint 4",
            "summary 0",
        ]
    );
    for event in &events {
        let numbers: &[&str] = match event["event"].as_str().unwrap() {
            "step" => &["step", "train_loss", "grad_norm", "lr", "tokens_per_s", "epoch"],
            "validation" => &["step", "val_loss", "batches"],
            "checkpoint" => &["step"],
            _ => &[
                "steps",
                "world_size",
                "first_loss",
                "last_loss",
                "step_s_median",
                "tokens_per_s",
                "startup_s",
                "goodput",
            ],
        };
        for key in numbers {
            assert!(event[key].is_number(), "`{key}` in {event}");
        }
    }
    assert!(scratch.path().join(events[3]["path"].as_str().unwrap()).is_dir(), "{}", events[3]);
    let summary = run.summary();
    assert_eq!(summary["steps"], 4);
    assert_eq!(summary["world_size"], 2);
    assert_eq!(summary["strategy"], "fsdp");
    assert_eq!(summary["first_loss"], events[0]["train_loss"]);
    assert_eq!(summary["last_loss"], events[5]["train_loss"]);
    let rss = summary["peak_rss_mib"].as_array().unwrap();
    assert!(rss.len() == 2 && rss.iter().all(|mib| mib.as_f64().unwrap() > 1.0), "{summary}");

    // Human-readable output goes to stderr.
    assert!(run.stderr.contains("step 4/4"), "{}", run.stderr);
    assert!(run.stderr.contains("4 steps on 2 ranks with fsdp"), "{}", run.stderr);
    let quiet = job.set(&["trainer.enable_progress_bar=false"]).succeed();
    assert_eq!(quiet.stderr, "");
    assert_eq!(quiet.losses(), run.losses());
}
