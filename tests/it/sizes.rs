//! Impossible sizes and values are refused before a rank starts.

use std::fs;
use std::io::Write as _;

use insta::assert_snapshot;

use crate::program::{Job, Scratch};

/// The error of `job`, which must have created nothing.
fn refused(scratch: &Scratch, job: &Job) -> String {
    let message = job.fail();
    let files: Vec<_> =
        fs::read_dir(scratch.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["tokens.u16"], "{message}");
    message
}

#[test]
fn absurd_sizes_are_refused_by_key() {
    let scratch = Scratch::with_tokens();
    let error = |assignment: &str| refused(&scratch, &scratch.small().set(&[assignment]));
    assert_snapshot!(error("data.batch_size=1000000000000000000"), @"error: data.batch_size = 1000000000000000000 times data.seq_len = 7 are the tokens of a micro-batch, which must be at most 134217728");
    assert_snapshot!(error("model.vocab_size=9223372036854775807"), @"error: --set model.vocab_size=9223372036854775807: `model.vocab_size`: expected an integer from 1 to 134217728, found 9223372036854775807");
    assert_snapshot!(error("model.head_dim=2147483648"), @"error: --set model.head_dim=2147483648: `model.head_dim`: expected an integer from 1 to 1048576, found 2147483648");
    assert_snapshot!(error("model.num_hidden_layers=1000000000"), @"error: --set model.num_hidden_layers=1000000000: `model.num_hidden_layers`: expected an integer from 1 to 16384, found 1000000000");
    assert_snapshot!(error("trainer.accumulate_grad_batches=1000000000000000000"), @"error: `trainer.accumulate_grad_batches`: must be at most 1048576, found 1000000000000000000");
    let devices = error("trainer.devices=4611686018427387904");
    assert!(devices.starts_with("error: `trainer.devices`: must be at most "), "{devices}");
}

