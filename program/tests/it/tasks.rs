//! `fulgurite fit` with the modules of `fulgurite-models`, in real processes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fulgurite_test_message::assert_says;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::models::assert_close;

const WORDS: [&str; 8] = ["the", "cat", "run", "good", "bad", "film", "is", "not"];

/// A tokenizer of words with BERT's special tokens.
fn tokenizer() -> Value {
    let specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let added = specials.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let names = specials.iter().chain(&WORDS).enumerate();
    let vocab: serde_json::Map<String, Value> =
        names.map(|(id, name)| ((*name).to_owned(), id.into())).collect();
    json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
           "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "Whitespace"},
           "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
           "decoder": null,
           "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}})
}

/// The words of row `i`, between two and seven.
fn words(i: usize) -> Vec<&'static str> {
    (0..2 + i % 6).map(|k| WORDS[(i * 3 + k * k) % WORDS.len()]).collect()
}

/// A folder with the tokenizer and rows of all kinds.
pub(crate) fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, content: String| fs::write(dir.path().join(name), content).unwrap();
    write("tokenizer.json", tokenizer().to_string());
    let rows = |row: &dyn Fn(usize) -> Value| -> String {
        (0..40).map(|i| format!("{}\n", row(i))).collect()
    };
    let label = |i: usize| ["negative", "neutral", "positive"][i % 3];
    write("texts.jsonl", rows(&|i| json!({"text": words(i).join(" "), "label": label(i)})));
    write(
        "sets.jsonl",
        rows(&|i| json!({"text": words(i).join(" "), "label": [i % 2, 2 + i % 3]})),
    );
    write("numbers.jsonl", rows(&|i| json!({"text": words(i).join(" "), "label": i as f64 / 7.0})));
    write(
        "tags.jsonl",
        rows(&|i| {
            let tags: Vec<usize> = words(i).iter().map(|word| word.len() % 3).collect();
            json!({"tokens": words(i), "tags": tags})
        }),
    );
    write(
        "pairs.jsonl",
        rows(&|i| json!({"anchor": words(i).join(" "), "positive": words(i + 1).join(" ")})),
    );
    write("lines.txt", (0..60).map(|i| format!("{}\n", words(i).join(" "))).collect());
    for (class, name) in ["cat", "dog"].iter().enumerate() {
        let folder = dir.path().join("pictures").join(name);
        fs::create_dir_all(&folder).unwrap();
        for i in 0..20 {
            let mut file = b"P6\n12 12\n255\n".to_vec();
            file.extend((0..12 * 12 * 3).map(|k| (k * (i + 2) * (class + 1) % 251) as u8));
            fs::write(folder.join(format!("{i:02}.ppm")), file).unwrap();
        }
    }
    dir
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/models/tests/fixtures").join(name)
}

fn fit(dir: &Path, sets: &[String]) -> Output {
    run(dir, &["fit"], sets)
}

fn run(dir: &Path, args: &[&str], sets: &[String]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    command.args(args).current_dir(dir).stdin(Stdio::null());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RAYON_NUM_THREADS"] {
        command.env_remove(name);
    }
    for set in sets {
        command.arg("--set").arg(set);
    }
    command.output().unwrap()
}

fn sets(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

/// The metrics of a run by name, step by step.
fn metrics(root: &Path) -> BTreeMap<String, Vec<f64>> {
    let mut folders = vec![root.to_owned()];
    let mut found = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.file_name().is_some_and(|name| name == "metrics.jsonl") {
                for line in fs::read_to_string(path).unwrap().lines() {
                    let Value::Object(values) = serde_json::from_str(line).unwrap() else {
                        panic!("{line}")
                    };
                    for (name, value) in values {
                        if name.contains("loss") || name.starts_with("val_") {
                            let values: &mut Vec<f64> = found.entry(name).or_default();
                            values.push(value.as_f64().unwrap());
                        }
                    }
                }
            }
        }
    }
    found
}

