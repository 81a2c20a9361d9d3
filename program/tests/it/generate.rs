//! `fulgurite generate` in real processes: against transformers, on every mesh, and bad input.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fulgurite_test_message::assert_says;
use insta::assert_snapshot;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tasks::fixture;

/// The prompts and new ids of `generation.json`.
struct Recorded {
    prompts: Vec<Vec<u32>>,
    new: Vec<Vec<u32>>,
}

fn recorded(name: &str) -> Recorded {
    let text = fs::read_to_string(fixture("generation.json")).unwrap();
    let mut all: BTreeMap<String, Value> = serde_json::from_str(&text).unwrap();
    let of = all.remove(name).unwrap();
    let ids = |key: &str| serde_json::from_value(of[key].clone()).unwrap();
    Recorded { prompts: ids("prompts"), new: ids("new") }
}

fn run(dir: &Path, command: &str, args: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_fulgurite"));
    program.arg(command).args(args).current_dir(dir).stdin(Stdio::null());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "RAYON_NUM_THREADS"] {
        program.env_remove(name);
    }
    program.output().unwrap()
}

/// The standard output of a run that succeeds.
#[track_caller]
fn generate(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, "generate", args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The error of a run that fails, without the fixtures' folder.
#[track_caller]
fn refusal(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, "generate", args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {errors}");
    assert!(output.stdout.is_empty(), "{args:?}");
    let folder = fixture("").display().to_string();
    errors.replace(&folder, "").replace(&dir.display().to_string(), "").trim_end().to_owned()
}

fn answers(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids(lines: &str) -> Vec<Vec<u32>> {
    let ids = |answer: Value| serde_json::from_value(answer["ids"].clone()).unwrap();
    answers(lines).into_iter().map(ids).collect()
}

/// A folder with a file of a model's prompts.
fn folder(prompts: &[Vec<u32>]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let lines: String = prompts.iter().map(|ids| format!("{}\n", json!({ "ids": ids }))).collect();
    fs::write(dir.path().join("prompts.jsonl"), lines).unwrap();
    dir
}

/// Arguments for the greedy answers of `generation.json`.
const GREEDY: [&str; 7] =
    ["--input", "prompts.jsonl", "--max-new-tokens", "8", "--ignore-eos", "--output", "json"];

const MESHES: [(&str, &str); 10] = [
    ("1", "trainer.strategy=single_device"),
    ("2", "trainer.strategy=ddp"),
    ("2", "trainer.strategy=fsdp"),
    ("4", "trainer.strategy=fsdp"),
    ("2", "trainer.strategy={ type = \"model_parallel\", tensor_parallel_size = 2 }"),
    ("4", "trainer.strategy={ type = \"model_parallel\", tensor_parallel_size = 2 }"),
    ("4", "trainer.strategy={ type = \"model_parallel\", context_parallel_size = 2 }"),
    ("2", PIPELINE),
    (
        "4",
        "trainer.strategy={ type = \"model_parallel\", pipeline_parallel_size = 2, tensor_parallel_size = 2 }",
    ),
    // Two ranks of a stage have prompts of their own.
    ("4", PIPELINE),
];

/// The first rank has the first and the last of three stages.
const ENDS_TOGETHER: &str = "trainer.strategy={ type = \"model_parallel\", pipeline_parallel_size = 2, \
                             pipeline_schedule = \"lists.csv\" }";
const PIPELINE: &str = "trainer.strategy={ type = \"model_parallel\", pipeline_parallel_size = 2 }";

/// Whether two ranks of the mesh have different samples.
fn cuts_batches(strategy: &str) -> bool {
    strategy.contains("fsdp") || strategy.contains("context")
}

#[test]
fn greedy_ids_equal_transformers_on_every_mesh() {
    for name in ["llama", "gpt2", "gemma3_text", "smollm3"] {
        let Recorded { prompts, new } = recorded(name);
        let (dir, model) = (folder(&prompts), fixture(name).display().to_string());
        for (devices, strategy) in MESHES {
            let args = ["--model", &model, "--devices", devices, "--set", strategy];
            let lines = generate(dir.path(), &[&args[..], &GREEDY].concat());
            assert_eq!(ids(&lines), new, "{name} {devices} {strategy}");
        }
        fs::write(dir.path().join("lists.csv"), "0F0,2F0,2B0,0B0\n1F0,1B0\n").unwrap();
        let args = ["--model", &model, "--devices", "2", "--set", ENDS_TOGETHER];
        assert_eq!(ids(&generate(dir.path(), &[&args[..], &GREEDY].concat())), new, "{name}");
    }
    let Recorded { prompts, new } = recorded("gpt_neox");
    let (dir, model) = (folder(&prompts), fixture("gpt_neox").display().to_string());
    let strategy = "trainer.strategy={ type = \"model_parallel\", tensor_parallel_size = 4 }";
    let args = ["--model", &model, "--devices", "4", "--set", strategy];
    assert_eq!(ids(&generate(dir.path(), &[&args[..], &GREEDY].concat())), new);
}

#[test]
fn adapters_equal_peft_on_every_mesh() {
    for name in ["llama", "gpt2"] {
        let adapter = format!("{name}_adapter");
        let Recorded { prompts, new } = recorded(&adapter);
        let (dir, model) = (folder(&prompts), fixture(name).display().to_string());
        let adapter = fixture(&adapter).display().to_string();
        for (devices, strategy) in [MESHES[0], MESHES[2], MESHES[4], MESHES[7]] {
            let args = ["--model", &model, "--adapter", &adapter];
            let mesh = ["--devices", devices, "--set", strategy];
            let lines = generate(dir.path(), &[&args[..], &mesh, &GREEDY].concat());
            assert_eq!(ids(&lines), new, "{name} {devices} {strategy}");
        }
    }
}

#[test]
fn sampled_tokens_equal_on_any_mesh_and_batch() {
    let (dir, model) = (folder(&recorded("qwen3").prompts), fixture("qwen3").display().to_string());
    let args = ["--model", &model, "--temperature", "1.1", "--top-p", "0.9", "--n", "2"];
    let with_seed = |seed| [&args[..], &["--seed", seed], &GREEDY].concat();
    let expected = generate(dir.path(), &with_seed("7"));
    assert_ne!(generate(dir.path(), &with_seed("8")), expected);
    assert_eq!(expected.lines().count(), 40);
    for (devices, strategy) in MESHES {
        for batch_size in ["1", "7", "20"] {
            let mesh = ["--devices", devices, "--set", strategy, "--batch-size", batch_size];
            let found = generate(dir.path(), &[&with_seed("7")[..], &mesh].concat());
            assert_eq!(found, expected, "{devices} {strategy} {batch_size}");
        }
    }
}

/// Trains a model of bytes to repeat a text, with more keys.
fn train(dir: &Path, more: &[&str]) -> Output {
    fs::write(dir.join("text.txt"), "añb çd ✓ ".repeat(2000)).unwrap();
    let keys = [
        "model.type=llama",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "data.path=text.txt",
        "data.seq_len=64",
        "data.validation_fraction=0",
        "trainer.max_steps=150",
        "optimizer.lr=0.01",
    ];
    let sets: Vec<&str> = keys.iter().chain(more).flat_map(|key| ["--set", key]).collect();
    run(dir, "fit", &sets)
}

/// A model of bytes that was trained to repeat a text: its checkpoint's folder.
pub(crate) fn trained(dir: &Path) -> PathBuf {
    let output = train(dir, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    dir.join("fulgurite_logs/version_0/checkpoints/last")
}

#[test]
fn checkpoint_of_a_run_generates_text() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, model) = (dir.path(), trained(dir.path()).display().to_string());
    let args = ["--model", &model, "--prompt", "añb ", "--max-new-tokens", "20"];
    assert_eq!(generate(dir, &args), "çd ✓ añb çd ✓\n");
    assert_eq!(generate(dir, &[&args[..], &["--stop", "✓"]].concat()), "çd \n");
    let stopped = [&args[..], &["--stop", "✓", "--output", "json"]].concat();
    let answer = answers(&generate(dir, &stopped)).remove(0);
    assert_eq!((&answer["text"], &answer["end"]), (&json!("çd "), &json!("stop")));
    assert_eq!(answer["ids"].as_array().unwrap().len(), 7, "with the stop text's bytes");
    fs::write(dir.join("prompts.txt"), "añb\n✓ a\n").unwrap();
    let args = ["--model", &model, "--input", "prompts.txt", "--max-new-tokens", "8"];
    assert_snapshot!(generate(dir, &args), @r"
    ── prompts.txt, line 1
     çd ✓
    ── prompts.txt, line 2
    ñb çd 
    ");
    // As a prediction.
    let keys = [
        "module.type=text_generation",
        "data.path=prompts.txt",
        "data.tokenizer=bytes",
        "data.max_new_tokens=8",
        "trainer.devices=2",
        "model.type=llama",
        "model.hidden_size=32",
        "model.intermediate_size=64",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=4",
        "model.vocab_size=264",
    ];
    let checkpoint = format!("trainer.ckpt_path={model}");
    for strategy in ["trainer.strategy=fsdp", PIPELINE] {
        let sets = keys.iter().copied().chain([strategy, &checkpoint]);
        let args: Vec<&str> = sets.flat_map(|set| ["--set", set]).collect();
        let output =
            run(dir, "predict", &[&args[..], &["--output-file", "answers.jsonl"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = answers(&fs::read_to_string(dir.join("answers.jsonl")).unwrap());
        let texts: Vec<&Value> = lines.iter().map(|line| &line["outputs"][0]["text"]).collect();
        let expected = [" çd ✓", "ñb çd "].map(|text| json!(text));
        assert_eq!(texts, expected.iter().collect::<Vec<_>>(), "{strategy}");
        assert_eq!(lines[1]["name"], "prompts.txt, line 2");
    }
}

#[test]
fn answers_are_scored_while_training() {
    let line = |prompt: &str, answer: Value| json!({"prompt": prompt, "answer": answer});
    let questions = [
        line("añb ", json!(" çd ✓ añb")),
        line("✓ ", json!(["çd ✓ añb", "añb çd ✓"])),
        line("çd ", json!("çd ✓ añb")),
        line("ñb ", json!("çd ✓ añb")),
        line("d ✓ ", json!("çd ✓ añb")),
    ];
    let lines: String = questions.iter().map(|line| format!("{line}\n")).collect();
    let exact =
        "{ type='answers', path='q.jsonl', name='pattern', max_new_tokens=12, batch_size=2 }";
    let filtered = "{ type='answers', path='q.jsonl', filter='^\\s*(\\S+)', match='contains', name='beginning' }";
    let kept =
        "{ type='model_checkpoint', monitor='val_pattern_accuracy', mode='max', filename='best' }";
    for (devices, strategy) in [MESHES[0], MESHES[2], MESHES[4], MESHES[6], MESHES[7]] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("q.jsonl"), &lines).unwrap();
        let keys = [
            &format!("trainer.callbacks=[{exact}, {filtered}, {kept}]"),
            &format!("trainer.devices={devices}"),
            strategy,
            &format!("data.batch_size={}", if cuts_batches(strategy) { 4 } else { 8 }),
            "data.validation_fraction=0.05",
            "trainer.val_check_interval=150",
        ];
        let output = train(dir.path(), &keys);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metrics = dir.path().join("fulgurite_logs/version_0/metrics.jsonl");
        let metrics = answers(&fs::read_to_string(metrics).unwrap());
        let value = |name: &str| {
            let found = metrics.iter().rev().find_map(|line| line[name].as_f64());
            found.unwrap_or_else(|| panic!("{name} in {metrics:?}"))
        };
        // The third and the fifth answer are others.
        assert_eq!(value("val_pattern_accuracy"), 0.6, "{strategy}");
        // No answer begins with all words.
        assert_eq!(value("val_beginning_accuracy"), 0.0, "{strategy}");
    }
}

#[test]
fn wrong_questions_are_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("text.txt"), "añb çd ✓ ".repeat(2000)).unwrap();
    let said = |line: &str, options: &str| {
        fs::write(dir.path().join("q.jsonl"), line).unwrap();
        let callback =
            format!("trainer.callbacks=[{{ type='answers', path='q.jsonl', {options} }}]");
        let output = train(dir.path(), &[&callback]);
        assert!(!output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        said.lines().last().unwrap_or_default().to_owned()
    };
    assert_says!(
        said(r#"{"prompt": 1, "answer": "x"}"#, ""),
        "error: `trainer.callbacks`, answers: q.jsonl, line 1 … `prompt` … neither a text nor …"
    );
    assert_says!(
        said(r#"{"prompt": "x", "answer": {}}"#, ""),
        "error: `trainer.callbacks`, answers: q.jsonl, line 1 … answer {} … a text or a number"
    );
    assert_says!(
        said(r#"{"prompt": "x", "answer": "x"}"#, "match='numeric'"),
        r#"error: `trainer.callbacks`, answers: q.jsonl, line 1 … answer "x" … no number …"#
    );
    assert_says!(
        said(r#"{"prompt": "x", "answer": "("}"#, "match='regex'"),
        r#"error: `trainer.callbacks` … q.jsonl, line 1 … "(" … no regular expression …"#
    );
    assert_says!(
        said(r#"{"prompt": "x", "answer": "x"}"#, "filter='('"),
        "error: `trainer.callbacks`, answers: `filter`: is no regular expression …"
    );
    assert_says!(
        said(r#"{"prompt": "x", "answer": "x"}"#, "batch_size=0"),
        "error: `trainer.callbacks`, answers: `batch_size` … at least 1, found 0"
    );
    assert_says!(
        said(r#"{"prompt": [], "answer": "x"}"#, ""),
        "error: `trainer.callbacks`, answers: prompt 0 … list of messages … no chat template"
    );
    assert_says!(said(r#"{"prompt": "x"}"#, ""), "error: `trainer.callbacks` … field `answer` …");
}

#[test]
fn samples_are_shown_and_logged_while_training() {
    let callback = "trainer.callbacks=[{ type = \"samples\", prompts = [\"añb \", \"✓ \"], every_n_steps = 75, \
                    max_new_tokens = 12 }]";
    let mut expected = None;
    for (devices, strategy) in [MESHES[0], MESHES[2], MESHES[4], MESHES[6], MESHES[7]] {
        let dir = tempfile::tempdir().unwrap();
        let keys = [
            callback,
            &format!("trainer.devices={devices}"),
            strategy,
            &format!("data.batch_size={}", if cuts_batches(strategy) { 4 } else { 8 }),
            "trainer.log_every_n_steps=25",
        ];
        let output = train(dir.path(), &keys);
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let last = "samples after step 150\n── añb \nçd ✓ añb\n── ✓ \nañb çd ✓";
        assert!(shown.contains(last), "{strategy}: {shown}");
        assert!(shown.contains("samples after step 75\n"), "{shown}");
        let metrics = dir.path().join("fulgurite_logs/version_0/metrics.jsonl");
        let metrics = answers(&fs::read_to_string(metrics).unwrap());
        let logged: Vec<Value> =
            metrics.into_iter().filter(|line| line.get("samples").is_some()).collect();
        assert_eq!(logged.len(), 2);
        assert_eq!(logged[1]["samples"], "── añb \nçd ✓ añb\n── ✓ \nañb çd ✓");
        let expected = expected.get_or_insert_with(|| logged.clone());
        assert_eq!(logged[1], expected[1], "{strategy}");
    }
}

#[test]
fn unusable_samples_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |callback: &str| {
        let output = train(dir.path(), &[&format!("trainer.callbacks=[{callback}]")]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
    };
    assert_says!(
        refused(r#"{ type = "samples" }"#),
        "error: `trainer.callbacks`, samples: `prompts` … at least one prompt"
    );
    assert_says!(
        refused(r#"{ type = "samples", prompts = ["a"], top_p = 2 }"#),
        "error: `trainer.callbacks`, samples: `top_p` … above 0 and at most 1, found 2"
    );
    assert_says!(
        refused(r#"{ type = "samples", prompts = [""] }"#),
        "error: `trainer.callbacks`, samples: prompt 0: the prompt is empty …"
    );
}

#[test]
fn unusable_requests_start_no_rank() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let fixtures: BTreeMap<&str, String> = ["llama", "gpt2", "phi3", "bert_masked", "vit", "none"]
        .map(|name| (name, fixture(name).display().to_string()))
        .into();
    let [llama_adapter, gpt2_adapter] =
        ["llama_adapter", "gpt2_adapter"].map(|name| fixture(name).display().to_string());
    let of = |model: &str, args: &[&str]| {
        let two = ["--model", &fixtures[model], "--devices", "2", "--set", "trainer.strategy=fsdp"];
        refusal(dir, &[&two[..], args].concat())
    };
    assert_says!(of("llama", &[]), "error: there is no prompt … --prompt, --prompt-ids or --input");
    assert_says!(of("none", &["--prompt-ids", "3"]), "error: --model: none … no such folder …");
    assert_says!(of("llama", &["--prompt", "hello"]), "error: prompt 0 is a text … no tokenizer …");
    assert_says!(of("llama", &["--prompt-ids", "3,x"]), "error: --prompt-ids is `3,x` … tokens …");
    assert_says!(
        of("llama", &["--prompt-ids", "3", "--prompt-ids", "4,43"]),
        "error: data: prompt 1: token 43 is not of the model … below 43 … tokenizer …"
    );
    assert_says!(
        of("llama", &["--tokenizer", "bytes", "--prompt", ""]),
        "error: data: prompt 0: the prompt is empty …"
    );
    assert_says!(
        of("gpt2", &["--prompt-ids", "3", "--max-new-tokens", "33"]),
        "error: data: prompt 0 … has 1 token … 32 positions … at most 32 new tokens"
    );
    assert_says!(
        of("phi3", &["--prompt-ids", "3,4", "--max-new-tokens", "9"]),
        "error: data: prompt 0 … 2 tokens … rotary … 10 tokens … at most 7 new tokens"
    );
    assert_says!(
        of("bert_masked", &["--prompt-ids", "3"]),
        r#"error: `model.type` … "bert" is of another kind … `module.type` needs: a decoder …"#
    );
    for (args, key) in [
        (["--temperature=-1", "--n=1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--min-p", "2"], "min_p"),
        (["--repetition-penalty", "0"], "repetition_penalty"),
        (["--n", "0"], "samples"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
    ] {
        let refused = of("llama", &[&["--prompt-ids", "3"][..], &args].concat());
        assert!(refused.starts_with(&format!("error: `data.{key}`: must be ")), "{refused}");
    }
    assert_says!(
        of("llama", &["--prompt-ids", "3", "--stop", "x"]),
        "error: `data.stop` … need `data.tokenizer`"
    );
    let few = ["--prompt-ids", "3", "--max-new-tokens", "4", "--adapter"];
    let other = of("gpt2", &[&few[..], &[&llama_adapter]].concat());
    assert!(other.contains("does not") || other.contains("no layer"), "{other}");
    let other = of("llama", &[&few[..], &[&gpt2_adapter]].concat());
    assert!(other.contains("does not fit this model"), "{other}");
    fs::write(dir.join("prompts.txt"), "one\n\nthree\n").unwrap();
    let file = ["--tokenizer", "bytes", "--input", "prompts.txt"];
    assert_says!(of("llama", &file), "error: data: prompts.txt, line 2 (data.path) is empty …");
    fs::write(dir.join("prompts.jsonl"), "{\"prompt\": \"a\", \"ids\": [3]}\n").unwrap();
    assert_says!(of("llama", &["--input", "prompts.jsonl"]), "error: data: … line 1 … needs one …");
}

/// A prompt with `--chat` is the same conversation as `messages` of a file.
#[test]
fn chat_prompts_are_rendered() {
    let dir = crate::tasks::folder();
    let model = fixture("llama_yarn").display().to_string();
    let common = [
        "--model",
        &model,
        "--tokenizer",
        "tokenizer.json",
        "--max-new-tokens",
        "4",
        "--output",
        "json",
    ];
    let answer = |args: &[&str]| ids(&generate(dir.path(), &[&common, args].concat()));
    let chatml = ["--chat-template", "chatml"];
    let chat = ["--chat", "--system", "is", "--prompt", "the cat"];
    let of_words = answer(&[&chatml[..], &chat].concat());
    let messages = json!({"messages": [
        {"role": "system", "content": "is"}, {"role": "user", "content": "the cat"},
    ]});
    fs::write(dir.path().join("chat.jsonl"), messages.to_string()).unwrap();
    assert_eq!(answer(&[&chatml[..], &["--input", "chat.jsonl"]].concat()), of_words);
    assert_ne!(of_words, answer(&["--prompt", "the cat"]));
    let no_template = refusal(dir.path(), &[&common[..], &chat].concat());
    assert!(no_template.contains("there is no chat template in"), "{no_template}");
    let role = json!({"messages": [{"role": "robot", "content": "x"}]});
    fs::write(dir.path().join("chat.jsonl"), role.to_string()).unwrap();
    let wrong = refusal(dir.path(), &[&common[..], &chatml, &["--input", "chat.jsonl"]].concat());
    assert!(
        wrong.contains("chat.jsonl, line 1 has a message 0 of the unknown role \"robot\""),
        "{wrong}"
    );
}

/// The recorded texts of `t5_gated`, also where a rank has no prompt.
#[test]
fn encoder_decoders_write_on_every_mesh() {
    let prompts: [&[u32]; 3] = [
        &[34, 6, 27, 29, 22, 26, 20, 21, 26, 6, 32, 28],
        &[42, 8, 40, 27, 7, 8, 13, 41],
        &[42, 8, 40, 27, 7, 8, 13, 41],
    ];
    let dir = folder(&prompts.map(<[u32]>::to_vec));
    let model = fixture("t5_gated").display().to_string();
    let first = vec![36, 6, 34, 36, 6, 34, 21, 36, 6, 6, 6, 6, 6, 6];
    let common = ["--model", &model, "--max-new-tokens", "14", "--ignore-eos", "--output", "json"];
    let tensor = "trainer.strategy={ type = 'model_parallel', tensor_parallel_size = 2 }";
    for (devices, strategy) in
        [("1", "trainer.strategy=single_device"), ("2", "trainer.strategy=fsdp"), ("2", tensor)]
    {
        let mesh = ["--devices", devices, "--set", strategy];
        let file = ["--input", "prompts.jsonl", "--batch-size", "1"];
        let found = ids(&generate(dir.path(), &[&common[..], &mesh, &file].concat()));
        assert_eq!(found, [first.clone(), vec![21; 14], vec![21; 14]], "{strategy}");
        let sampled = ["--temperature", "1.5", "--n", "2", "--seed", "3"];
        let found = answers(&generate(dir.path(), &[&common[..], &mesh, &file, &sampled].concat()));
        assert_eq!(found.len(), 6, "{strategy}");
    }
    let error = refusal(dir.path(), &["--model", &model, "--prompt-ids", "50"]);
    assert!(error.contains("prompt 0: token 50 is not of the model"), "{error}");
}
