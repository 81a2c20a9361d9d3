//! Models that `fulgurite` trains, converts and serves, in `transformers`, llama.cpp and lm-eval,
//! and trainings beside TRL's.
//! Requires a Python with them:
//!
//! ```sh
//! python3 -m venv target/interop
//! target/interop/bin/pip install torch transformers safetensors peft sentencepiece gguf \
//!     llama-cpp-python 'lm-eval[api]' trl datasets accelerate
//! FULGURITE_PYTHON=target/interop/bin/python cargo test -p fulgurite-cli --test it interop:: -- --ignored
//! ```

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::encoders::{ENCODERS, Encoder, data};
use crate::models::{decoders, fit, has_experts, losses_of, root, run};

/// Trains a decoder on two ranks of `fsdp` without changing its weights, and converts the
/// checkpoint.
fn trained(decoder: &Path, scratch: &Path) -> PathBuf {
    let dir = scratch.join(decoder.file_name().unwrap());
    let checkpoints = format!("checkpoint.dir={}", dir.join("checkpoints").display());
    let two_ranks = ["trainer.devices=2", "trainer.strategy=fsdp", "data.batch_size=2"];
    let losses = fit(
        decoder,
        scratch,
        &[&two_ranks[..], &["trainer.max_steps=2", "optimizer.lr=0.0", &checkpoints]].concat(),
    );
    assert_eq!(losses.len(), 2);
    let (step, out) = (dir.join("checkpoints/step-00000002"), dir.join("converted"));
    let (step, to) = (step.to_str().unwrap(), out.to_str().unwrap());
    let args = ["checkpoint", "convert", step, to, "--to", "hugging-face"].map(str::to_owned);
    let [_, said] = run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    assert!(said.contains("there is no tokenizer"), "{said}");
    out
}

/// As [`trained`], for an encoder.
fn trained_encoder(encoder: &Encoder, data: &Path) -> PathBuf {
    let checkpoints = format!("checkpoint.dir={}-checkpoints", encoder.name);
    let sets = [
        "trainer.devices=2",
        "trainer.strategy=fsdp",
        "data.batch_size=2",
        "trainer.max_steps=2",
        "optimizer.lr=0.0",
        &checkpoints,
    ];
    assert_eq!(encoder.fit(data, &sets).len(), 2);
    let step = data.join(format!("{}-checkpoints/step-00000002", encoder.name));
    let out = data.join(format!("{}-converted", encoder.name));
    let (step, to) = (step.to_str().unwrap(), out.to_str().unwrap());
    let args = ["checkpoint", "convert", step, to, "--to", "hugging-face"].map(str::to_owned);
    run(env!("CARGO_BIN_EXE_fulgurite"), &args);
    out
}

#[test]
#[ignore = "needs a Python with transformers"]
fn transformers_loads_trained_models() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let (scratch, data) = (tempfile::tempdir().unwrap(), data());
    let mut args = vec![root().join("tests/interop/transformers_logits.py")];
    for decoder in decoders() {
        args.push(trained(&decoder, scratch.path()));
        args.push(decoder.join("expected.safetensors"));
    }
    for encoder in &ENCODERS {
        args.push(trained_encoder(encoder, data.path()));
        args.push(encoder.fixture().join("expected.safetensors"));
    }
    let args: Vec<String> = args.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

