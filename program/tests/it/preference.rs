//! `fulgurite fit` on preferences.

use std::fs;
use std::path::Path;

use fulgurite_test_message::assert_says;
use serde_json::json;

use crate::models::{assert_close, losses_of, root, run};
use crate::tasks::folder;

/// A folder with preferences in words of its tokenizer.
fn data() -> tempfile::TempDir {
    let dir = folder();
    let words = ["the", "cat", "run", "good", "bad", "film", "is", "not"];
    let text = |i: usize, count: usize| {
        (0..count).map(|k| words[(i * 3 + k * k) % 8]).collect::<Vec<_>>().join(" ")
    };
    let row = |i: usize| {
        json!({"prompt": text(i, 2 + i % 3), "chosen": format!(" {}", text(i + 1, 1 + i % 4)),
               "rejected": format!(" {}", text(i + 2, 2 + i % 2))})
    };
    let rows: String = (0..24).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("pairs.jsonl"), rows).unwrap();
    let row = |i: usize| {
        json!({"prompt": text(i, 2 + i % 3), "completion": format!(" {}", text(i + 1, 1 + i % 4)),
               "label": i % 3 != 1})
    };
    // More than a preview reads.
    let rows: String = (0..210).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("answers.jsonl"), rows).unwrap();
    dir
}

/// Trains four steps of four pairs from the weights of a fixture, and returns their losses.
fn fit(dir: &Path, (ranks, pairs, strategy): (usize, usize, &str), sets: &[&str]) -> Vec<f64> {
    let fixture = root().join("plugins/models/tests/fixtures/llama_yarn");
    let own = [
        "module.type=preference".to_owned(),
        format!("model.from_pretrained={}", fixture.display()),
        "data={ path='pairs.jsonl', tokenizer='tokenizer.json', seq_len=16, pad_to_multiple_of=16, shuffle=false, validation_fraction=0.0 }"
            .to_owned(),
        "trainer.max_steps=4".to_owned(),
        "trainer.loggers=[]".to_owned(),
        "scheduler=constant".to_owned(),
        "optimizer.lr=0.01".to_owned(),
        format!("trainer.devices={ranks}"),
        format!("trainer.strategy={strategy}"),
        format!("data.batch_size={pairs}"),
    ];
    losses_of(dir, own.iter().map(String::as_str).chain(sets.iter().copied()))
}

const LORA: &str = "trainer.adapters={ targets = 'all-linear', rank = 2, dropout = 0.1 }";

#[test]
fn preferences_are_learned_alike_on_any_mesh() {
    let dir = data();
    let tensor = "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let pipeline = "{ type = 'model_parallel', pipeline_parallel_size = 2 }";
    let packed = [LORA, "trainer.quantization.block_size=4"];
    for sets in [&[][..], &[LORA], &packed, &["model.preference_loss=orpo"]] {
        let alone = fit(dir.path(), (1, 4, "single_device"), sets);
        if sets != ["model.preference_loss=orpo"] {
            // The reference is the model that is begun with.
            assert_close("the first step", &alone[..1], &[2f64.ln()], 1e-5);
        }
        assert!(alone[3] < alone[0], "{alone:?}");
        for mesh in [(2, 2, "ddp"), (2, 2, "fsdp"), (2, 4, tensor)] {
            // Packed weights of this width are not cut.
            if sets == packed && mesh.2 == tensor {
                continue;
            }
            let found = fit(dir.path(), mesh, sets);
            assert_close(&format!("{sets:?} on {mesh:?}"), &found, &alone, 2e-5);
        }
        // Without adapters the reference is a second model, which is refused.
        if !sets.is_empty() {
            let parts = [sets, &["trainer.micro_batch_size=2"]].concat();
            let whole = fit(dir.path(), (1, 4, "single_device"), &parts);
            let found = fit(dir.path(), (2, 4, pipeline), &parts);
            match sets.contains(&LORA) {
                true => assert_eq!(found, whole, "{sets:?} in a pipeline"),
                // One device adds the gradients of the tied head and embedding in another order.
                false => assert_close("orpo in a pipeline", &found, &whole, 1e-6),
            }
        }
    }
}