/// Trains the module on one rank and on two, and asserts that losses and metrics are equal.
fn assert_same_on_two_ranks(module: &str, keys: &[&str], metric: &str) {
    let dir = folder();
    judged(dir.path());
    let mut expected: Option<BTreeMap<String, Vec<f64>>> = None;
    let tensor_parallel = "{type='model_parallel',tensor_parallel_size=2,parallelize='llama'}";
    for (i, (ranks, strategy)) in
        [(1, "single_device"), (2, "ddp"), (2, "fsdp"), (2, tensor_parallel)]
            .into_iter()
            .enumerate()
    {
        let root = format!("run-{i}");
        let mut all = sets(keys);
        let samples = if strategy == tensor_parallel { 8 } else { 8 / ranks };
        all.extend([
            format!("module.type={module}"),
            format!("data.batch_size={samples}"),
            format!("trainer.default_root_dir={root}"),
            format!("trainer.devices={ranks}"),
            format!("trainer.strategy={strategy}"),
            "trainer.max_steps=5".to_owned(),
            "trainer.log_every_n_steps=1".to_owned(),
            "optimizer.lr=0.01".to_owned(),
        ]);
        let output = fit(dir.path(), &all);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{module} {strategy}: {text}");
        let found = metrics(&dir.path().join(&root));
        assert_eq!(found["train_loss"].len(), 5, "{module} {strategy}");
        assert!(found.contains_key(metric), "{module}: no {metric} in {found:?}");
        let expected = expected.get_or_insert_with(|| found.clone());
        assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, values) in &found {
            // An evaluation compares a text with the texts of its own batch.
            if module == "embedding" && name.starts_with("val_") {
                continue;
            }
            for (found, expected) in values.iter().zip(&expected[name]) {
                assert!(
                    (found - expected).abs() <= 2e-5 * expected.abs().max(1.0),
                    "{module} {strategy}: {name} is {values:?} instead of {expected:?}"
                );
            }
        }
    }
}

/// A small model with dropout, whose masks depend on the length of padded texts.
const BERT: [&str; 8] = [
    "model.type=bert",
    "model.hidden_size=16",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=24",
    "model.attention_probs_dropout_prob=0",
    "data.tokenizer=tokenizer.json",
    "data.seq_len=12",
];

