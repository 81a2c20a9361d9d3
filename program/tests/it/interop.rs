//! Models that `fulgurite` trains and converts, in `transformers`. Requires a Python with it:
//!
//! ```sh
//! python3 -m venv /tmp/interop
//! /tmp/interop/bin/pip install torch transformers safetensors
//! FULGURITE_PYTHON=/tmp/interop/bin/python cargo test -p fulgurite-cli --test it interop:: -- --ignored
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Runs a program, which must succeed, and returns its stderr.
#[track_caller]
fn run(program: impl AsRef<OsStr>, args: &[String]) -> String {
    let program = program.as_ref();
    let output = Command::new(program)
        .args(args)
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap_or_else(|e| panic!("{}: {e}; see this file's beginning", program.display()));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{args:?}:\n{stdout}\n{stderr}");
    println!("{stdout}");
    stderr
}

/// The fixtures of language models.
fn decoders() -> Vec<PathBuf> {
    let folder = root().join("plugins/models/tests/fixtures");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_decoder = |path: &PathBuf| {
        let Ok(config) = fs::read(path.join("config.json")) else { return false };
        let config: Value = serde_json::from_slice(&config).unwrap();
        let class = config["architectures"][0].as_str().unwrap();
        ["ForCausalLM", "LMHeadModel"].iter().any(|end| class.ends_with(end))
    };
    let mut decoders: Vec<_> = entries.filter(is_decoder).collect();
    decoders.sort();
    assert!(decoders.len() >= 16, "{decoders:?}");
    decoders
}

/// Trains a fixture for two steps on two ranks of `fsdp` without changing its weights, and converts
/// the checkpoint.
fn trained(fixture: &Path, scratch: &Path) -> PathBuf {
    let program = env!("CARGO_BIN_EXE_fulgurite");
    let tokens = scratch.join("tokens.bin");
    let ids = (0..200u16).flat_map(|i| (3 + i * 7 % 40).to_le_bytes());
    fs::write(&tokens, ids.collect::<Vec<u8>>()).unwrap();
    let run_dir = scratch.join(fixture.file_name().unwrap());
    let sets = [
        "module.type=causal_lm".to_owned(),
        format!("model.from_pretrained={}", fixture.display()),
        "data.type=tokens".to_owned(),
        format!("data.path={}", tokens.display()),
        "data.seq_len=8".to_owned(),
        "data.batch_size=2".to_owned(),
        "optimizer.lr=0.0".to_owned(),
        "trainer.devices=2".to_owned(),
        "trainer.strategy=fsdp".to_owned(),
        "trainer.max_steps=2".to_owned(),
        format!("trainer.default_root_dir={}", run_dir.display()),
        format!("checkpoint.dir={}", run_dir.join("checkpoints").display()),
    ];
    let sets = sets.into_iter().flat_map(|set| ["--set".to_owned(), set]);
    run(program, &[vec!["fit".to_owned()], sets.collect()].concat());
    let (step, out) = (run_dir.join("checkpoints/step-00000002"), run_dir.join("converted"));
    let paths = [&step, &out].map(|path| path.to_str().unwrap().to_owned());
    let command = ["checkpoint", "convert"].map(str::to_owned);
    let to = ["--to", "hugging-face"].map(str::to_owned);
    let said = run(program, &[&command[..], &paths, &to].concat());
    assert!(said.contains("there is no tokenizer"), "{said}");
    out
}

#[test]
#[ignore = "needs a Python with transformers"]
fn transformers_loads_trained_decoders() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let scratch = tempfile::tempdir().unwrap();
    let mut args = vec![root().join("tests/interop/transformers_logits.py")];
    for fixture in decoders() {
        args.push(trained(&fixture, scratch.path()));
        args.push(fixture.join("expected.safetensors"));
    }
    let args: Vec<String> = args.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    run(python, &args);
}
