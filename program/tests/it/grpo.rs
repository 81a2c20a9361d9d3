//! `fulgurite fit` on rewards: a tiny model sorts letters.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

/// The model, in layers of 64.
const MODEL: [&str; 6] = [
    "model.type=llama",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.max_position_embeddings=32",
];

/// Some letters without order, different for each `i`.
fn letters(i: usize) -> String {
    let mut left: Vec<char> = ('a'..='h').collect();
    let mut state = i * 7919 + 3;
    let mut take = |_| {
        state = (state * 1_103_515_245 + 12345) % (1 << 31);
        left.remove((state >> 8) % left.len())
    };
    (0..3 + i % 3).map(&mut take).collect()
}

fn sorted(letters: &str) -> String {
    let mut all: Vec<char> = letters.chars().collect();
    all.sort_unstable();
    all.into_iter().collect()
}

/// Writes rows of prompts and sorted letters under `answer`.
fn write(path: &Path, rows: std::ops::Range<usize>, answer: &str) {
    let row = |i: usize| {
        let prompt = letters(i);
        json!({"prompt": format!("{prompt}>"), answer: sorted(&prompt)})
    };
    fs::write(path, rows.map(|i| format!("{}\n", row(i))).collect::<String>()).unwrap();
}

/// Runs `fulgurite fit`. Returns the events, or the errors.
fn fit(dir: &Path, sets: &[&str]) -> Result<Vec<Value>, String> {
    let own = ["data.tokenizer=bytes", "trainer.loggers=[]", "scheduler=constant"];
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["fit", "--output", "json"])
        .args(MODEL.iter().chain(&own).chain(sets).flat_map(|set| ["--set", set]))
        .env("OMP_NUM_THREADS", "1")
        .current_dir(dir)
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let events = String::from_utf8(output.stdout).unwrap();
    Ok(events.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// A folder with a model that has learned to sort a little, and prompts.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("taught.jsonl"), 0..400, "completion");
    write(&dir.path().join("prompts.jsonl"), 400..2400, "answer");
    let sets = [
        "module.type=chat",
        "data.path=taught.jsonl",
        "data.seq_len=32",
        "data.batch_size=32",
        "data.validation_fraction=0.0",
        "optimizer.lr=0.003",
        "trainer.max_steps=50",
        "trainer.default_root_dir=taught",
    ];
    fit(dir.path(), &sets).unwrap();
    dir
}

const GRPO: [&str; 9] = [
    "module.type=grpo",
    "model.grpo.samples=8",
    "model.grpo.max_new_tokens=8",
    "model.grpo.rewards=[{ type = 'answer' }]",
    "data.path=prompts.jsonl",
    "data.seq_len=16",
    "trainer.log_every_n_steps=1",
    "trainer.ckpt_path=taught/version_0/checkpoints/last",
    "checkpoint.weights_only=true",
];

/// Trains on rewards.
fn reinforce(dir: &Path, sets: &[&str]) -> Vec<Value> {
    fit(dir, &[&GRPO, sets].concat()).unwrap()
}

/// The values of a metric, step by step.
fn metric(events: &[Value], name: &str) -> Vec<f64> {
    let of_steps = events.iter().filter(|event| event["event"] == "step");
    of_steps.map(|event| event["metrics"][name].as_f64().unwrap()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn letters_are_sorted_for_rewards() {
    let dir = folder();
    let sets = [
        "optimizer.lr=0.001",
        "data.batch_size=16",
        "data.validation_fraction=0.05",
        "trainer.max_steps=80",
        "trainer.val_check_interval=80",
    ];
    let events = reinforce(dir.path(), &sets);
    let rewards = metric(&events, "reward");
    let (first, last) = (mean(&rewards[..5]), mean(&rewards[75..]));
    assert!(first < 0.8 && last > first + 0.15, "{first} to {last}");
    // Sampling and learning have equal bits, so the ratio is exactly 1.
    assert!(metric(&events, "logp_difference").iter().all(|difference| *difference == 0.0));
    assert!(metric(&events, "clipped").iter().all(|share| *share == 0.0));
    let validation = events.iter().find(|event| event["event"] == "validation").unwrap();
    let reward = validation["metrics"]["val_reward"].as_f64().unwrap();
    assert!(reward > 0.85, "{validation}");
    assert_eq!(validation["val_loss"].as_f64().unwrap(), -reward);
}

#[test]
fn loads_of_experts_are_logged() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("prompts.jsonl"), 0..8, "answer");
    // Another type of model removes the keys of the first.
    let own = ["model.type=mixtral", "model.num_local_experts=4", "model.num_key_value_heads=2"];
    let sets = ["data.batch_size=4", "trainer.max_steps=1"];
    let without_weights = &GRPO[..GRPO.len() - 2];
    let of = |more: &[&str]| {
        fit(dir.path(), &[&own, &MODEL[1..], without_weights, &sets, more].concat())
    };
    let events = of(&[]).unwrap();
    let most = metric(&events, "expert_load.max_share")[0];
    // A token has two of the four.
    assert!((0.25..=0.5).contains(&most), "{most}");
    let error = of(&["model.expert_capacity_factor=1.0"]).unwrap_err().to_string();
    assert!(error.contains("`model.expert_capacity_factor`: `module.type = \"grpo\"`"), "{error}");
}