/// The adapter and the merged model of a run in `dir`, for PEFT and `transformers`: the base, and
/// directories of both.
fn adapted(base: &Path, dir: &Path) -> [PathBuf; 3] {
    let step = dir.join("checkpoints/step-00000006");
    let found = std::fs::read_dir(dir.join("logs")).unwrap();
    let adapters = found.map(|version| version.unwrap().path().join("adapter"));
    let adapter = adapters.into_iter().find(|path| path.is_dir()).expect("a run has its adapter");
    let (written, merged) = (dir.join("peft"), dir.join("merged"));
    let word = |path: &Path| path.to_str().unwrap().to_owned();
    let convert = |from: &Path, to: &Path, more: &[String]| {
        let args = ["checkpoint".to_owned(), "convert".to_owned(), word(from), word(to)];
        run(env!("CARGO_BIN_EXE_fulgurite"), &[&args, more].concat());
    };
    convert(&adapter, &written, &["--to".to_owned(), "peft".to_owned()]);
    let merge = ["--to".to_owned(), "hugging-face".to_owned(), "--adapter".to_owned()];
    convert(&step, &merged, &[&merge[..], &[word(&adapter)]].concat());
    [base.to_owned(), written, merged]
}

#[test]
#[ignore = "needs a Python with transformers and peft"]
fn peft_loads_adapters_of_every_family() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let (scratch, data) = (tempfile::tempdir().unwrap(), data());
    let sets = |dir: &Path| {
        [
            "trainer.adapters={rank=2,targets=\"all-linear\"}".to_owned(),
            "optimizer.lr=0.1".to_owned(),
            "trainer.max_steps=6".to_owned(),
            "data.batch_size=4".to_owned(),
            format!("trainer.default_root_dir={}", dir.join("logs").display()),
            format!("checkpoint.dir={}", dir.join("checkpoints").display()),
        ]
    };
    let mut args = vec![root().join("tests/interop/peft_adapters.py")];
    for decoder in decoders().into_iter().filter(|decoder| !has_experts(decoder)) {
        let dir = scratch.path().join(decoder.file_name().unwrap());
        let sets = sets(&dir);
        fit(&decoder, scratch.path(), &sets.iter().map(String::as_str).collect::<Vec<_>>());
        args.extend(adapted(&decoder, &dir));
    }
    let is_taken = |name: &str| name.ends_with("_classes") || name.contains("t5");
    for encoder in ENCODERS.iter().filter(|encoder| is_taken(encoder.name)) {
        let dir = scratch.path().join(encoder.name);
        encoder.fit(data.path(), &sets(&dir).iter().map(String::as_str).collect::<Vec<_>>());
        args.extend(adapted(&encoder.fixture(), &dir));
    }
    let args: Vec<String> = args.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

#[test]
#[ignore = "needs a Python with transformers and llama-cpp-python"]
fn llama_cpp_runs_converted_models() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let scratch = tempfile::tempdir().unwrap();
    let script = root().join("tests/interop/gguf_llama_cpp.py");
    let words = [script.as_path(), Path::new(env!("CARGO_BIN_EXE_fulgurite")), scratch.path()];
    let args = words.map(|path| path.to_str().unwrap().to_owned());
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

#[test]
#[ignore = "needs a Python with transformers and lm-eval"]
fn lm_eval_scores_a_server_as_transformers() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let script = root().join("tests/interop/lm_eval_server.py");
    let words = [script.as_path(), Path::new(env!("CARGO_BIN_EXE_fulgurite"))];
    let args = words.map(|path| path.to_str().unwrap().to_owned());
    let [compared, _] = run(python, &args);
    println!("{compared}");
}

/// A model of the fixtures with a tokenizer of words, which TRL ends each answer with `</s>` by.
fn with_tokenizer(name: &str, scratch: &Path) -> PathBuf {
    let (fixture, dir) = (crate::tasks::fixture(name), scratch.join(name));
    std::fs::create_dir_all(&dir).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(file), dir.join(file)).unwrap();
    }
    let specials = ["<pad>", "<unk>", "</s>"];
    let added = specials.iter().enumerate().map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    });
    let vocab = specials.iter().chain(&WORDS).enumerate();
    let vocab: serde_json::Map<String, Value> =
        vocab.map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    });
    let names = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>",
                       "pad_token": "<pad>", "unk_token": "<unk>"});
    for (file, content) in [("tokenizer.json", tokenizer), ("tokenizer_config.json", names)] {
        std::fs::write(dir.join(file), content.to_string()).unwrap();
    }
    dir
}

