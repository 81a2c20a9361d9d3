//! `fulgurite fit` with an optimizer whose weights differ in training and evaluation.

use std::path::Path;
use std::process::Command;

use fulgurite_test_message::assert_says;
use serde_json::Value;

use crate::tasks::{fixture, folder};

/// The events of a command with these settings.
fn events(dir: &Path, command: &str, sets: &[&str]) -> Vec<Value> {
    let model = format!("model.from_pretrained={}", fixture("llama_yarn").display());
    let common = [
        model.as_str(),
        "data={ type='lines', path='lines.txt', tokenizer='tokenizer.json', seq_len=8, eos_token='[SEP]', \
         batch_size=2, validation_fraction=0.3 }",
        "optimizer={ type='schedule_free_adamw', lr=0.01, warmup_steps=2 }",
        "scheduler=constant",
        "trainer.loggers=[]",
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args([command, "--output", "json"])
        .args(common.iter().chain(sets).flat_map(|set| ["--set", set]))
        .current_dir(dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command} {sets:?}: {said}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(events: &[Value]) -> Vec<f64> {
    events.iter().filter_map(|event| event["train_loss"].as_f64()).collect()
}

fn validations(events: &[Value]) -> Vec<f64> {
    events.iter().filter_map(|event| event["val_loss"].as_f64()).collect()
}

#[test]
fn evaluations_and_checkpoints_have_the_average() {
    for mesh in [&[][..], &["trainer.devices=2", "trainer.strategy=fsdp", "data.batch_size=1"]] {
        let dir = folder();
        let dir = dir.path();
        let of = |command: &str, sets: &[&str]| events(dir, command, &[mesh, sets].concat());
        let alone = losses(&of("fit", &["trainer.max_steps=6", "checkpoint.save_last=false"]));
        let watched = [
            "trainer.max_steps=6",
            "trainer.val_check_interval=2",
            "checkpoint={ dir='kept', every_n_steps=3, keep_last=9 }",
        ];
        let found = of("fit", &watched);
        // Neither validations nor checkpoints change the training.
        assert_eq!(losses(&found), alone);
        let validated = validations(&found);
        assert!(validated.len() >= 3, "{validated:?}");
        let resumed = of("fit", &["trainer.max_steps=6", "trainer.ckpt_path=kept/step-00000003"]);
        assert_eq!(losses(&resumed), alone[3..]);
        // Checkpoints and exported models have the validated weights.
        let last = *validated.last().unwrap();
        let close = |values: Vec<f64>| {
            let value = *values.first().unwrap();
            assert!((value - last).abs() < 1e-6 * last, "{value} {last}");
        };
        close(validations(&of("validate", &["trainer.ckpt_path=kept/step-00000006"])));
        let convert =
            ["checkpoint", "convert", "kept/step-00000006", "out", "--to", "hugging-face"];
        let converted = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(convert)
            .current_dir(dir)
            .output()
            .unwrap();
        assert!(converted.status.success(), "{}", String::from_utf8_lossy(&converted.stderr));
        close(validations(&of("validate", &["model={ from_pretrained='out' }"])));
        // The training computed with other weights.
        assert!((last - alone[5]).abs() > 1e-4);
    }
}

#[test]
fn other_averages_are_refused() {
    let dir = folder();
    let said = |sets: &[&str]| {
        let model = format!("model.from_pretrained={}", fixture("llama_yarn").display());
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["fit", "--set", &model, "--set", "optimizer=schedule_free_adamw"])
            .args(sets.iter().flat_map(|set| ["--set", set]))
            .args(["--set", "data={ type='lines', path='lines.txt', tokenizer='tokenizer.json', seq_len=8, eos_token='[SEP]' }"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap().lines().last().unwrap_or_default().to_owned()
    };
    assert_says!(said(&["trainer.ema_decay=0.9"]), "error: `optimizer.type`: a schedule-free …");
    let apart = said(&["trainer.strategy=diloco", "trainer.devices=2"]);
    assert!(apart.contains("replicas that train apart (`diloco`) do not synchronise"), "{apart}");
}
