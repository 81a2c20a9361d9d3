//! `fulgurite recipes`, each of which trains in a small form.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fulgurite(directory: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(args)
        .current_dir(directory)
        .env("FULGURITE_TRAINER__DEFAULT_ROOT_DIR", directory)
        .output()
        .unwrap()
}

#[track_caller]
fn succeed(directory: &Path, args: &[&str]) -> String {
    let output = fulgurite(directory, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/models/tests/fixtures/llama_yarn")
}

/// What makes a recipe small enough for a test.
fn small(name: &str) -> Vec<String> {
    let mut keys = vec![
        "trainer.max_steps=2".to_owned(),
        "trainer.accumulate_grad_batches=1".to_owned(),
        "data.seq_len=16".to_owned(),
        "checkpoint.save_last=false".to_owned(),
    ];
    if name == "pretrain" {
        keys.extend(["model.hidden_size=32", "model.num_hidden_layers=2"].map(str::to_owned));
        return keys;
    }
    keys.push(format!("model.from_pretrained={}", model().display()));
    // The model's vocabulary is smaller than a byte.
    let data = "data={ type = 'tokens', path = 'ids.u16', seq_len = 16, batch_size = 2 }";
    keys.push(data.to_owned());
    if name == "qlora" {
        keys.push("trainer.quantization.block_size=4".to_owned());
    }
    keys
}

#[test]
fn recipes_train_as_they_are_listed() {
    let temp = tempfile::tempdir().unwrap();
    let ids: Vec<u8> = (0..600u16).flat_map(|i| (i * 7 % 41).to_le_bytes()).collect();
    std::fs::write(temp.path().join("ids.u16"), ids).unwrap();
    let list = succeed(temp.path(), &["recipes", "list"]);
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"lora_fsdp"), "{list}");
    std::fs::write(temp.path().join("text.txt"), "to be or not to be ".repeat(200)).unwrap();
    for name in names {
        succeed(temp.path(), &["recipes", "copy", name]);
        let config = format!("{name}.toml");
        let keys = small(name);
        let mut args = vec!["fit", "--config", &config];
        args.extend(keys.iter().flat_map(|key| ["--set", key]));
        succeed(temp.path(), &args);
    }
}

#[test]
fn recipes_are_not_overwritten() {
    let temp = tempfile::tempdir().unwrap();
    let copy = ["recipes", "copy", "qlora", "mine.toml"];
    succeed(temp.path(), &copy);
    let again = fulgurite(temp.path(), &copy);
    assert!(!again.status.success());
    assert!(String::from_utf8_lossy(&again.stderr).contains("mine.toml exists already"));
    let unknown = fulgurite(temp.path(), &["recipes", "copy", "qlorra"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("did you mean `qlora`?"));
}
