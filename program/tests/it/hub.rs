//! `fulgurite hub`, and runs that find what it downloads.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn fulgurite(cache: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    command.env("HF_HUB_CACHE", cache).env_remove("HF_HUB_OFFLINE").args(args);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_network_is_asked_only_if_it_may_be() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    command.env("HF_HUB_CACHE", folder.path()).env("HF_HUB_OFFLINE", "1");
    let output = command.args(["hub", "download", "owner/name"]).output().unwrap();
    assert!(
        !output.status.success() && said(&output).contains("HF_HUB_OFFLINE is 1"),
        "{output:?}"
    );
    let output = fulgurite(folder.path(), &["hub", "download", "../name"]);
    assert!(said(&output).contains("expected owner/name"), "{output:?}");
    let output = fulgurite(folder.path(), &["hub", "path", "owner/name"]);
    assert!(said(&output).contains("`fulgurite hub download owner/name`"), "{output:?}");
}

#[test]
fn runs_find_tokenizers_of_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--owner--name");
    let snapshot = repository.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), COMMIT).unwrap();
    fs::write(
        snapshot.join("tokenizer.json"),
        r#"{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},
            "model":{"type":"WordLevel","vocab":{"[UNK]":0,"one":1,"two":2},"unk_token":"[UNK]"}}"#,
    )
    .unwrap();
    let text = cache.path().join("text.txt");
    fs::write(&text, "one two one two two ".repeat(50)).unwrap();
    let path = format!("data.path={:?}", text.display().to_string());
    let inspect = |tokenizer: &str| {
        let tokenizer = format!("data.tokenizer={tokenizer:?}");
        let set = ["--set", &path, "--set", &tokenizer, "--set", "data.seq_len=8"];
        fulgurite(cache.path(), &[&["data", "inspect"][..], &set].concat())
    };
    let output = inspect("owner/name");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("two"), "{output:?}");
    let output = inspect("owner/other");
    assert!(said(&output).contains("there is no file owner/other (data.tokenizer)"), "{output:?}");
    let output = fulgurite(cache.path(), &["hub", "path", "owner/name"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), snapshot.display().to_string());
}
