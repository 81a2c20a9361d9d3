//! `fulgurite fit` on the models of `fulgurite-models`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The largest difference between the losses of two meshes, relative to the loss.
const TOLERANCE: f64 = 1e-5;

pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Runs a program, which must succeed, and returns its stdout and stderr.
#[track_caller]
pub(crate) fn run(program: impl AsRef<OsStr>, args: &[String]) -> [String; 2] {
    let program = program.as_ref();
    let output = Command::new(program).args(args).env("OMP_NUM_THREADS", "1").output();
    let output = output.unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{args:?}:\n{}\n{}", said[0], said[1]);
    said
}

/// The tiny models of `plugins/models/tests/fixtures` that predict the next token.
pub(crate) fn decoders() -> Vec<PathBuf> {
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

/// Trains a decoder from its weights with `fulgurite fit`, and returns the loss of each step.
#[track_caller]
pub(crate) fn fit(decoder: &Path, scratch: &Path, sets: &[&str]) -> Vec<f64> {
    let tokens = scratch.join("tokens.bin");
    let ids = (0..400u16).flat_map(|i| (3 + i * 7 % 40).to_le_bytes());
    fs::write(&tokens, ids.collect::<Vec<u8>>()).unwrap();
    let own = [
        "module.type=causal_lm".to_owned(),
        format!("model.from_pretrained={}", decoder.display()),
        "data.type=tokens".to_owned(),
        format!("data.path={}", tokens.display()),
        "data.seq_len=8".to_owned(),
        format!("trainer.default_root_dir={}", scratch.display()),
        "trainer.loggers=[]".to_owned(),
    ];
    let sets = own.into_iter().chain(sets.iter().map(|&set| set.to_owned()));
    let sets = sets.flat_map(|set| ["--set".to_owned(), set]);
    let fit = ["fit", "--output", "json"].map(str::to_owned);
    let args: Vec<String> = fit.into_iter().chain(sets).collect();
    let [stdout, _] = run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    let events = stdout.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter_map(|event| event["train_loss"].as_f64()).collect()
}

#[test]
fn plans_train_every_decoder_as_one_device() {
    let scratch = tempfile::tempdir().unwrap();
    for decoder in decoders() {
        let train = |devices: &str, strategy: &str| {
            let steps = ["trainer.max_steps=3", "data.batch_size=2", "scheduler=constant"];
            fit(&decoder, scratch.path(), &[&steps[..], &[devices, strategy]].concat())
        };
        let alone = train("trainer.devices=1", "trainer.strategy=single_device");
        assert_eq!(alone.len(), 3);
        for plan in ["'hf'", "'llama'", "{ type = 'llama', sequence_parallel = true }"] {
            let strategy = format!(
                "trainer.strategy={{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = {plan} }}"
            );
            let losses = train("trainer.devices=2", &strategy);
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * a;
            assert!(
                losses.len() == 3 && alone.iter().zip(&losses).all(close),
                "{} with {plan}: {losses:?}, alone {alone:?}",
                decoder.display()
            );
        }
    }
}

#[test]
fn modules_are_chosen_by_name() {
    for (set, expected) in [
        (
            "module.type=spiral",
            "there is no module \"spiral\"; the modules are causal_lm, masked_lm",
        ),
        ("module={ type = \"causal_lm\", depth = 3 }", "`module.depth`: unknown key"),
        ("model.type=bert", "is an encoder, which does not predict the next token"),
    ] {
        let mut args = vec!["config", "check", "--set", set];
        args.extend(["--set", "data.path=Cargo.toml"]);
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(args)
            .current_dir(root())
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(expected), "{set}: {stderr}");
    }
}