fn bert(keys: &[&'static str]) -> Vec<&'static str> {
    BERT.iter().chain(keys).copied().collect()
}

#[test]
fn texts_are_classified_on_two_ranks() {
    let keys = bert(&["data.path=texts.jsonl", "data.pad_to_multiple_of=12"]);
    assert_same_on_two_ranks("sequence_classification", &keys, "val_f1");
}

#[test]
fn pretrained_decoder_predicts_sets_on_two_ranks() {
    let from = format!("model.from_pretrained={}", fixture("llama").display());
    let keys = [&*from, "data.path=sets.jsonl", "data.tokenizer=tokenizer.json", "data.seq_len=12"];
    assert_same_on_two_ranks("sequence_classification", &keys, "val_f1");
}

#[test]
fn numbers_are_predicted_on_two_ranks() {
    let keys = bert(&["data.path=numbers.jsonl", "model.hidden_dropout_prob=0"]);
    assert_same_on_two_ranks("sequence_classification", &keys, "val_mse");
}

#[test]
fn hidden_tokens_are_predicted_on_two_ranks() {
    let from = format!("model.from_pretrained={}", fixture("roberta_masked").display());
    let keys = [
        &*from,
        "data.type=lines",
        "data.path=lines.txt",
        "data.tokenizer=tokenizer.json",
        "data.seq_len=8",
        "data.validation_fraction=0.2",
        "model.mlm_probability=0.3",
    ];
    assert_same_on_two_ranks("masked_lm", &keys, "val_perplexity");
}

#[test]
fn words_are_tagged_on_two_ranks() {
    let keys = bert(&["data.type=words", "data.path=tags.jsonl", "model.hidden_dropout_prob=0"]);
    assert_same_on_two_ranks("token_classification", &keys, "val_f1");
}

#[test]
fn texts_are_embedded_on_two_ranks() {
    let keys = bert(&[
        "data.type=pairs",
        "data.path=pairs.jsonl",
        "model.temperature=0.5",
        "data.pad_to_multiple_of=12",
    ]);
    assert_same_on_two_ranks("embedding", &keys, "val_accuracy");
}

#[test]
fn pictures_are_classified_on_two_ranks() {
    let from = format!("model.from_pretrained={}", fixture("vit").display());
    let keys = [
        &*from,
        "model.num_labels=2",
        "checkpoint.load.exclude=[\"classifier\"]",
        "data.path=pictures",
        "data.height=12",
        "data.width=12",
        "data.validation_fraction=0.2",
    ];
    assert_same_on_two_ranks("image_classification", &keys, "val_accuracy");
}

/// Trains for two steps, and returns the file with this extension in which one rank and two ranks
/// write their predictions with these weights.
fn predicted(dir: &Path, module: &str, keys: &[&str], extension: &str) -> String {
    let mut all = sets(keys);
    all.extend([format!("module.type={module}"), "checkpoint.dir=kept".to_owned()]);
    all.push("checkpoint.save_last=true".to_owned());
    let steps = ["trainer.max_steps=2".to_owned(), "checkpoint.overwrite=true".to_owned()];
    let fitted = fit(dir, &[all.clone(), steps.to_vec()].concat());
    assert!(fitted.status.success(), "{}", String::from_utf8_lossy(&fitted.stderr));
    let [one, two] = [1, 2].map(|ranks| {
        let file = format!("{ranks}.{extension}");
        let more = [format!("trainer.devices={ranks}"), "trainer.ckpt_path=last".to_owned()];
        let args = ["predict", "--output-file", &file];
        let output = run(dir, &args, &[all.clone(), more.to_vec()].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::read_to_string(dir.join(file)).unwrap()
    });
    assert_eq!(one, two);
    one
}

/// Pairs of texts with one chosen answer for all.
fn judged(dir: &Path) {
    let row = |i: usize| {
        let text = words(i).join(" ");
        json!({"prompt": text, "chosen": " good film", "rejected": format!(" {}", words(i + 1)[0]),
               "margin": 0.25})
    };
    let rows: String = (0..40).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.join("judged.jsonl"), rows).unwrap();
}

#[test]
fn rewards_are_learned_on_two_ranks() {
    let from = format!("model.from_pretrained={}", fixture("llama").display());
    let keys = [
        &*from,
        "data.path=judged.jsonl",
        "data.tokenizer=tokenizer.json",
        "data.seq_len=16",
        "data.validation_fraction=0.2",
    ];
    assert_same_on_two_ranks("reward", &keys, "val_reward_accuracy");
}

/// Masks of dropout are those of one rank.
#[test]
fn dropout_of_rewards_follows_the_batch() {
    let from = format!("model.from_pretrained={}", fixture("bert_reward").display());
    let dir = folder();
    judged(dir.path());
    let losses = |ranks: usize| {
        let mut all = sets(&[
            &*from,
            "module.type=reward",
            "model.hidden_dropout_prob=0.5",
            "data.path=judged.jsonl",
            "data.tokenizer=tokenizer.json",
            "data.seq_len=16",
            "trainer.max_steps=3",
            "trainer.log_every_n_steps=1",
            "trainer.strategy=ddp",
        ]);
        all.push(format!("data.batch_size={}", 8 / ranks));
        all.push(format!("trainer.devices={ranks}"));
        let output = run(dir.path(), &["fit", "--output", "json"], &all);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let losses = events.filter_map(|event| event["train_loss"].as_f64());
        losses.collect::<Vec<_>>()
    };
    let (one, two) = (losses(1), losses(2));
    assert_eq!(one.len(), 3);
    assert_close("two ranks", &two, &one, 2e-5);
}

#[test]
fn rewards_are_written_by_pair() {
    let dir = folder();
    judged(dir.path());
    let from = format!("model.from_pretrained={}", fixture("llama").display());
    let keys = [
        &*from,
        "data.path=judged.jsonl",
        "data.tokenizer=tokenizer.json",
        "data.seq_len=16",
        "data.batch_size=2",
        "data.validation_fraction=0.2",
    ];
    let csv = predicted(dir.path(), "reward", &keys, "csv");
    let mut lines = csv.lines();
    assert_eq!(lines.next().unwrap(), "sample,name,chosen,rejected");
    let rows: Vec<&str> = lines.collect();
    assert_eq!(rows.len(), 8);
    for row in rows {
        let scores: Vec<f32> = row.rsplitn(3, ',').take(2).map(|x| x.parse().unwrap()).collect();
        assert!(row.contains("judged.jsonl, line ") && scores[0] != scores[1], "{row}");
    }
    // A head of three classes does not score.
    let three = ["module.type=reward", "model.num_labels=3"].map(str::to_owned);
    let refused = run(dir.path(), &["config", "check"], &[sets(&keys), three.to_vec()].concat());
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_says!(said.lines().last().unwrap(), "error: `model.num_labels` … 1 number, found 3 …");
}

#[test]
fn single_answers_are_scored() {
    let dir = folder();
    judged(dir.path());
    let rows = |row: &dyn Fn(usize) -> Value| -> String {
        (0..6).map(|i| format!("{}\n", row(i))).collect()
    };
    let single = rows(&|i| json!({"prompt": words(i).join(" "), "completion": " good film"}));
    fs::write(dir.path().join("single.jsonl"), single).unwrap();
    for name in ["llama_reward", "bert_reward"] {
        let keys = sets(&[
            &format!("model.from_pretrained={}", fixture(name).display()),
            "module.type=reward",
            "data={ path=[], tokenizer='tokenizer.json', seq_len=16, batch_size=4 }",
        ]);
        let scores = |path: &str| -> Vec<f64> {
            let keys = [keys.clone(), sets(&[&format!("data.predict_path={path}")])].concat();
            let output = run(dir.path(), &["predict", "--output-file", "scores.jsonl"], &keys);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let lines = fs::read_to_string(dir.path().join("scores.jsonl")).unwrap();
            let rows = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let score = |row: Value| {
                assert!(row["name"].as_str().unwrap().starts_with(path), "{row}");
                let outputs = &row["outputs"];
                outputs.as_f64().unwrap_or_else(|| outputs["chosen"].as_f64().unwrap())
            };
            rows.map(score).collect()
        };
        let (single, pairs) = (scores("single.jsonl"), scores("judged.jsonl"));
        assert_eq!(single.len(), 6);
        assert_close(name, &single, &pairs[..6], 2e-5);
    }
    // A file with both kinds.
    let both = ["single.jsonl", "judged.jsonl"]
        .map(|name| fs::read_to_string(dir.path().join(name)).unwrap())
        .concat();
    fs::write(dir.path().join("both.jsonl"), both).unwrap();
    let keys = sets(&[
        &format!("model.from_pretrained={}", fixture("llama_reward").display()),
        "module.type=reward",
        "data={ path=[], predict_path='both.jsonl', tokenizer='tokenizer.json', seq_len=16 }",
    ]);
    let refused = run(dir.path(), &["predict", "--output-file", "scores.jsonl"], &keys);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_says!(said.lines().last().unwrap(), "error: … data.predict_path … 40 pairs … 6 rows …");
    let refused =
        run(dir.path(), &["fit"], &[keys, sets(&["data.predict_path=single.jsonl"])].concat());
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_says!(said.lines().last().unwrap(), "error: data: there are no training samples");
}

#[test]
fn predictions_name_rows_and_classes() {
    let dir = folder();
    fs::write(dir.path().join("new.csv"), "text\nthe cat\n\"good, not bad\"\nfilm\n").unwrap();
    let keys = bert(&["data.path=texts.jsonl", "data.predict_path=new.csv", "data.batch_size=2"]);
    let csv = predicted(dir.path(), "sequence_classification", &keys, "csv");
    let (header, rows) = csv.split_once('\n').unwrap();
    assert_eq!(header, "sample,name,negative,neutral,positive");
    for (i, row) in rows.lines().enumerate() {
        let fields: Vec<&str> = row.rsplitn(4, ',').collect();
        let sum: f32 = fields[..3].iter().map(|value| value.parse::<f32>().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-5, "{row}");
        assert_eq!(fields[3], format!("{i},\"new.csv, line {}\"", i + 2));
    }
    assert_eq!(rows.lines().count(), 3);
    let lines = predicted(dir.path(), "sequence_classification", &keys, "jsonl");
    let first: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert_eq!((&first["sample"], &first["name"]), (&json!(0), &json!("new.csv, line 2")));
    let value = rows.lines().next().unwrap().rsplit(',').next().unwrap();
    assert_eq!(
        first["outputs"]["positive"].as_f64().unwrap() as f32,
        value.parse::<f32>().unwrap()
    );

    let other = run(dir.path(), &["predict", "--output-file", "out.xlsx"], &sets(&keys));
    let text = String::from_utf8_lossy(&other.stderr).into_owned();
    assert_says!(text.trim(), "error: out.xlsx … named .safetensors, .jsonl, .csv or .parquet");
}

/// PEFT's classes for a task read the adapter, with its head.
#[test]
fn adapter_of_a_classification_has_its_task() {
    let dir = folder();
    let row = |i: usize| format!("{}\n", json!({"text": "the film", "label": i % 5}));
    fs::write(dir.path().join("five.jsonl"), (0..40).map(row).collect::<String>()).unwrap();
    let keys = ["module.type=sequence_classification", "data.path=five.jsonl"];
    let more = ["data.tokenizer=tokenizer.json", "data.seq_len=12", "trainer.max_steps=1"];
    // Without its head PEFT's class would miss it.
    for (i, (base, saved, task, modules)) in [
        ("llama", ", modules_to_save = ['score']", json!("SEQ_CLS"), json!(["score"])),
        ("llama_classes", "", json!(null), json!(null)),
    ]
    .into_iter()
    .enumerate()
    {
        let adapters = format!("trainer.adapters={{ targets = 'all-linear'{saved} }}");
        let from = format!("model.from_pretrained={}", fixture(base).display());
        let root = ["trainer.default_root_dir=runs", &adapters, &from];
        let output = fit(dir.path(), &sets(&[&keys[..], &more, &root].concat()));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let file = dir.path().join(format!("runs/version_{i}/adapter/adapter_config.json"));
        let config: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        assert_eq!((&config["task_type"], &config["modules_to_save"]), (&task, &modules));
    }
}

#[test]
fn pictures_without_classes_are_predicted() {
    let dir = folder();
    let new = dir.path().join("new/holiday");
    fs::create_dir_all(&new).unwrap();
    fs::copy(dir.path().join("pictures/dog/03.ppm"), new.join("a.ppm")).unwrap();
    let from = format!("model.from_pretrained={}", fixture("vit").display());
    let keys = [
        &*from,
        "model.num_labels=2",
        "checkpoint.load.exclude=[\"classifier\"]",
        "data.path=pictures",
        "data.predict_path=new",
        "data.height=12",
        "data.width=12",
    ];
    let lines = predicted(dir.path(), "image_classification", &keys, "jsonl");
    let row: Value = serde_json::from_str(lines.trim()).unwrap();
    assert_eq!(row["name"], "new/holiday/a.ppm");
    let outputs = row["outputs"].as_object().unwrap();
    assert_eq!(outputs.keys().collect::<Vec<_>>(), ["cat", "dog"]);
}

#[test]
fn mistakes_end_before_a_rank_starts() {
    let dir = folder();
    let write = |name: &str, content: &str| fs::write(dir.path().join(name), content).unwrap();
    write("odd.jsonl", "{\"text\": \"cat\", \"label\": \"odd\"}\n");
    write("empty.jsonl", "");
    write("five.jsonl", "{\"text\": \"cat\", \"label\": 1}\n{\"text\": \"cat\", \"label\": 4}\n");
    let error = |module: &str, keys: &[&str]| {
        let mut all = sets(keys);
        all.extend([format!("module.type={module}"), "trainer.devices=2".to_owned()]);
        let output = fit(dir.path(), &all);
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let fixtures = fixture("").display().to_string();
        text.replace(&*fixtures, "FIXTURES/")
    };
    let classify = |keys: &[&'static str]| error("sequence_classification", &bert(keys));
    assert_says!(
        classify(&["data.path=texts.jsonl", "data.validation_path=odd.jsonl"]),
        r#"error: data: odd.jsonl, line 1 has the label "odd" … none of the classes …"#
    );
    assert_says!(
        classify(&["data.path=odd.jsonl", "model.id2label={ 0 = 'a', 1 = 'b' }"]),
        r#"error: data: odd.jsonl, line 1 … "odd" … model's classes … model.num_labels …"#
    );
    assert_says!(
        classify(&["data.path=texts.jsonl", "data.text_key=body"]),
        r#"error: data: texts.jsonl, line 1 has no column "body" (data.text_key) …"#
    );
    assert_says!(classify(&["data.path=empty.jsonl"]), "error: data: empty.jsonl … has no rows");
    assert_says!(
        classify(&["data.path=texts.jsonl", "model.vocab_size=8"]),
        "error: data.tokenizer has 13 ids … only 8 (`model.vocab_size`) …"
    );
    assert_says!(
        classify(&["data.path=five.jsonl", "model.num_labels=3"]),
        "error: data: five.jsonl, line 2 … class 4 … 3 classes … (`model.num_labels`)"
    );
    assert_says!(
        classify(&["data.path=numbers.jsonl", "model.problem_type=single_label_classification"]),
        r#"error: `model.problem_type` is "single_label_classification" … has numbers …"#
    );
    assert_says!(
        classify(&["data.path=texts.jsonl", "data.seq_len=600"]),
        "error: data.seq_len is 600 … 512 positions … at most …"
    );
    assert_says!(
        classify(&["data.path=texts.jsonl", "model.mlm_probability=0.2"]),
        r#"error: `model.mlm_probability` … type "bert" has no such key …"#
    );
    let llama = format!("model.from_pretrained={}", fixture("llama").display());
    let adapters = "trainer.adapters={ targets = 'all-linear' }";
    let keys = ["data.path=texts.jsonl", "data.tokenizer=tokenizer.json", "data.seq_len=12"];
    assert_says!(
        error("sequence_classification", &[&[&*llama, adapters], &keys[..]].concat()),
        "error: FIXTURES/llama has no values for score.weight … beside adapters …"
    );
    assert_says!(
        error("token_classification", &bert(&["data.path=texts.jsonl"])),
        r#"error: data.type is "texts", and `token_classification` needs "words""#
    );
    assert_says!(
        error("embedding", &bert(&["data.path=texts.jsonl"])),
        r#"error: data.type is "texts", and `embedding` needs "pairs""#
    );
    let vit = format!("model.from_pretrained={}", fixture("vit").display());
    assert_says!(
        error("image_classification", &[&vit, "data.path=pictures"]),
        "error: data.height and data.width are 32 and 32 … 12 by 12 … set both to 12"
    );
    let bytes = [
        "data.type=lines",
        "data.path=lines.txt",
        "data.tokenizer=bytes",
        "model.type=bert",
        "model.attention_probs_dropout_prob=0",
    ];
    assert_says!(error("masked_lm", &bytes), "error: `model.mask_token_id` … has no token …");
    assert_says!(
        error(
            "masked_lm",
            &[&*vit, "data.type=lines", "data.path=lines.txt", "data.tokenizer=tokenizer.json"]
        ),
        r#"error: `model.type` … "vit" takes pictures … has texts … "image_classification""#
    );
}