#[test]
fn pipelines_refuse_steps_with_two_models() {
    let dir = data();
    let fixtures = root().join("plugins/models/tests/fixtures");
    for (module, model, path, said) in [
        ("preference", "llama_yarn", "pairs.jsonl", "its reference is a second model"),
        ("kto", "llama_yarn", "answers.jsonl", "computes other answers too"),
        ("embedding", "llama_yarn", "pairs.jsonl", "computes two texts"),
        ("seq2seq_lm", "t5", "pairs.jsonl", "its decoder attends to the whole encoder"),
    ] {
        let data = format!("data={{ path='{path}', tokenizer='tokenizer.json', seq_len=12 }}");
        let target = ["data.target_key=chosen", "data.type=text_to_text", "data.text_key=prompt"];
        let names = ["data.anchor_key=prompt", "data.positive_key=chosen", "data.type=pairs"];
        let more: &[&str] = match module {
            "seq2seq_lm" => &target,
            "embedding" => &names,
            _ => &[],
        };
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["fit", "--set", &format!("module.type={module}"), "--set", &data])
            .args(["--set", &format!("model.from_pretrained={}", fixtures.join(model).display())])
            .args(["--set", "trainer.devices=2", "--set"])
            .arg("trainer.strategy={ type = 'model_parallel', pipeline_parallel_size = 2 }")
            .args(more.iter().flat_map(|set| ["--set", set]))
            .current_dir(dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{module}: {text}");
        assert!(!text.contains("rank 1"), "{module}: {text}");
    }
}

#[test]
fn kto_is_learned_alike_on_any_mesh() {
    let dir = data();
    let tensor = "{ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    for adapters in [&[][..], &[LORA]] {
        let own = ["module.type=kto", "data.path=answers.jsonl", "model.undesirable_weight=0.5"];
        let sets = [&own[..], adapters].concat();
        let alone = fit(dir.path(), (1, 4, "single_device"), &sets);
        // The policy begins as its reference: 1 - sigmoid(0), of three good answers and a bad one.
        let first = (1.0 + 0.5 + 1.0 + 1.0) / 4.0 * 0.5;
        assert_close("the first step", &alone[..1], &[first], 1e-5);
        for mesh in [(2, 2, "ddp"), (2, 2, "fsdp"), (2, 4, tensor)] {
            let found = fit(dir.path(), mesh, &sets);
            assert_close(&format!("{sets:?} on {mesh:?}"), &found, &alone, 2e-5);
        }
    }
}