#[test]
fn untrainable_values_are_refused_by_key() {
    let scratch = Scratch::with_tokens();
    let error = |assignment: &str| {
        let ranks = scratch.small().on("ddp", 2, 1).set(&[assignment]);
        let message = refused(&scratch, &ranks);
        assert_eq!(message, refused(&scratch, &scratch.small().set(&[assignment])));
        message
    };
    assert_snapshot!(error("model.rms_norm_eps=inf"), @"error: --set model.rms_norm_eps=inf: `model.rms_norm_eps`: expected a number, found inf or nan");
    assert_snapshot!(error("model.initializer_range=-1"), @"error: `model.initializer_range`: must be from 0 to 1000, found -1.0");
    assert_snapshot!(error("model.hidden_size=21"), @"error: `model.hidden_size`: 21 is not divisible by num_attention_heads = 2");
    assert_snapshot!(error("optimizer.eps=3.5e38"), @"error: optimizer.eps must be a number of zero or more and at most 3.4028235e38, the largest of f32, got 3.5e38");
    assert_snapshot!(error("optimizer.betas=[1.5, 0.9]"), @"error: optimizer.betas[0] must be at least 0 and less than 1, got 1.5");
    assert_snapshot!(error("optimizer.no_decay=['nothing']"), @r#"error: optimizer.no_decay: the pattern "nothing" matches no parameter; the model has model.embed_tokens.weight, model.layers.0.input_layernorm.weight, model.layers.0.self_attn.q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight, model.layers.0.self_attn.o_proj.weight, …. A pattern names segments that follow each other anywhere in a path, and means everything under them too; `*` stands for any part of a segment, and a dot in front for the root"#);
    assert_snapshot!(error("scheduler={ type = 'cosine', min_factor = 2.0 }"), @"error: scheduler.min_factor must be from 0 to 1, got 2");
    assert_snapshot!(error("trainer.process_group={ type = 'shm', chunk_bytes = 1 }"), @"error: trainer.process_group.chunk_bytes is 1; it must be between 4096 (4 KiB) and 1073741824 (1 GiB)");
    assert_snapshot!(error("checkpoint.dir=tokens.u16"), @"error: `checkpoint.dir`: tokens.u16 is not a directory");
}

#[test]
fn model_larger_than_machine_is_refused() {
    let scratch = Scratch::with_tokens();
    // 16 TiB of parameters.
    let huge = scratch.small().set(&["model.vocab_size=134217728", "model.hidden_size=16384"]);
    let message = refused(&scratch, &huge);
    let (needs, rest) = message.split_once("; the host has ").unwrap();
    assert_snapshot!(needs, @r#"error: `model`: the model of 4399660843008 parameters takes at least 64.0 TiB on each of this host's 1 rank under `trainer.strategy` = "single_device" (parameters 16.0 TiB, gradients 16.0 TiB, optimizer state 32.0 TiB), 64.0 TiB together"#);
    let (_, advice) = rest.split_once(". ").unwrap();
    assert_snapshot!(advice, @r#"Make `[model]` smaller, shard it over more ranks and hosts (`fsdp`), or set `trainer.memory_check = "warn"`"#);
    // Sharded over two ranks, each needs half of it.
    let sharded = refused(&scratch, &huge.on("fsdp", 2, 1));
    let (needs, _) = sharded.split_once("; the host has ").unwrap();
    assert_snapshot!(needs, @r#"error: `model`: the model of 4399660843008 parameters takes at least 48.0 TiB on each of this host's 2 ranks under `trainer.strategy` = "fsdp" (parameters 8.0 TiB, gradients 8.0 TiB, the largest unit, gathered 16.0 TiB, optimizer state 16.0 TiB), 96.0 TiB together"#);
}

#[test]
fn model_over_process_limit_is_refused() {
    let scratch = Scratch::with_tokens();
    let limited = scratch.small().limited("-v 4194304");
    let message = refused(&scratch, &limited.clone().set(&["model.vocab_size=40000000"]));
    assert!(message.contains("a process may have 4.0 GiB"), "{message}");
    limited.succeed();
}

#[test]
fn shared_memory_over_limit_is_refused() {
    let scratch = Scratch::with_tokens();
    let many = scratch.small().on("ddp", 50, 1).set(&["trainer.max_steps=1"]);
    let message = refused(&scratch, &many.clone().limited("-v 4194304"));
    let (shared, _) = message.split_once("; the model of ").unwrap();
    assert_snapshot!(shared, @"error: `trainer.devices`: the process groups of this host's 50 ranks share 302.2 MiB, and each rank maps 2.7 GiB");
    let (_, advice) = message.split_once(". ").unwrap();
    assert_snapshot!(advice, @r#"Start fewer ranks on a host, let the options of `trainer.process_group` make it share less, or set `trainer.memory_check = "warn"`"#);
    // With chunks of a quarter of the size each rank maps less. The address space that ranks use
    // for each other's tensors leaves enough for their process groups.
    many.clone().set(&["trainer.process_group.chunk_bytes=65536"]).limited("-v 4194304").succeed();
    many.limited("-v 16777216").succeed();
}

#[test]
fn data_larger_than_machine_is_refused() {
    let scratch = Scratch::with_tokens();
    let mut lines = fs::File::create(scratch.path().join("lines.txt")).unwrap();
    for _ in 0..100_000 {
        lines.write_all(b"A line of the beginning, which is read before ranks start.\n").unwrap();
    }
    // The rest of the file is sparse: it takes no disk space.
    lines.set_len(4 << 40).unwrap();
    let keys = ["data.type=lines", "data.path=lines.txt", "model.vocab_size=257"];
    let message = scratch.small().set(&keys).fail();
    let (needs, rest) = message.split_once("; the model of ").unwrap();
    // Two bytes per byte of text, because each byte is a token.
    assert_snapshot!(needs, @"error: `data`: the data takes about 8.1 TiB on each of this host's 1 rank, 8.1 TiB together");
    let (_, advice) = rest.split_once(" are available. ").unwrap();
    assert_snapshot!(advice, @r#"Keep the ids of text in files (`data.cache_dir`, or token files), start fewer ranks on a host, or set `trainer.memory_check = "warn"`"#);
}
