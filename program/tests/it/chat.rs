//! `fulgurite fit` on conversations.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::models::{assert_close, losses_of};

/// A folder with conversations of several lengths.
fn data() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let row = |i: usize| {
        let question = "why ".repeat(1 + i * 5 % 7);
        let answer = "so ".repeat(1 + i * 3 % 5);
        json!({"messages": [
            {"role": "user", "content": question}, {"role": "assistant", "content": answer},
        ]})
    };
    let rows: String = (0..24).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("chats.jsonl"), rows).unwrap();
    dir
}

/// Trains three steps from scratch, and returns their losses.
fn fit(dir: &Path, (ranks, samples, strategy): (usize, usize, &str), sets: &[&str]) -> Vec<f64> {
    let own = [
        "module.type=chat".to_owned(),
        "model={ type='llama', hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, \
         max_position_embeddings=256 }"
            .to_owned(),
        "data={ path='chats.jsonl', tokenizer='bytes', chat_template='chatml', seq_len=200, shuffle=false, \
         validation_fraction=0.0 }"
            .to_owned(),
        "trainer.max_steps=3".to_owned(),
        "trainer.loggers=[]".to_owned(),
        "scheduler=constant".to_owned(),
        format!("trainer.devices={ranks}"),
        format!("trainer.strategy={strategy}"),
        format!("data.batch_size={samples}"),
    ];
    losses_of(dir, own.iter().map(String::as_str).chain(sets.iter().copied()))
}

#[test]
fn answers_are_learned_alike_on_any_mesh() {
    let dir = data();
    let tensor = "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let context = "{ type = 'model_parallel', context_parallel_size = 2 }";
    for packing in ["data.packing=true", "data.packing=false"] {
        let alone = fit(dir.path(), (1, 4, "single_device"), &[packing]);
        let whole = ["data.train_on=all", packing];
        assert_ne!(fit(dir.path(), (1, 4, "single_device"), &whole), alone);
        for mesh in [
            (1, 2, "single_device"),
            (2, 2, "ddp"),
            (2, 2, "fsdp"),
            (2, 4, tensor),
            (2, 4, context),
        ] {
            if packing == "data.packing=true" && mesh.2 == context {
                continue;
            }
            let accumulate = match mesh {
                (1, 2, _) => "trainer.accumulate_grad_batches=2",
                _ => "trainer.accumulate_grad_batches=1",
            };
            let found = fit(dir.path(), mesh, &[packing, accumulate]);
            assert_close(&format!("{packing} on {mesh:?}"), &found, &alone, 1e-5);
        }
    }
}

/// All conversations are in one step.
#[test]
fn packing_does_not_change_a_step() {
    let dir = data();
    let whole = |packing: &str, samples: usize| {
        fit(dir.path(), (1, samples, "single_device"), &[packing, "trainer.max_steps=1"])
    };
    let alone = whole("data.packing=false", 24);
    let packed = whole("data.packing=true", 24);
    assert_close("packed", &packed, &alone, 1e-5);
}

/// What `fulgurite data inspect` says.
fn inspected(dir: &Path, sets: &[&str]) -> (String, bool) {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["data", "inspect", "--samples", "1", "--set", "data.validation_fraction=0.0"])
        .args(sets.iter().flat_map(|set| ["--set", set]))
        .current_dir(dir)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr);
    (said, output.status.success())
}

#[test]
fn samples_are_shown_with_what_is_learned() {
    let dir = data();
    let bytes = ["data.tokenizer=bytes", "data.seq_len=200", "data.pad_to_multiple_of=1"];
    let chat = [
        "module.type=chat",
        "data.path=chats.jsonl",
        "data.chat_template=chatml",
        "data.packing=false",
    ];
    let (said, ok) = inspected(dir.path(), &[&bytes[..], &chat].concat());
    assert!(
        ok && said.contains("── sample 0: 1 document, ") && said.contains("(chats.jsonl, line 1)"),
        "{said}"
    );
    assert!(said.contains("assistant\n⟦so <|im_end|>⟧"), "{said}");
    let pair = r#"{"prompt": "1+1=", "chosen": "2", "rejected": "3"}"#;
    fs::write(dir.path().join("pairs.jsonl"), pair).unwrap();
    let preference = ["module.type=preference", "data.path=pairs.jsonl"];
    let (said, ok) = inspected(dir.path(), &[&bytes[..], &preference].concat());
    assert!(ok && said.contains("\n1+1=⟦2<end>⟧\n1+1=⟦3<end>⟧\n"), "{said}");
    let (said, ok) = inspected(
        dir.path(),
        &[&bytes[..], &["module.type=chat", "data.path=pairs.jsonl"]].concat(),
    );
    assert!(!ok && said.contains("which are for `module.type` = \"preference\""), "{said}");
    let (said, ok) = inspected(dir.path(), &["module.type=embedding"]);
    assert!(!ok && said.contains("not of \"embedding\""), "{said}");
}