#[test]
fn answers_are_equal_on_any_mesh() {
    let dir = folder();
    let tensor = "trainer.strategy={ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let meshes: [&[&str]; 5] = [
        &["data.batch_size=8"],
        &["data.batch_size=4", "trainer.devices=2", "trainer.strategy=fsdp"],
        &[
            "data.batch_size=2",
            "trainer.devices=2",
            "trainer.strategy=ddp",
            "trainer.accumulate_grad_batches=2",
        ],
        &["data.batch_size=8", "trainer.devices=2", tensor],
        &["data.batch_size=8", "trainer.activation_checkpointing=full"],
    ];
    for options in [
        &["model.grpo.loss=grpo"][..],
        &["model.grpo.temperature=0.7", "trainer.precision=bf16-mixed"],
    ] {
        let run = |mesh: &[&str]| {
            let steps = ["trainer.max_steps=3", "data.validation_fraction=0.0"];
            let events = reinforce(dir.path(), &[&steps, options, mesh].concat());
            assert_eq!(metric(&events, "logp_difference"), [0.0; 3], "{options:?} {mesh:?}");
            (metric(&events, "reward"), metric(&events, "answer_tokens"))
        };
        let alone = run(meshes[0]);
        assert!(alone.0.iter().all(|reward| *reward > 0.0), "{alone:?}");
        // In bf16 meshes round otherwise.
        let meshes = if options.len() == 1 { &meshes[1..] } else { &meshes[1..2] };
        for mesh in meshes {
            let found = run(mesh);
            if options.len() == 1 {
                assert_eq!(found, alone, "{mesh:?}");
            }
        }
    }
}

