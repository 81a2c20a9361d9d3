//! The callbacks `choices` and `likelihood`, against the values of transformers.

use std::fs;
use std::path::Path;
use std::process::Command;

use fulgurite_test_message::assert_says;
use serde_json::{Value, json};

use crate::tasks::{fixture, folder};

/// The metrics of the first validation of a command.
fn metrics(dir: &Path, command: &str, sets: &[&str]) -> Value {
    metrics_of("choices", dir, command, sets)
}

/// The metrics of the first validation of a command with a callback of `questions.jsonl`.
fn metrics_of(callback: &str, dir: &Path, command: &str, sets: &[&str]) -> Value {
    let callback = format!(
        "trainer.callbacks=[{{ type='{callback}', path='questions.jsonl', name='words' }}]"
    );
    let model = format!("model.from_pretrained={}", fixture("llama_yarn").display());
    let common = [
        model.as_str(),
        "data={ type='lines', path='lines.txt', tokenizer='tokenizer.json', seq_len=8, eos_token='[SEP]' }",
        callback.as_str(),
        "trainer.loggers=[]",
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args([command, "--output", "json"])
        .args(common.iter().chain(sets).flat_map(|set| ["--set", set]))
        .current_dir(dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut metrics = events.filter(|event| event["metrics"]["val_words_nll"].is_number());
    metrics.next().unwrap_or_else(|| panic!("{lines}"))["metrics"].clone()
}

const PIPELINE: [&str; 2] =
    ["trainer.devices=2", "trainer.strategy={ type='model_parallel', pipeline_parallel_size=2 }"];

#[test]
fn choices_are_scored_as_by_transformers() {
    let dir = folder();
    let rows = [
        json!({"context": "the cat is ", "choices": ["good", "bad film"], "answer": 0}),
        json!({"context": "the film is", "choices": [" not good", " bad", " the cat run"], "answer": 1}),
        json!({"context": "run", "choices": [" cat", " film"], "answer": 1}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(dir.path().join("questions.jsonl"), lines).unwrap();
    let fit = ["trainer.max_steps=1", "trainer.val_check_interval=1", "optimizer.lr=0.0"];
    let fsdp = ["trainer.devices=2", "trainer.strategy=fsdp"];
    let tensor = [
        "trainer.devices=2",
        "trainer.strategy={ type='model_parallel', tensor_parallel_size=2, parallelize='llama' }",
    ];
    for (command, sets) in [
        ("validate", vec![]),
        ("fit", fit.to_vec()),
        ("fit", [&fit[..], &fsdp].concat()),
        ("fit", [&fit[..], &tensor].concat()),
        ("fit", [&fit[..], &PIPELINE].concat()),
        ("validate", PIPELINE.to_vec()),
        ("validate", vec!["trainer.devices=4", PIPELINE[1]]),
    ] {
        let found = metrics(dir.path(), command, &sets);
        for (name, expected) in [("acc", 1.0), ("acc_norm", 2.0 / 3.0), ("nll", 3.4815003077)] {
            let found = found[format!("val_words_{name}")].as_f64().unwrap();
            assert!((found - expected).abs() < 1e-5, "{command} {sets:?}: {name} is {found}");
        }
    }
}

#[test]
fn likelihoods_are_those_of_transformers() {
    let dir = folder();
    let rows = [
        json!({"text": "the cat is good"}),
        json!({"context": "the film is", "text": " not good"}),
        json!({"text": "run cat run"}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(dir.path().join("questions.jsonl"), lines).unwrap();
    let fsdp = ["trainer.devices=2", "trainer.strategy=fsdp"];
    for sets in [&[][..], &fsdp, &PIPELINE] {
        let found = metrics_of("likelihood", dir.path(), "validate", sets);
        let expected =
            [("nll", 3.74526498), ("perplexity", 42.32021976), ("bits_per_byte", 1.08065504)];
        for (name, expected) in expected {
            let found = found[format!("val_words_{name}")].as_f64().unwrap();
            assert!((found - expected).abs() < 2e-5 * expected, "{sets:?}: {name} is {found}");
        }
    }
}

#[test]
fn bad_questions_are_named() {
    let dir = folder();
    let said = |line: &str| {
        fs::write(dir.path().join("questions.jsonl"), line).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["config", "check", "--set", "data.path=lines.txt"])
            .args(["--set", "trainer.callbacks=[{ type='choices', path='questions.jsonl' }]"])
            .args(["--set", "model={ type='llama', hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2 }"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap().lines().last().unwrap_or_default().to_owned()
    };
    assert_says!(said("{\"context\": \"x\"}"), "error: `trainer.callbacks` … field `choices` …");
    assert_says!(
        said(r#"{"context": "x", "choices": ["a"], "answer": 0}"#),
        "error: `trainer.callbacks`, choices: questions.jsonl, line 1 needs two choices …"
    );
    assert_says!(
        said(r#"{"context": "x", "choices": ["a", "b"], "answer": 2}"#),
        "error: `trainer.callbacks`, choices: questions.jsonl, line 1 … answer 2 of 2 …"
    );
    assert_says!(said(""), "error: `trainer.callbacks` … questions.jsonl has no questions");
}

/// Questions that do not fit the model are found before its first step.
#[test]
fn questions_beyond_the_model_are_named() {
    let dir = folder();
    let said = |context: &str| {
        let line = json!({"context": context, "choices": ["good", "bad"], "answer": 0});
        fs::write(dir.path().join("questions.jsonl"), line.to_string()).unwrap();
        let model = format!("model.from_pretrained={}", fixture("llama_yarn").display());
        let data = "data={ type='lines', path='lines.txt', tokenizer='tokenizer.json', seq_len=8, eos_token='[SEP]' }";
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["fit", "--set", &model, "--set", data])
            .args(["--set", "trainer.callbacks=[{ type='choices', path='questions.jsonl' }]"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap().lines().last().unwrap_or_default().to_owned()
    };
    assert_says!(said(""), "error: `trainer.callbacks`, choices: question 0 … no token follows …");
    assert_says!(
        said(&"the ".repeat(300)),
        "error: `trainer.callbacks` … 301 tokens … 64 positions"
    );
}