#[test]
fn references_come_from_predictions() {
    let dir = data();
    let fixture = root().join("plugins/models/tests/fixtures/llama_yarn");
    let answers = fs::read_to_string(dir.path().join("answers.jsonl")).unwrap();
    let others: Vec<&str> = answers.lines().skip(3).step_by(7).collect();
    fs::write(dir.path().join("others.jsonl"), others.join("\n") + "\n").unwrap();
    for (module, rows) in
        [("preference", "pairs.jsonl"), ("kto", "others.jsonl"), ("kto", "answers.jsonl")]
    {
        let file = rows.replace(".jsonl", "-reference.jsonl");
        let (module, path) = (format!("module.type={module}"), format!("data.path={rows}"));
        let predict = [
            "predict",
            "--output-file",
            &file,
            "--set",
            &module,
            "--set",
            &format!("model.from_pretrained={}", fixture.display()),
            "--set",
            &format!(
                "data={{ path=[], predict_path='{rows}', tokenizer='tokenizer.json', seq_len=16, batch_size=5 }}"
            ),
            "--set",
            "trainer.devices=2",
            "--set",
            "trainer.strategy=fsdp",
        ];
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(predict)
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let file = format!("data.reference_path={file}");
        let known = ["model.reference=data", &*file];
        // A mismatched answer may be of a row that is held out.
        let own = [&*module, &*path, "data.validation_fraction=0.25"];
        for adapters in [&[][..], &[LORA]] {
            let sets = [&own[..], adapters].concat();
            let computed = fit(dir.path(), (1, 4, "single_device"), &sets);
            for mesh in [(1, 4, "single_device"), (2, 2, "fsdp")] {
                let found = fit(dir.path(), mesh, &[&sets[..], &known].concat());
                assert_close(&format!("{sets:?} on {mesh:?}"), &found, &computed, 2e-5);
            }
            // The steps of KTO compute the model twice, and are refused.
            if rows == "pairs.jsonl" {
                let pipeline = "{ type = 'model_parallel', pipeline_parallel_size = 2 }";
                let found = fit(dir.path(), (2, 4, pipeline), &[&sets[..], &known].concat());
                assert_close(&format!("{sets:?} in a pipeline"), &found, &computed, 2e-5);
            }
        }
        // The file's values count.
        let path = dir.path().join(file.trim_start_matches("data.reference_path="));
        let lines = fs::read_to_string(&path).unwrap();
        let changed = lines.lines().map(|line| {
            let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
            let first = if rows == "pairs.jsonl" { "chosen" } else { "own" };
            let logp = &mut row["outputs"][first]["logp"];
            *logp = (logp.as_f64().unwrap() - 1.0).into();
            format!("{row}\n")
        });
        fs::write(dir.path().join("changed.jsonl"), changed.collect::<String>()).unwrap();
        let changed = ["model.reference=data", "data.reference_path=changed.jsonl"];
        let losses =
            |sets: &[&str]| fit(dir.path(), (1, 4, "single_device"), &[&own[..], sets].concat());
        let (right, wrong) = (losses(&known), losses(&changed));
        let differ = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-3;
        assert!(right.iter().zip(&wrong).any(differ), "{rows}: {right:?} and {wrong:?}");
    }
    let check = |sets: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["config", "check", "--set", "module.type=kto", "--set"])
            .arg(format!("model.from_pretrained={}", fixture.display()))
            .args(["--set", "data={ path='answers.jsonl', tokenizer='tokenizer.json', seq_len=16, reference_path='answers-reference.jsonl' }"])
            .args(sets.iter().flat_map(|set| ["--set", set]))
            .current_dir(dir.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let says = |sets: &[&str]| {
        let (is_right, said) = check(sets);
        assert!(!is_right, "{said}");
        said.lines().last().unwrap_or_default().to_owned()
    };
    let reference = "model.reference=data";
    assert_says!(says(&[]), r#"error: `data.reference_path` … `model.reference` = "data" alone …"#);
    let (is_right, said) = check(&[reference]);
    assert!(is_right, "{said}");
    // Mismatched answers come from rows of one key.
    let others = [reference, "data.validation_path=others.jsonl"];
    assert!(says(&others).contains("others.jsonl, line"));
    let both = "data.reference_path=['answers-reference.jsonl', 'others-reference.jsonl']";
    let (is_right, said) = check(&[&others[..], &[both]].concat());
    assert!(is_right, "{said}");
    assert_says!(says(&[reference, "data.seq_len=4"]), "error: data: answers.jsonl … is not in …");
    assert_says!(
        says(&[reference, "data.reference_path=answers.jsonl"]),
        r#"error: data: answers.jsonl, line 1 has no column "outputs" …"#
    );
    fs::write(
        dir.path().join("broken.jsonl"),
        "{\"outputs\": {\"own\": {\"key\": \"0\", \"logp\": null}}}\n",
    )
    .unwrap();
    assert_says!(
        says(&[reference, "data.reference_path=broken.jsonl"]),
        "error: data: broken.jsonl, line 1 has no log-probabilities … null, expected f32"
    );
}

#[test]
fn wrong_judgements_are_refused() {
    let dir = data();
    let refused = |row: &str, sets: &[&str]| {
        fs::write(dir.path().join("wrong.jsonl"), format!("{row}\n")).unwrap();
        let fixture = root().join("plugins/models/tests/fixtures/llama_yarn");
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["config", "check", "--set", "module.type=kto"])
            .args(["--set", &format!("model.from_pretrained={}", fixture.display())])
            .args(["--set", "data={ path='wrong.jsonl', tokenizer='tokenizer.json', seq_len=16 }"])
            .args(sets.iter().flat_map(|set| ["--set", set]))
            .current_dir(dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        said.lines().last().unwrap_or_default().to_owned()
    };
    let good = r#"{"prompt": "the cat", "completion": " is good", "label": true}"#;
    assert_says!(
        refused(r#"{"prompt": "the", "completion": " cat"}"#, &[]),
        "error: data: wrong.jsonl, line 1 has no `label`: expected true … false …"
    );
    assert_says!(
        refused(r#"{"prompt": "the", "completion": " cat", "label": 0.5}"#, &[]),
        "error: data: wrong.jsonl, line 1 has the `label` 0.5 … true or false"
    );
    assert_says!(
        refused(
            r#"{"messages": [{"role": "user", "content": "the"}], "label": false}"#,
            &["data.chat_template=chatml"]
        ),
        "error: data: wrong.jsonl, line 1 has messages that do not end with an answer …"
    );
    assert_says!(
        refused(good, &["model.reference=data"]),
        r#"error: data: `model.reference` is "data" … no log-probabilities … (data.reference_path)"#
    );
    assert_says!(refused(good, &["model.desirable_weight=-1"]), "… `model.desirable_weight` … -1");
}

#[test]
fn result_has_no_reference() {
    let dir = data();
    let checkpoint = ["checkpoint.dir=checkpoints", "trainer.max_steps=2"];
    let whole = fit(dir.path(), (1, 4, "single_device"), &["trainer.max_steps=4"]);
    fit(dir.path(), (2, 2, "fsdp"), &checkpoint);
    // A resumed run compares with the reference of the checkpoint.
    let resumed =
        fit(dir.path(), (1, 4, "single_device"), &["trainer.ckpt_path=checkpoints/step-00000002"]);
    assert_close("resumed", &resumed, &whole[2..], 2e-5);
    let at = |name: &str| dir.path().join(name).display().to_string();
    let convert = [
        "checkpoint",
        "convert",
        &at("checkpoints/step-00000002"),
        &at("out"),
        "--to",
        "hugging-face",
    ];
    run(env!("CARGO_BIN_EXE_fulgurite"), &convert.map(str::to_owned));
    let file = fs::read(dir.path().join("out/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let names = String::from_utf8_lossy(&file[8..header]);
    assert!(names.contains("model.norm.weight") && !names.contains("reference"), "{names}");
}

#[test]
fn wrong_references_are_refused() {
    let dir = data();
    let refused = |sets: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["config", "check", "--set", "module.type=preference"])
            .args(["--set", "data={ path='pairs.jsonl', tokenizer='tokenizer.json', seq_len=16 }"])
            .args(sets.iter().flat_map(|set| ["--set", set]))
            .current_dir(dir.path())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        said.lines().last().unwrap_or_default().to_owned()
    };
    let fixture = root().join("plugins/models/tests/fixtures/llama_yarn");
    let model = format!("model.from_pretrained={}", fixture.display());
    let says = |sets: &[&str]| refused(&[&[model.as_str()], sets].concat());
    assert_says!(says(&["model.reference=data"]), "error … `model.reference` … not every row …");
    assert_says!(says(&["model.reference=base"]), r#"error: `model.reference` … found "base""#);
    assert_says!(says(&["model.preference_loss=ppo"]), r#"error: `model.preference_loss` … "ppo""#);
    assert_says!(says(&["model.beta=0"]), "error: `model.beta`: must be above 0, found 0");
    assert_says!(
        says(&[LORA, "trainer.adapters.modules_to_save=['lm_head']"]),
        r#"error: `model.reference` … `trainer.adapters.modules_to_save` or `bias` … "data""#
    );
    assert_says!(
        refused(&[
            "model={ type='llama', hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2 }"
        ]),
        "error: `model.reference` … no weights to start from (model.from_pretrained) …"
    );
}