#[test]
fn deviation_of_the_batch_is_of_all_ranks() {
    let dir = folder();
    let sets = [
        "model.grpo.scale_rewards=batch",
        "model.grpo.importance_sampling_level=sequence",
        "model.grpo.loss=grpo",
        "trainer.max_steps=2",
        "data.validation_fraction=0.0",
    ];
    let norms = |mesh: &[&str]| -> Vec<f64> {
        let events = reinforce(dir.path(), &[&sets, mesh].concat());
        let steps = events.iter().filter(|event| event["event"] == "step");
        steps.map(|event| event["grad_norm"].as_f64().unwrap()).collect()
    };
    let tensor = "trainer.strategy={ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let alone = norms(&["data.batch_size=4"]);
    for mesh in [
        ["data.batch_size=2", "trainer.devices=2", "trainer.strategy=fsdp"],
        ["data.batch_size=4", "trainer.devices=2", tensor],
    ] {
        for (found, expected) in norms(&mesh).iter().zip(&alone) {
            assert!((found / expected - 1.0).abs() < 1e-4, "{mesh:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn answers_are_learned_from_several_times() {
    let dir = folder();
    let lora = "trainer.adapters={ targets = 'all-linear', rank = 4, dropout = 0.1 }";
    let sets = [
        "model.grpo.updates=3",
        "model.grpo.beta=0.05",
        "model.grpo.epsilon=0.001",
        "optimizer.lr=0.01",
        "data.batch_size=4",
        "trainer.max_steps=3",
        lora,
    ];
    let events = reinforce(dir.path(), &sets);
    // Adapters begin as no change, and dropout is off.
    assert_eq!(metric(&events, "kl")[0], 0.0);
    assert!(metric(&events, "kl")[2] > 0.0);
    assert!(metric(&events, "clipped").iter().all(|share| (0.1..1.0).contains(share)));
    assert_eq!(metric(&events, "logp_difference"), [0.0; 3]);
}

/// A program beside the model keeps the answers, whose scores are predicted afterwards.
#[test]
fn reward_models_score_as_they_predict() {
    let dir = crate::tasks::folder();
    let fixture =
        |name: &str| crate::models::root().join("plugins/models/tests/fixtures").join(name);
    let rows = ["the cat", "good film", "not bad", "run"]
        .map(|prompt| format!("{}\n", json!({"prompt": prompt})));
    fs::write(dir.path().join("prompts.jsonl"), rows.concat()).unwrap();
    for (name, tolerance) in [("llama_reward", 2e-5), ("bert_reward", 2e-5)] {
        let path = fixture(name).display().to_string();
        let rewards = format!(
            "model.grpo.rewards=[{{ type = 'model', path = '{path}', tokenizer = 'tokenizer.json', batch_size = 3 }}, \
             {{ type = 'program', command = ['sh', '-c', 'tee -a seen.jsonl | sed s/.*/0/'] }}]"
        );
        let sets = |ranks: usize, strategy: &str| {
            [
                "module.type=grpo".to_owned(),
                format!("model.from_pretrained={}", fixture("llama_yarn").display()),
                rewards.clone(),
                "model.grpo.samples=2".to_owned(),
                "model.grpo.max_new_tokens=5".to_owned(),
                "data={ path='prompts.jsonl', tokenizer='tokenizer.json', seq_len=16, validation_fraction=0.0 }".to_owned(),
                format!("data.batch_size={}", 4 / ranks),
                format!("trainer.devices={ranks}"),
                format!("trainer.strategy={strategy}"),
                "trainer.max_steps=1".to_owned(),
                "trainer.log_every_n_steps=1".to_owned(),
            ]
        };
        let run = |ranks: usize, strategy: &str| {
            let sets = sets(ranks, strategy);
            let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
                .args(["fit", "--output", "json"])
                .args(sets.iter().flat_map(|set| ["--set", set]))
                .current_dir(dir.path())
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let events = String::from_utf8(output.stdout).unwrap();
            let events: Vec<Value> =
                events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            metric(&events, "reward_model")[0]
        };
        let _ = fs::remove_file(dir.path().join("seen.jsonl"));
        let alone = run(1, "single_device");
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["predict", "--output-file", "scores.jsonl", "--set", "module.type=reward"])
            .args(["--set", &format!("model.from_pretrained={path}")])
            .args(["--set", "data={ path=[], predict_path='seen.jsonl', tokenizer='tokenizer.json', seq_len=16 }"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = fs::read_to_string(dir.path().join("scores.jsonl")).unwrap();
        let score =
            |line: &str| serde_json::from_str::<Value>(line).unwrap()["outputs"].as_f64().unwrap();
        let scores: Vec<f64> = lines.lines().map(score).collect();
        assert_eq!(scores.len(), 8);
        crate::models::assert_close(name, &[alone], &[mean(&scores)], tolerance);
        crate::models::assert_close(name, &[run(2, "fsdp")], &[alone], tolerance);
    }
}

#[test]
fn unusable_reward_models_are_named() {
    let dir = crate::tasks::folder();
    fs::write(
        dir.path().join("prompts.jsonl"),
        format!("{}\n", json!({"prompt": "the cat ".repeat(12)})).repeat(4),
    )
    .unwrap();
    let fixtures = crate::models::root().join("plugins/models/tests/fixtures");
    let fixture = |name: &str| fixtures.join(name).display().to_string();
    let run = |path: &str, more: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
            .args(["fit", "--set", "module.type=grpo", "--set"])
            .arg(format!("model.from_pretrained={}", fixture("llama_yarn")))
            .args(["--set", "data={ path='prompts.jsonl', tokenizer='tokenizer.json', seq_len=32, batch_size=2, validation_fraction=0.0 }"])
            .args(["--set", "trainer.max_steps=1", "--set", "model.grpo.samples=2", "--set"])
            .arg(format!("model.grpo.rewards=[{{ type='model', path='{path}', tokenizer='tokenizer.json' {more} }}]"))
            .args(["--set", "model.grpo.max_new_tokens=2"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for (path, more, text) in [
        ("none", "", "`model.grpo.rewards[0]`: none: there is no such folder"),
        (&*fixture("llama"), "", "has no head of one number"),
        // Its head has five classes.
        (&*fixture("bert_classes"), "", "has no head of one number"),
        (&*fixture("llama_reward"), ", batch_size=0", "`batch_size`: must be at least 1"),
    ] {
        let (is_right, said) = run(path, more);
        assert!(!is_right && said.contains(text), "{path}: {said}");
    }
    // Its texts have 20 tokens at most.
    let (is_right, said) = run(&fixture("bert_reward"), "");
    assert!(is_right && said.contains("it scores the first 20"), "{said}");
}

#[test]
fn wrong_rewards_end_the_run_at_its_start() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("prompts.jsonl"), 0..8, "answer");
    write(&dir.path().join("open.jsonl"), 0..8, "other");
    let error = |sets: &[&str]| fit(dir.path(), &[&GRPO[..7], sets].concat()).unwrap_err();
    for (set, text) in [
        ("model.grpo.rewards=[]", "`model.grpo.rewards`: there is none"),
        ("model.grpo.rewards=['anser']", "unknown reward `anser`; did you mean `answer`"),
        ("model.grpo.reward=1", "unknown key `model.grpo.reward`; did you mean `rewards`"),
        ("model.grpo.samples=1", "`model.grpo.samples`: must be at least 2"),
        ("model.grpo.temperature=0", "`model.grpo.temperature`: must be above 0"),
        ("model.grpo.loss=cispo", "`model.grpo.epsilon_high`: the loss \"cispo\" needs it"),
        ("model.grpo.delta=1.1", "`model.grpo.delta`: must be above 1 + epsilon_high = 1.2"),
        ("model.grpo.max_new_tokens=99", "`model.grpo.max_new_tokens`: the longest prompt has"),
        ("model.grpo.beta=0.1", "there are no weights to start from"),
        ("data.path=open.jsonl", "open.jsonl, line 1 has no `answer`"),
    ] {
        let found = error(&[set]);
        assert!(found.contains(text), "{set}: {found}");
    }
}

#[test]
fn prompts_are_inspected() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("prompts.jsonl"), 0..8, "answer");
    let sets = [&MODEL[..], &GRPO[..6], &["data.tokenizer=bytes"]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .args(["data", "inspect", "--samples", "1"])
        .args(sets.into_iter().flat_map(|set| ["--set", set]))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("4 tokens, 0 learned"), "{said}");
    assert!(said.ends_with(&format!("\n{}>\n", letters(0))), "{said}");
}

#[test]
fn plans_and_accumulated_updates_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("prompts.jsonl"), 0..8, "answer");
    let sets = [&MODEL[..], &GRPO[..6], &["data.tokenizer=bytes"]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite"))
        .arg("plan")
        .args(sets.into_iter().flat_map(|set| ["--set", set]))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("a plan does not cover `grpo`"), "{said}");
    for key in ["model.grpo.updates=2", "model.grpo.scale_rewards=batch"] {
        let accumulated = [key, "trainer.accumulate_grad_batches=2"];
        let error = fit(dir.path(), &[&GRPO[..7], &accumulated].concat()).unwrap_err();
        assert!(error.contains("accumulate_grad_batches"), "{error}");
    }
}

/// A program that fails names what it said, and every rank ends.
#[test]
fn failing_reward_programs_end_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("prompts.jsonl"), 0..8, "answer");
    let tensor = "trainer.strategy={ type = 'model_parallel', tensor_parallel_size = 2, parallelize = 'llama' }";
    let program = "model.grpo.rewards=[{ type = 'program', command = ['sh', '-c', 'echo no score >&2; exit 3'] }]";
    for mesh in [tensor, "trainer.strategy=fsdp"] {
        let sets = [program, "trainer.devices=2", "data.batch_size=2", mesh];
        let error = fit(dir.path(), &[&GRPO[..7], &sets].concat()).unwrap_err();
        let said = "failed (exit status: 3):\n  no score (in training_step of step 1)";
        assert!(error.contains(said), "{mesh}: {error}");
    }
}
