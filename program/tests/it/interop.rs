//! Models that `fulgurite` trains, converts and serves, in `transformers`, llama.cpp and lm-eval.
//! Requires a Python with them:
//!
//! ```sh
//! python3 -m venv target/interop
//! target/interop/bin/pip install torch transformers safetensors peft sentencepiece gguf \
//!     llama-cpp-python 'lm-eval[api]'
//! FULGURITE_PYTHON=target/interop/bin/python cargo test -p fulgurite-cli --test it interop:: -- --ignored
//! ```

use std::path::{Path, PathBuf};

use crate::encoders::{ENCODERS, Encoder, data};
use crate::models::{decoders, fit, root, run};

/// Trains a decoder on two ranks of `fsdp` without changing its weights, and converts the
/// checkpoint.
fn trained(decoder: &Path, scratch: &Path) -> PathBuf {
    let dir = scratch.join(decoder.file_name().unwrap());
    let checkpoints = format!("checkpoint.dir={}", dir.join("checkpoints").display());
    let two_ranks = ["trainer.devices=2", "trainer.strategy=fsdp", "data.batch_size=2"];
    let losses = fit(
        decoder,
        scratch,
        &[&two_ranks[..], &["trainer.max_steps=2", "optimizer.lr=0.0", &checkpoints]].concat(),
    );
    assert_eq!(losses.len(), 2);
    let (step, out) = (dir.join("checkpoints/step-00000002"), dir.join("converted"));
    let (step, to) = (step.to_str().unwrap(), out.to_str().unwrap());
    let args = ["checkpoint", "convert", step, to, "--to", "hugging-face"].map(str::to_owned);
    let [_, said] = run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    assert!(said.contains("there is no tokenizer"), "{said}");
    out
}

/// As [`trained`], for an encoder.
fn trained_encoder(encoder: &Encoder, data: &Path) -> PathBuf {
    let checkpoints = format!("checkpoint.dir={}-checkpoints", encoder.name);
    let sets = [
        "trainer.devices=2",
        "trainer.strategy=fsdp",
        "data.batch_size=2",
        "trainer.max_steps=2",
        "optimizer.lr=0.0",
        &checkpoints,
    ];
    assert_eq!(encoder.fit(data, &sets).len(), 2);
    let step = data.join(format!("{}-checkpoints/step-00000002", encoder.name));
    let out = data.join(format!("{}-converted", encoder.name));
    let (step, to) = (step.to_str().unwrap(), out.to_str().unwrap());
    let args = ["checkpoint", "convert", step, to, "--to", "hugging-face"].map(str::to_owned);
    run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    out
}

#[test]
#[ignore = "needs a Python with transformers"]
fn transformers_loads_trained_models() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let (scratch, data) = (tempfile::tempdir().unwrap(), data());
    let mut args = vec![root().join("tests/interop/transformers_logits.py")];
    for decoder in decoders() {
        args.push(trained(&decoder, scratch.path()));
        args.push(decoder.join("expected.safetensors"));
    }
    for encoder in &ENCODERS {
        args.push(trained_encoder(encoder, data.path()));
        args.push(encoder.fixture().join("expected.safetensors"));
    }
    let args: Vec<String> = args.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

#[test]
#[ignore = "needs a Python with transformers and llama-cpp-python"]
fn llama_cpp_runs_converted_models() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let scratch = tempfile::tempdir().unwrap();
    let script = root().join("tests/interop/gguf_llama_cpp.py");
    let words = [script.as_path(), Path::new(env!("CARGO_BIN_EXE_fulgurite")), scratch.path()];
    let args = words.map(|path| path.to_str().unwrap().to_owned());
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

#[test]
#[ignore = "needs a Python with transformers and lm-eval"]
fn lm_eval_scores_a_server_as_transformers() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = root().join("tests/interop/lm_eval_server.py");
    let words = [script.as_path(), Path::new(env!("CARGO_BIN_EXE_fulgurite"))];
    let args = words.map(|path| path.to_str().unwrap().to_owned());
    let [compared, _] = run(python, &args);
    println!("{compared}");
}
