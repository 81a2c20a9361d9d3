//! `fulgurite recipes`, each of which trains in a small form.

use std::path::Path;
use std::process::{Command, Output};

use crate::tasks::{fixture, folder};

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

/// Settings that make a recipe small enough for a test, on the data of [`folder`].
fn small(name: &str) -> Vec<String> {
    let (model, own): (_, &[&str]) = match name {
        "pretrain" => (None, &["model.hidden_size=32", "model.num_hidden_layers=2"]),
        "classification" => {
            (Some("bert_classes"), &["model.num_labels=3", NEW_HEAD, "data.path=texts.jsonl"])
        }
        "token_classification" => {
            (Some("bert_tokens"), &["model.num_labels=3", NEW_HEAD, "data.path=tags.jsonl"])
        }
        "text_to_text" => (
            Some("t5"),
            &["data.path=pairs.jsonl", "data.text_key=anchor", "data.target_key=positive"],
        ),
        "embedding" => (Some("bert_masked"), &["data.path=pairs.jsonl"]),
        "masked_lm" => (Some("bert_masked"), &["data.type=lines", "data.path=lines.txt"]),
        "vision" => (Some("vit"), &["data.height=12", "data.width=12"]),
        "preference_lora" => (
            Some("llama_yarn"),
            &["data.path=preferred.jsonl", "data.tokenizer=tokenizer.json", "data.seq_len=16"],
        ),
        "kto_lora" => (
            Some("llama_yarn"),
            &["data.path=judged.jsonl", "data.tokenizer=tokenizer.json", "data.seq_len=16"],
        ),
        "grpo_lora" => (
            Some("llama_yarn"),
            &[
                "data.path=questions.jsonl",
                "data.tokenizer=tokenizer.json",
                "data.seq_len=8",
                "model.grpo.max_new_tokens=4",
            ],
        ),
        "reward" => (
            Some("llama_yarn"),
            &["data.path=preferred.jsonl", "data.tokenizer=tokenizer.json", "data.seq_len=16"],
        ),
        "chat_lora" | "chat_fsdp" => (
            Some("llama_yarn"),
            &["data.tokenizer=tokenizer.json", "data.chat_template=chatml", "data.seq_len=16"],
        ),
        "qlora" => (Some("llama_yarn"), &[TOKENS, "trainer.quantization.block_size=4"]),
        "experts_fsdp" | "experts_lora" => (Some("mixtral_balanced"), &[TOKENS]),
        _ => (Some("llama_yarn"), &[TOKENS]),
    };
    let mut keys =
        ["trainer.max_steps=2", "checkpoint.save_last=false"].map(str::to_owned).to_vec();
    keys.extend(own.iter().map(|key| (*key).to_owned()));
    keys.extend(model.map(|name| format!("model.from_pretrained={}", fixture(name).display())));
    match name {
        "vision" => {}
        "pretrain" => keys.push("data.seq_len=16".to_owned()),
        "classification" | "token_classification" | "embedding" | "text_to_text" | "masked_lm" => {
            keys.extend(["data.seq_len=12", "data.tokenizer=tokenizer.json"].map(str::to_owned));
        }
        _ => keys.push("trainer.accumulate_grad_batches=1".to_owned()),
    }
    keys
}

/// The head of the fixture has another number of classes.
const NEW_HEAD: &str = "checkpoint.load.exclude=[\"classifier.out_proj\"]";

/// Ids below the vocabulary of the fixture, which is smaller than that of bytes.
const TOKENS: &str = "data={ type = 'tokens', path = 'ids.u16', seq_len = 16, batch_size = 2 }";

#[test]
fn recipes_train_as_they_are_listed() {
    let temp = folder();
    let ids: Vec<u8> = (0..600u16).flat_map(|i| (i * 7 % 41).to_le_bytes()).collect();
    std::fs::write(temp.path().join("ids.u16"), ids).unwrap();
    let chat = r#"{"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "good"}]}"#;
    std::fs::write(temp.path().join("chats.jsonl"), format!("{chat}\n").repeat(200)).unwrap();
    let pair = r#"{"prompt": "the cat", "chosen": " is good", "rejected": " is bad"}"#;
    std::fs::write(temp.path().join("preferred.jsonl"), format!("{pair}\n").repeat(40)).unwrap();
    let answers = r#"{"prompt": "the cat", "completion": " is good", "label": true}
{"prompt": "the film", "completion": " is bad", "label": false}
"#;
    std::fs::write(temp.path().join("judged.jsonl"), answers.repeat(20)).unwrap();
    let question = "{\"prompt\": \"the cat\", \"answer\": 4}\n".repeat(40);
    std::fs::write(temp.path().join("questions.jsonl"), question).unwrap();
    std::fs::write(temp.path().join("text.txt"), "to be or not to be ".repeat(200)).unwrap();
    let list = succeed(temp.path(), &["recipes", "list"]);
    let names: Vec<&str> = list.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names.len(), fulgurite_models::RECIPES.len(), "{list}");
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