const WORDS: [&str; 8] = ["the", "cat", "run", "good", "bad", "film", "is", "not"];

/// A training by TRL and here: its kind, the model, the number of rows, a row, and settings.
type Training<'a> = (&'a str, &'a str, usize, &'a dyn Fn(usize) -> Value, &'a [&'a str]);

#[test]
#[ignore = "needs a Python with trl, datasets and accelerate"]
fn trl_trains_with_equal_losses() {
    let python = std::env::var("FULGURITE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let scratch = tempfile::tempdir().unwrap();
    let text = |i: usize, count: usize| {
        (0..count).map(|k| WORDS[(i * 3 + k * k) % 8]).collect::<Vec<_>>().join(" ")
    };
    let prompt = |i: usize| text(i, 2 + i % 3);
    let [first, second] =
        [1, 2].map(|n| move |i: usize| format!(" {}", text(i + n, n + i % (5 - n))));
    let answer = |i: usize| json!({"prompt": prompt(i), "completion": first(i)});
    let pair = |i: usize| json!({"prompt": prompt(i), "chosen": first(i), "rejected": second(i)});
    let judged =
        |i: usize| json!({"prompt": prompt(i), "completion": first(i), "label": i % 3 != 1});
    // TRL takes mismatched answers from the batch, and so has one batch of rows.
    let kinds: [Training; 4] = [
        ("sft", "llama_yarn", 24, &answer, &["module.type=chat", "data.packing=false"]),
        ("dpo", "llama_yarn", 24, &pair, &["module.type=preference", "model.beta=0.3"]),
        (
            "kto",
            "llama_yarn",
            4,
            &judged,
            &[
                "module.type=kto",
                "model.beta=0.3",
                "model.desirable_weight=1.5",
                "model.undesirable_weight=0.5",
            ],
        ),
        (
            "reward",
            "llama_reward",
            24,
            &pair,
            &["module.type=reward", "model.center_rewards_coefficient=0.05"],
        ),
    ];
    for (kind, model, count, row, own) in kinds {
        let model = with_tokenizer(model, scratch.path()).display().to_string();
        let rows: String = (0..count).map(|i| format!("{}\n", row(i))).collect();
        let path = scratch.path().join(format!("{kind}.jsonl")).display().to_string();
        std::fs::write(&path, rows).unwrap();
        let script = root().join("tests/interop/trl_curves.py").display().to_string();
        let args = [script, kind.to_owned(), model.clone(), path.clone(), "10".to_owned()];
        let [theirs, _] = run(&python, &args);
        let theirs: Vec<f64> = serde_json::from_str(theirs.lines().last().unwrap()).unwrap();
        let common = [
            format!("model.from_pretrained={model}"),
            format!(
                "data={{ path='{path}', tokenizer='{model}', seq_len=16, batch_size=4, shuffle=false, \
                 validation_fraction=0.0 }}"
            ),
            "optimizer={ type='adamw', lr=0.01, weight_decay=0.0 }".to_owned(),
            "scheduler=constant".to_owned(),
            "trainer.gradient_clip_val=1.0".to_owned(),
            "trainer.max_steps=10".to_owned(),
            "trainer.loggers=[]".to_owned(),
        ];
        let sets = common.iter().map(String::as_str).chain(own.iter().copied());
        let ours = losses_of(scratch.path(), sets);
        let differences = ours.iter().zip(&theirs).map(|(ours, theirs)| (ours - theirs).abs());
        let largest = differences.fold(0.0, f64::max);
        println!("{kind}: {ours:?}, TRL {theirs:?}: equal up to {largest:e}");
        assert_eq!((ours.len(), theirs.len()), (10, 10));
        assert!(largest <= 1e-5 && ours[9] < ours[0], "{kind}: {ours:?}, TRL {theirs:?}");
    }
}
