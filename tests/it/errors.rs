//! Error messages for user mistakes.

use crate::program::Scratch;
use fulgurite::core::counted;
use insta::assert_snapshot;

/// Any rank may be the first to fail.
fn any_rank(text: &str) -> String {
    text.replace("rank 1 failed", "rank 0 failed")
}

// checklist: torchtune: _get_sharding_strategy
#[test]
fn unregistered_names() {
    let scratch = Scratch::with_tokens();
    let error = |assignment| scratch.small().set(&[assignment]).fail();
    assert_snapshot!(error("trainer.strategy=fsdpp"), @"error: unknown strategy `fsdpp`; did you mean `fsdp`? Available: auto, ddp, diloco, fsdp, fsdp2, fsdp_tp, hsdp, model_parallel, single_device, tp. If a plugin crate provides `fsdpp`, link it with `use that_crate as _;` in the program");
    assert_snapshot!(error("trainer.process_group=nccl2"), @"error: unknown process_group `nccl2`; available: auto, shm, tcp. If a plugin crate provides `nccl2`, link it with `use that_crate as _;` in the program");
    assert_snapshot!(error("trainer.accelerator=gpu"), @"error: unknown accelerator `gpu`; did you mean `cuda`? Available: auto, cpu, cuda. If a plugin crate provides `gpu`, link it with `use that_crate as _;` in the program");
    assert_snapshot!(error("trainer.accelerator=cuda"), @r#"error: `trainer.accelerator` = "cuda": this program is built without CUDA. Build it with the feature `cuda` of fulgurite (`cargo build --release --features cuda`, with the CUDA toolkit), or set "cpu""#);
    assert_snapshot!(error("optimizer.type=adamv"), @"error: unknown optimizer `adamv`; did you mean `adamw`? Available: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd. If a plugin crate provides `adamv`, link it with `use that_crate as _;` in the program");
    assert_snapshot!(error("trainer.max_step=3"), @"error: --set trainer.max_step=3: unknown key `trainer.max_step`; did you mean `max_steps`?");
    assert_snapshot!(error("model.hidden=3"), @"error: --set model.hidden=3: unknown key `model.hidden` (similar keys of `model`: hidden_size, num_hidden_layers, hidden_act, hidden_activation, hidden_dropout_prob, hidden_dropout)");
    assert_snapshot!(error("max_steps=3"), @"error: --set max_steps=3: unknown key `max_steps`; did you mean `trainer.max_steps`? (the keys at the top level are seed, module, model, data, optimizer, scheduler, trainer, checkpoint)");
    assert_snapshot!(error("trainer.strategy={ type = 'fsdp', reshard = true }"), @"error: unknown key `trainer.strategy.reshard` (similar keys of `trainer.strategy`: reshard_after_forward)");
}

#[test]
fn nonsensical_values() {
    let scratch = Scratch::with_tokens();
    let error = |assignment| scratch.small().set(&[assignment]).fail();
    assert_snapshot!(error("trainer.max_time=soon"), @r#"error: --set trainer.max_time=soon: `trainer.max_time`: expected "DD:HH:MM:SS" or a number of seconds, found the string "soon""#);
    assert_snapshot!(error("trainer.max_steps=many"), @r#"error: --set trainer.max_steps=many: `trainer.max_steps`: expected an integer, at least 0, found the string "many""#);
    assert_snapshot!(error("trainer.devices=0"), @r#"error: --set trainer.devices=0: `trainer.devices`: expected a number of ranks, at least 1, or "auto", found `0`"#);
    assert_snapshot!(error("data.batch_size=0"), @"error: data.batch_size must be at least 1, got 0");
    assert_snapshot!(error("model.num_key_value_heads=3"), @"error: `model.num_key_value_heads`: must divide num_attention_heads = 2, found 3");
    assert_snapshot!(error("model.max_position_embeddings=4"), @"error: `model.max_position_embeddings`: must be at least data.seq_len = 7, found 4");
    assert_snapshot!(error("trainer.freeze=['nothing']"), @"error: `trainer.freeze`: no parameter matches `nothing`; there is model.embed_tokens.weight, and so on. A pattern names segments that follow each other anywhere in a path, and means everything under them too; `*` stands for any part of a segment, and a dot in front for the root");
    assert_snapshot!(error("trainer"), @"error: --set trainer: there is no `=`; expected key=value, such as trainer.max_steps=100");
}

#[test]
fn misfit_rank_counts() {
    let scratch = Scratch::with_tokens();
    let small = scratch.small();
    assert_snapshot!(any_rank(&small.clone().on("single_device", 2, 1).fail()), @"error: device mesh: strategy `single_device` runs on one rank, the world size is 2; set `trainer.devices = 1`, or choose `ddp` or `fsdp`");
    let started = |devices, of: usize, local: usize| {
        small
            .clone()
            .on("ddp", devices, 1)
            .env("RANK", 0)
            .env("LOCAL_RANK", 0)
            .env("WORLD_SIZE", of)
            .env("LOCAL_WORLD_SIZE", local)
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", 1)
    };
    assert_snapshot!(started(3, 2, 2).fail(), @"error: launch: trainer.devices = 3 and trainer.num_nodes = 1 make 3 ranks, but WORLD_SIZE = 2 were started (environment `torchelastic`). Set trainer.devices = 2 and trainer.num_nodes = 1, or start 3 processes");
    assert_snapshot!(started(1, 2, 1).fail(), @"error: launch: trainer.devices = 1 and trainer.num_nodes = 1 make 1 ranks, but WORLD_SIZE = 2 were started (environment `torchelastic`). Set trainer.devices = 1 and trainer.num_nodes = 2, or start 1 processes");
    assert_snapshot!(small.clone().set(&["trainer.num_nodes=2"]).fail(), @"error: launch: trainer.devices = 1 and trainer.num_nodes = 2 make 2 ranks, but nobody started this process as one of them. Ranks of several nodes need a launcher: `srun`, or on every node `torchrun --nnodes 2 --nproc-per-node 1 --no-python PROGRAM`, or whatever sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

#[test]
fn bad_plugin_options_are_refused_at_start() {
    let scratch = Scratch::with_tokens();
    let small = scratch.small().on("ddp", 2, 1);
    let error = |assignment| small.clone().set(&[assignment]).fail();
    assert_snapshot!(error("trainer.loggers=[{ type = 'mlflow', tracking_uri = 'ftp://host' }]"), @r#"error: `trainer.loggers`: mlflow's `tracking_uri` "ftp://host": expected the address of a server, such as http://127.0.0.1:5000"#);
    assert_snapshot!(error("trainer.callbacks=[{ type = 'early_stopping', monitor = '' }]"), @r#"error: `trainer.callbacks`, early_stopping: `monitor`: must name a metric, such as "val_loss""#);
}

#[test]
fn shared_memory_does_not_reach_another_host() {
    let scratch = Scratch::with_tokens();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let keys = ["trainer.num_nodes=2", "trainer.process_group=shm"];
            let job = scratch.small().on("ddp", 1, 1).set(&keys);
            job.env("RANK", rank)
                .env("LOCAL_RANK", 0)
                .env("GROUP_RANK", rank)
                .env("WORLD_SIZE", 2)
                .env("LOCAL_WORLD_SIZE", 1)
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port)
                .start()
        })
        .collect();
    let runs: Vec<_> = ranks.into_iter().map(crate::program::Running::wait).collect();
    assert!(runs.iter().all(|run| matches!(run.code(), Some(1 | 79))));
    assert!(runs.iter().any(|run| run.code() == Some(1)));
    let of_one = runs.iter().find(|run| run.code() == Some(1)).unwrap().first_error();
    assert_snapshot!(any_rank(of_one), @r#"error: rank 0 failed: process group `shm` connects the processes of one host, but of this job's 2 processes 1 are on this host. Across hosts set trainer.process_group = "auto", which uses `shm` only within them, or "tcp""#);
}

#[test]
fn doubtful_settings_are_warnings() {
    let scratch = Scratch::with_tokens();
    let keys = ["data.validation_fraction=0.001", "trainer.precision=bf16-true"];
    let run = scratch.small().set(&keys).start().wait();
    assert!(run.status.success(), "{}", run.stderr);
    for says in [
        "data.validation_fraction = 0.001 of 57 samples is none",
        "weights are kept in half precision",
    ] {
        assert!(run.stderr.contains(says), "{}", run.stderr);
    }
    // Four epochs of two steps: the fifth epoch is never reached.
    let keys = [
        "trainer.limit_train_batches=2",
        "trainer.check_val_every_n_epoch=5",
        "trainer.val_check_interval=1.0",
        "data.validation_fraction=0.2",
    ];
    let run = scratch.small().set(&keys).succeed();
    assert!(
        run.stderr.contains("nothing is validated, as no validation is due within the 8 steps")
    );
    let run = scratch.small().set(&keys).set(&["trainer.check_val_every_n_epoch=4"]).succeed();
    assert!(!run.stderr.contains("nothing is validated"), "{}", run.stderr);
}

#[test]
fn u16_ids_of_a_larger_vocabulary_are_a_warning() {
    let scratch = Scratch::with_tokens();
    let keys = ["model.vocab_size=70000", "data.vocab_size=70000", "trainer.max_steps=1"];
    let run = scratch.small().set(&keys).succeed();
    let says = "data.path has files of u16 ids, which end at 65535, and the vocabulary has 70000";
    assert!(run.stderr.contains(says), "{}", run.stderr);
}

#[test]
fn more_ranks_than_cores_are_a_warning() {
    let scratch = Scratch::with_tokens();
    let cores = std::thread::available_parallelism().unwrap().get();
    let job = scratch.small().on("ddp", cores + 1, 1).set(&["trainer.max_steps=1"]);
    let run = job.succeed();
    let cores = format!("{} ranks share {}", cores + 1, counted(cores, "core"));
    let warning = run.stderr.lines().next().unwrap().replace(&cores, "[N+1] ranks share [N cores]");
    assert_snapshot!(warning, @" WARN [N+1] ranks share [N cores] of this host, so they will wait for each other");
    assert_eq!(run.stderr.matches("share").count(), 1, "{}", run.stderr);
}

#[test]
fn missing_or_short_files() {
    let scratch = Scratch::with_tokens();
    scratch.tokens("short.u16", [1, 2, 3]);
    scratch.file("odd.u16", [1, 2, 3]);
    scratch.file("empty.txt", "");
    scratch.file("broken.toml", "[trainer\nmax_steps = 3");
    scratch.file("typo.toml", "[trainer]\nmax_stebs = 3");
    let error = |assignment| scratch.small().set(&[assignment]).fail();
    let config = |file| scratch.job(&["fit", "--config", file]).fail();
    assert_snapshot!(config("none.toml"), @"error: reading the configuration file none.toml: No such file or directory (os error 2)");
    assert_snapshot!(config("broken.toml"), @r#"
    error: broken.toml: TOML parse error at line 1, column 9
        |
      1 | [trainer
        |         ^
      unclosed table, expected `]`
    "#);
    assert_snapshot!(config("typo.toml"), @"error: typo.toml: unknown key `trainer.max_stebs`; did you mean `max_steps`?");
    assert_snapshot!(error("data.path=none.u16"), @"error: data: there is no file or folder none.u16 (data.path)");
    assert_snapshot!(error("data.path=short.u16"), @"error: data: short.u16 (data.path) has 3 tokens, but one sample needs 8 (data.seq_len = 7, and the token after it); give more data or lower data.seq_len");
    assert_snapshot!(error("data.path=odd.u16"), @"error: data: odd.u16 has 3 bytes, which is no whole number of ids of 2 bytes; is data.token_dtype right?");
    assert_snapshot!(error("data={ type = 'text', path = 'none' }"), @"error: data: there is no file or folder none (data.path)");
    assert_snapshot!(error("data={ type = 'text', path = 'empty.txt' }"), @"error: data: empty.txt (data.path): there is no text; left out: 1 empty (empty.txt)");
    assert_snapshot!(error("data.tokenizer=none.json"), @r#"error: data: there is no file none.json (data.tokenizer); name a Hugging Face tokenizer.json, a repository in the local Hub cache, or "bytes" for the built-in byte-level tokenizer"#);
    assert_snapshot!(error("model.from_pretrained=none"), @"error: none: there is no such folder; expected a folder with config.json and weights");
    // The ranks find the error one by one; the user reads it once.
    let of_two = scratch.small().on("fsdp", 2, 1).set(&["data.path=none.u16"]).fail();
    assert_snapshot!(any_rank(&of_two), @"error: data: there is no file or folder none.u16 (data.path)");
}

#[test]
fn misfit_checkpoints() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["checkpoint.dir=kept", "checkpoint.save_last=true"]);
    job.clone().set(&["trainer.max_steps=1"]).succeed();
    let resume = |assignments: &[&str]| {
        let path = "trainer.ckpt_path=kept/step-00000001";
        job.clone().set(&[path]).set(assignments).fail()
    };
    let other_model = resume(&["model.hidden_size=24", "model.num_hidden_layers=1"]);
    let (model, optimizer) = other_model.split_once("and does not fit this optimizer:").unwrap();
    assert!(optimizer.contains("(18):") && optimizer.contains("of another shape (24):"));
    assert!(optimizer.ends_with("`checkpoint.load.strict = false`"), "{optimizer}");
    assert_snapshot!(model, @r#"
    error: checkpoint kept/step-00000001: does not fit this model:
        unexpected, the checkpoint has it and the model does not (9):
          model.layers.1.input_layernorm.weight
          model.layers.1.mlp.down_proj.weight
          model.layers.1.mlp.gate_proj.weight
          model.layers.1.mlp.up_proj.weight
          model.layers.1.post_attention_layernorm.weight
          model.layers.1.self_attn.k_proj.weight
          model.layers.1.self_attn.o_proj.weight
          model.layers.1.self_attn.q_proj.weight
          model.layers.1.self_attn.v_proj.weight
        of another shape (12):
          model.embed_tokens.weight: [53, 24] in the model, [53, 20] in the checkpoint
          model.layers.0.input_layernorm.weight: [24] in the model, [20] in the checkpoint
          model.layers.0.self_attn.q_proj.weight: [24, 24] in the model, [20, 20] in the checkpoint
          model.layers.0.self_attn.k_proj.weight: [12, 24] in the model, [10, 20] in the checkpoint
          model.layers.0.self_attn.v_proj.weight: [12, 24] in the model, [10, 20] in the checkpoint
          model.layers.0.self_attn.o_proj.weight: [24, 24] in the model, [20, 20] in the checkpoint
          model.layers.0.post_attention_layernorm.weight: [24] in the model, [20] in the checkpoint
          model.layers.0.mlp.gate_proj.weight: [37, 24] in the model, [37, 20] in the checkpoint
          model.layers.0.mlp.up_proj.weight: [37, 24] in the model, [37, 20] in the checkpoint
          model.layers.0.mlp.down_proj.weight: [24, 37] in the model, [20, 37] in the checkpoint
          model.norm.weight: [24] in the model, [20] in the checkpoint
          lm_head.weight: [53, 24] in the model, [53, 20] in the checkpoint
    "#);
    // Two moments for each of 21 parameters; the message names the first ten.
    let other_optimizer = resume(&["optimizer.type=sgd"]);
    assert_eq!(other_optimizer.lines().count(), 2 + 20 + 2, "{other_optimizer}");
    let first: Vec<_> = other_optimizer.lines().take(3).collect();
    assert_snapshot!(first.join("\n"), @r#"
    error: checkpoint kept/step-00000001: does not fit this optimizer:
        unexpected, the checkpoint has it and the optimizer does not (42):
          state.lm_head.weight.exp_avg
    "#);
    assert_snapshot!(resume(&["trainer.ckpt_path=kept"]), @"error: `trainer.ckpt_path`: checkpoint kept: there is no checkpoint here: it has no manifest.json. Name the directory of one step, such as `step-00000010`; one without a manifest was never completed");
    assert_snapshot!(resume(&["trainer.ckpt_path=kept/step-00000007"]), @"error: `trainer.ckpt_path`: checkpoint kept/step-00000007: there is no checkpoint here: it has no manifest.json. Name the directory of one step, such as `step-00000010`; one without a manifest was never completed");
}

#[test]
fn non_finite_losses() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["scheduler=constant", "optimizer.lr=1e30"]);
    let without_steps = |stderr: String| {
        let lines = stderr.lines().filter(|line| !line.starts_with("step "));
        lines.collect::<Vec<_>>().join("\n")
    };
    assert_snapshot!(without_steps(job.fail()), @"error: non-finite gradient norm (NaN) at step 2; parameters are as they were before the step. A lower `optimizer.lr`, a longer warm-up (`scheduler.warmup_steps`) or `trainer.gradient_clip_val` may help; `trainer.detect_anomaly = true` names the layer where it came from");
    let detecting = job.clone().set(&["trainer.detect_anomaly=true"]);
    assert_snapshot!(without_steps(detecting.fail()), @"error: module `model.norm`: detect_anomaly: the gradient that its backward gives has 280 NaN among 280 (in backward of step 2)");
    let of_two = without_steps(job.on("fsdp", 2, 1).fail());
    assert_snapshot!(any_rank(&of_two), @"error: rank 0 failed: non-finite gradient norm (NaN) at step 2; parameters are as they were before the step. A lower `optimizer.lr`, a longer warm-up (`scheduler.warmup_steps`) or `trainer.gradient_clip_val` may help; `trainer.detect_anomaly = true` names the layer where it came from");
}
