//! `fulgurite checkpoint convert --to gguf` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::quantized::gguf_file::Content;
use fulgurite::prelude::*;

use crate::models::{fit, root};

fn fixture(name: &str) -> PathBuf {
    root().join("plugins/models/tests/fixtures").join(name)
}

/// Runs `fulgurite checkpoint convert INPUT OUTPUT --to gguf` with more words.
fn convert(input: &Path, output: &Path, words: &[&str]) -> (bool, String, String) {
    let ran = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["checkpoint", "convert"])
        .args([input, output])
        .args(["--to", "gguf"])
        .args(words)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ran.status.success(), text(ran.stdout), text(ran.stderr))
}

/// The bytes of a file that is converted.
#[track_caller]
fn file(input: &Path, output: &Path, words: &[&str]) -> Vec<u8> {
    let (ok, stdout, stderr) = convert(input, output, words);
    assert!(ok && stdout.starts_with("wrote "), "{stdout}\n{stderr}");
    fs::read(output).unwrap()
}

#[track_caller]
fn fails(input: &Path, output: &Path, words: &[&str]) -> String {
    let (ok, stdout, stderr) = convert(input, output, words);
    assert!(!ok && stdout.is_empty(), "{stdout}\n{stderr}");
    stderr
}

fn values(path: &Path, name: &str) -> Tensor {
    let mut file = fs::File::open(path).unwrap();
    let content = Content::read(&mut file).unwrap();
    content.tensor(&mut file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap()
}

#[test]
fn checkpoints_give_the_file_of_their_model() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    for name in ["llama", "phi3", "gemma"] {
        let checkpoints =
            format!("checkpoint.dir={}", path(&format!("{name}.checkpoints")).display());
        let sets = [
            "trainer.devices=2",
            "trainer.strategy=fsdp",
            "trainer.max_steps=2",
            "trainer.ema_decay=0.5",
            "optimizer.lr=0.01",
            &checkpoints,
        ];
        fit(&fixture(name), scratch.path(), &sets);
        let step = path(&format!("{name}.checkpoints/step-00000002"));
        let whole = path(&format!("{name}.whole"));
        for (average, dtype) in [(false, "f32"), (true, "f32"), (false, "q8_0")] {
            let average: &[&str] = if average { &["--average"] } else { &[] };
            let line =
                [&["--dtype", dtype, "--without-tokenizer", "--overwrite"], average].concat();
            let direct = file(&step, &path("model.gguf"), &line);
            // A Hugging Face directory of the checkpoint gives the same bytes.
            let ran = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
                .args(["checkpoint", "convert", "--to", "hugging-face", "--overwrite"])
                .args([&step, &whole])
                .args(average)
                .status()
                .unwrap();
            assert!(ran.success(), "{name}");
            let line = ["--dtype", dtype, "--without-tokenizer", "--overwrite"];
            let through = file(&whole, &path("model.gguf"), &line);
            assert!(direct == through, "{name}: {average:?}, {dtype}");
            let base = file(&fixture(name), &path("model.gguf"), &line);
            assert!(base != direct, "{name}: training changed nothing");
        }
    }
}

#[test]
fn adapters_are_merged_or_written_alone() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    let checkpoints = format!("checkpoint.dir={}", path("checkpoints").display());
    let sets = [
        "trainer.max_steps=3",
        "trainer.adapters={ targets = [\"q_proj\", \"down_proj\"], rank = 2, alpha = 3 }",
        "optimizer.lr=0.1",
        &checkpoints,
    ];
    fit(&fixture("llama"), scratch.path(), &sets);
    let adapter = path("version_0/adapter");
    let plain = ["--without-tokenizer", "--dtype", "f32"];
    let base = path("base.gguf");
    file(&fixture("llama"), &base, &plain);
    let merged = path("merged.gguf");
    let adapter_word = adapter.to_str().unwrap();
    file(&fixture("llama"), &merged, &[&plain[..], &["--adapter", adapter_word]].concat());
    let lora = path("lora.gguf");
    file(&adapter, &lora, &[]);
    for name in ["blk.0.attn_q.weight", "blk.2.ffn_down.weight"] {
        let [a, b] = ["a", "b"].map(|kind| values(&lora, &format!("{name}.lora_{kind}")));
        let change = (b.matmul(&a).unwrap() * 1.5).unwrap();
        let applied = (values(&base, name) + &change).unwrap();
        let difference =
            (applied - values(&merged, name)).unwrap().abs().unwrap().max_all().unwrap();
        assert!(difference.to_scalar::<f32>().unwrap() < 1e-6, "{name}");
        let largest = change.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(largest > 1e-3, "{name}: the adapter changes nothing");
    }
    let step = path("checkpoints/step-00000003");
    let error = fails(&step, &path("x.gguf"), &plain);
    assert!(error.contains(".lora_") && error.contains("--adapter DIR"), "{error}");
    let error = fails(&adapter, &path("x.gguf"), &["--average"]);
    assert!(error.contains("--average"), "{error}");
    let error = fails(&adapter, &path("x.gguf"), &["--dtype", "q4_k"]);
    assert!(error.contains("q8_0"), "{error}");
    let error = fails(&adapter, &path("x.gguf"), &["--base", "nowhere"]);
    assert!(error.contains("nowhere"), "{error}");
    assert!(!path("x.gguf").exists());
}

#[test]
fn outputs_are_kept_without_permission() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("a.gguf");
    fs::write(&out, "mine").unwrap();
    let llama = fixture("llama");
    let error = fails(&llama, &out, &["--without-tokenizer"]);
    assert!(error.contains("--overwrite"), "{error}");
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    // A model that cannot be written leaves the file alone, too.
    let error = fails(&fixture("gpt2"), &out, &["--without-tokenizer", "--overwrite"]);
    assert!(error.contains("scale_attn_by_inverse_layer_idx"), "{error}");
    assert_eq!(fs::read(&out).unwrap(), b"mine");
    file(&llama, &out, &["--without-tokenizer", "--overwrite"]);
    assert!(fs::read(&out).unwrap().starts_with(b"GGUF"));
    let error = fails(&llama, scratch.path(), &["--without-tokenizer"]);
    assert!(error.contains("directory"), "{error}");
    let error = fails(&llama, &scratch.path().join("no/a.gguf"), &["--without-tokenizer"]);
    assert!(error.contains("no such directory"), "{error}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
}

#[test]
fn words_that_do_not_fit_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("a.gguf");
    let llama = fixture("llama");
    for (words, expected) in [
        (&["--without-tokenizer", "--dtype", "q5_k"][..], "q4_k"),
        (&["--without-tokenizer", "--dtype", "f64"], "q8_0 or q4_k"),
        (&["--without-tokenizer", "--shards", "2"], "--shards"),
        (&["--without-tokenizer", "--rename", "a=b"], "--rename"),
        (&["--without-tokenizer", "--config", "x"], "--config"),
        (&["--without-tokenizer", "--base", "x"], "--base"),
        (&["--without-tokenizer", "--average"], "average"),
        (&[], "--without-tokenizer"),
    ] {
        let error = fails(&llama, &out, words);
        assert!(error.contains(expected), "{words:?}: {error}");
    }
    let ran = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["checkpoint", "convert"])
        .args([&llama, &out])
        .args(["--to", "full", "--dtype", "q8_0"])
        .output()
        .unwrap();
    let error = String::from_utf8(ran.stderr).unwrap();
    assert!(!ran.status.success() && error.contains("--to gguf"), "{error}");
    assert!(!out.exists());
}
