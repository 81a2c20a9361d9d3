//! The command line: sources of keys, checks and printing without a run, predictions, sweeps.

use std::fs;
use std::path::Path;

use fulgurite_test_message::assert_says;
use insta::assert_snapshot;
use rustix::process::Signal;
use serde_json::{Value, json};
use toml::Table;

use crate::program::{Job, Run, Scratch};

fn events(run: &Run, name: &str) -> Vec<Value> {
    let events = run.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    events.filter(|event| event["event"] == name).collect()
}

fn files(scratch: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn environment_between_files_and_overrides() {
    let scratch = Scratch::with_tokens();
    scratch.file("run.toml", "seed = 1\n[trainer]\nmax_steps = 1\nlog_every_n_steps = 1");
    let printed =
        |job: Job| job.args(&["--print-config"]).succeed().stdout.parse::<Table>().unwrap();
    let job = scratch
        .job(&["fit", "--config", "run.toml", "--set", "trainer.devices=3"])
        .env("FULGURITE_SEED", 2)
        .env("FULGURITE_TRAINER__MAX_STEPS", 2)
        .env("FULGURITE_TRAINER__DEVICES", 2)
        .env("FULGURITE_TRAINER__STRATEGY__TYPE", "ddp")
        .env("FULGURITE_TRAINER__STRATEGY__BUCKET_CAP_MB", 1.5)
        // Not a configuration key: some variables share the prefix.
        .env("FULGURITE_LOG", "error");
    let config = printed(job);
    let trainer = &config["trainer"];
    assert_eq!(config["seed"].as_integer(), Some(2));
    assert_eq!(trainer["max_steps"].as_integer(), Some(2));
    assert_eq!(trainer["devices"].as_integer(), Some(3));
    assert_eq!(trainer["log_every_n_steps"].as_integer(), Some(1));
    assert_eq!(trainer["strategy"]["bucket_cap_mb"].as_float(), Some(1.5));
    // The variables reach the ranks.
    let run = scratch.small().on("ddp", 2, 1).env("FULGURITE_MODEL__DROPOUT", "0.1").succeed();
    let plain = scratch.small().on("ddp", 2, 1).succeed();
    assert_ne!(events(&run, "step").last(), events(&plain, "step").last());
}

#[test]
fn variables_with_mistakes_are_named() {
    let scratch = Scratch::with_tokens();
    let error = |name: &str, value: &str| {
        let message = scratch.small().env(name, value).fail();
        message.split(" (the keys of").next().unwrap().to_owned()
    };
    assert_says!(
        error("FULGURITE_TRAINER__MAX_STEP", "5"),
        "error: FULGURITE_TRAINER__MAX_STEP: unknown key … `max_steps`?"
    );
    assert_says!(
        error("FULGURITE_TRAINR__MAX_STEPS", "5"),
        "error: FULGURITE_TRAINR__MAX_STEPS: unknown key `trainr` … `trainer`? …"
    );
    assert_says!(
        error("FULGURITE_TRAINER__ACCUMULATE_GRAD_BATCHES", "many"),
        r#"error: FULGURITE_TRAINER__ACCUMULATE_GRAD_BATCHES … an integer … string "many""#
    );
    assert_says!(
        error("FULGURITE_TRAINER__LOGGERS", "[csv]"),
        "error: FULGURITE_TRAINER__LOGGERS: … lists … need quotes"
    );
    assert_says!(
        error("FULGURITE_TRAINER_MAX_STEPS", "5"),
        "error: the variable FULGURITE_TRAINER_MAX_STEPS … mean FULGURITE_TRAINER__MAX_STEPS? …"
    );
    assert_says!(
        error("FULGURITE_DATA_SEQ_LEN", "5"),
        "error: the variable FULGURITE_DATA_SEQ_LEN … mean FULGURITE_DATA__SEQ_LEN? …"
    );
    // The variable may belong to another program: one process of the job warns.
    let run = scratch.small().on("ddp", 2, 1).env("FULGURITE_HOME_PAGE", "x").succeed();
    let warned = run.stderr.lines().filter(|line| line.contains("FULGURITE_HOME_PAGE"));
    assert_eq!(warned.count(), 1, "{}", run.stderr);
    assert_says!(error("FULGURITE_TRAINER__", "5"), "error: FULGURITE_TRAINER__: … key is empty …");
}

#[test]
fn configuration_is_checked_without_a_run() {
    let scratch = Scratch::with_tokens();
    let check = |more: &[&str]| {
        let mut job = scratch.small().on("ddp", 2, 1).set(more);
        job.replace("fit", "config");
        let mut args = job.arguments().to_vec();
        args.insert(1, "check".to_owned());
        scratch.job(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    assert_eq!(check(&[]).succeed().stdout, "the configuration can be run, on 2 ranks\n");
    assert_says!(
        check(&["model.num_key_value_heads=3"]).fail(),
        "error: `model.num_key_value_heads`: must divide num_attention_heads = 2, found 3"
    );
    assert_says!(
        check(&["trainer.strategy=single_device"]).fail(),
        "error: device mesh … `single_device` … world size is 2 … `trainer.devices = 1` …"
    );
    assert_says!(
        check(&["trainer.process_group={ type = 'shm', chunk_bytes = 1 }"]).fail(),
        "error: trainer.process_group.chunk_bytes is 1 … between 4096 … 1073741824 …"
    );
    assert_says!(check(&["optimizer.eps=3.5e38"]).fail(), "error: optimizer.eps … f32, got 3.5e38");
    // Settings that only training needs do not matter to an evaluation.
    check(&["optimizer.eps=3.5e38"]).args(&["--purpose", "evaluate"]).succeed();
    assert_eq!(files(&scratch), ["tokens.u16"]);
}

#[test]
fn config_is_printed_with_documentation() {
    let scratch = Scratch::with_tokens();
    let job = scratch.small().set(&["trainer.strategy={ type = 'fsdp', prefetch = 2 }"]);
    let plain = job.clone().args(&["--print-config"]).succeed().stdout;
    let commented = job.args(&["--print-config=comments"]).succeed().stdout;
    assert_eq!(commented.parse::<Table>().unwrap(), plain.parse::<Table>().unwrap());
    let (_, optimizer) = commented.split_once("[optimizer]\n").unwrap();
    assert_snapshot!(optimizer.lines().take(8).collect::<Vec<_>>().join("\n"), @r#"
    type = "adamw"
    # The learning rate, before the schedule.
    lr = 0.003
    # The decay rates of the two moments, each in `[0, 1)`.
    betas = [0.9, 0.95]
    # Values shrink by this times the learning rate in each step.
    weight_decay = 0.1
    # FQN patterns of parameters that are not decayed: `["*norm*", "bias"]`.
    "#);
    let (_, model) = commented.split_once("[model]\n").unwrap();
    assert_snapshot!(model.lines().take(4).collect::<Vec<_>>().join("\n"), @r#"
      # The kind of model, as `model_type` in `config.json`: `"llama"`, `"qwen3"`, `"bert"`, …; by
      # default (`"auto"`) that of `from_pretrained`.
      type = "llama"
      # Number of tokens; by default that of the tokenizer, rounded up to a multiple of 8.
    "#);
    let twice = scratch.job(&["fit", "--print-config=yaml"]).run();
    assert_eq!(twice.code(), Some(2));
    assert!(twice.stderr.contains("[possible values: plain, comments]"), "{}", twice.stderr);
}

/// The schema of a key at a path of properties.
fn at<'a>(schema: &'a Value, path: &[&str]) -> &'a Value {
    path.iter().fold(schema, |schema, key| &schema["properties"][*key])
}

#[test]
fn schema_has_every_key_and_plugin() {
    let scratch = Scratch::with_tokens();
    let schema = scratch.job(&["config", "schema"]).succeed().stdout;
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let config =
        scratch.small().args(&["--print-config"]).succeed().stdout.parse::<Table>().unwrap();
    for (table, keys) in config.iter().filter_map(|(name, value)| Some((name, value.as_table()?))) {
        // Optimizer and scheduler are plugins.
        for key in keys.keys().filter(|_| at(&schema, &[table]).get("properties").is_some()) {
            assert!(at(&schema, &[table, key]).is_object(), "{table}.{key}");
        }
    }
    // A key has the types of its values, and its documentation.
    let kinds = |path: &[&str]| -> Vec<Value> {
        let key = at(&schema, path);
        let alone = vec![key.clone()];
        let choices = key["anyOf"].as_array().unwrap_or(&alone);
        assert!(choices.iter().all(|one| one["description"].is_string()), "{path:?}");
        choices.iter().map(|one| one.get("type").unwrap_or(&one["const"]).clone()).collect()
    };
    assert_eq!(kinds(&["trainer", "devices"]), ["integer", "auto"]);
    assert_eq!(at(&schema, &["trainer", "devices"])["default"], 1);
    assert_eq!(kinds(&["model", "head_dim"]), ["integer"]);
    assert_eq!(at(&schema, &["model", "head_dim"])["minimum"], 0);
    assert_eq!(kinds(&["data", "path"]), ["string", "array"]);
    for table in ["model", "data", "trainer", "checkpoint"] {
        assert_eq!(at(&schema, &[table])["additionalProperties"], false, "{table}");
    }
    let choices = at(&schema, &["optimizer"])["anyOf"].as_array().unwrap();
    assert_snapshot!(choices[0]["enum"], @r#"["adafactor","adagrad","adam","adamw","lion","muon","rmsprop","schedule_free_adamw","sgd"]"#);
    // A table without `type` has the default's options.
    let titled = |title| choices.iter().find(|choice| choice["title"] == title).unwrap();
    let (adamw, sgd) = (titled("adamw"), titled("sgd"));
    assert_eq!((&adamw["required"], &sgd["required"]), (&json!([]), &json!(["type"])));
    assert_snapshot!(sgd["properties"]["momentum"], @r#"{"default":0.0,"description":"The factor of the previous update in the momentum; 0 for no momentum.","type":"number"}"#);
    assert_eq!(sgd["additionalProperties"], false);
    let strategies = at(&schema, &["trainer", "strategy"])["anyOf"].as_array().unwrap();
    let model_parallel =
        strategies.iter().find(|choice| choice["title"] == "model_parallel").unwrap();
    let parallelize = &at(model_parallel, &["parallelize"])["anyOf"][0];
    assert_snapshot!(parallelize["enum"], @r#"["hf","llama","none","plan"]"#);
    // Options carry their documentation.
    let callbacks = &at(&schema, &["trainer", "callbacks"])["items"]["anyOf"];
    let callbacks = callbacks.as_array().unwrap();
    let stopping = callbacks.iter().find(|choice| choice["title"] == "early_stopping").unwrap();
    assert_snapshot!(at(stopping, &["patience"]), @r#"{"description":"How many validations without an improvement are waited for.","minimum":0,"type":"integer"}"#);
    assert_eq!(at(&schema, &["trainer", "loggers"])["type"], "array");
}

#[test]
fn every_plugin_example_runs() {
    let scratch = Scratch::with_tokens();
    scratch.file(
        "base.toml",
        "[model]\nvocab_size = 53\nhidden_size = 20\nintermediate_size = 37\nnum_hidden_layers = 2\n\
         num_attention_heads = 2\nnum_key_value_heads = 1\n[trainer]\nmax_steps = 8\n\
         [data]\ntype = \"tokens\"\npath = \"tokens.u16\"\nseq_len = 7\nbatch_size = 2\nvalidation_fraction = 0.2\n",
    );
    // The examples of callbacks name them.
    scratch.file("questions.jsonl", r#"{"context": "1+1=", "choices": ["2", "3"], "answer": 0}"#);
    scratch.file("sums.jsonl", r#"{"prompt": "1+1=", "answer": 2}"#);
    scratch.file("texts.jsonl", r#"{"text": "1+1=2"}"#);
    let list = scratch.job(&["plugins", "list", "--json"]).succeed().stdout;
    let plugins: Vec<Value> = serde_json::from_str(&list).unwrap();
    assert!(plugins.len() > 50, "{}", plugins.len());
    for plugin in &plugins {
        let (kind, name) = (plugin["kind"].as_str().unwrap(), plugin["name"].as_str().unwrap());
        // This program's module learns from no rewards; their crate builds their examples.
        if kind == "reward" {
            continue;
        }
        let shown = scratch.job(&["plugins", "show", name]).succeed().stdout;
        let of_kind = shown.split("\n\n").find(|text| text.starts_with(kind)).unwrap();
        let example = of_kind.lines().find_map(|line| line.strip_prefix("  example: ")).unwrap();
        scratch.file("example.toml", example);
        // The program trains on two ranks by default.
        let devices = if name == "single_device" { "1" } else { "2" };
        let run = scratch
            .job(&["config", "check", "--config", "base.toml", "--config", "example.toml"])
            .set(&[&format!("trainer.devices={devices}")])
            .run();
        // The `cuda` plugin needs another build of the program, and says so.
        let needs_cuda = name == "cuda" && run.stderr.contains("built without CUDA");
        assert!(run.code() == Some(0) || needs_cuda, "{kind} {name}: {example}: {}", run.stderr);
    }
}

#[test]
fn shells_complete_arguments() {
    let scratch = Scratch::with_tokens();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = scratch.job(&["completion", shell]).succeed().stdout;
        assert!(script.contains("predict") && script.contains("output-file"), "{shell}: {script}");
    }
    let wrong = scratch.job(&["completion", "csh"]).run();
    assert_eq!(wrong.code(), Some(2));
}

#[test]
fn predictions_of_all_ranks_in_order() {
    let scratch = Scratch::with_tokens();
    let keep = ["checkpoint.dir=kept", "checkpoint.save_last=true", "data.validation_fraction=0.4"];
    scratch.small().set(&keep).succeed();
    let predict = |ranks: usize, file: &str| {
        let mut job = scratch.small().set(&keep).on("ddp", ranks, 2);
        job.replace("fit", "predict");
        job.set(&["trainer.ckpt_path=last"]).args(&["--output-file", file])
    };
    let run = predict(1, "one.safetensors").succeed();
    let [event] = &events(&run, "predictions")[..] else { panic!("{}", run.stdout) };
    assert_snapshot!(event, @r#"{"event":"predictions","path":"one.safetensors","samples":22}"#);
    predict(3, "out/three.safetensors").succeed();
    let read = |name: &str| fs::read(scratch.path().join(name)).unwrap();
    let one = read("one.safetensors");
    assert!(one == read("out/three.safetensors"), "three ranks predict something else");
    let tensors = safetensors::SafeTensors::deserialize(&one).unwrap();
    let samples = tensors.tensor("samples").unwrap();
    let samples: Vec<i64> = samples
        .data()
        .chunks(8)
        .map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert!(samples.is_sorted_by(|a, b| a < b) && samples.len() == event["samples"], "{samples:?}");
    assert_eq!(tensors.tensor("outputs").unwrap().shape(), [samples.len(), 7]);
    // An unwritable file leaves nothing behind and blocks no rank.
    let error = predict(2, "tokens.u16/out.safetensors").fail();
    assert!(error.contains("creating tokens.u16"), "{error}");
}

#[test]
fn sweep_runs_and_compares_combinations() {
    let scratch = Scratch::with_tokens();
    let sweep =
        ["--sweep", "optimizer.lr=1e-3,1e-2", "--sweep", "trainer.accumulate_grad_batches=1,2"];
    let keys = ["trainer.max_steps=3", "checkpoint.dir=kept", "checkpoint.save_last=true"];
    let job = scratch.small().set(&keys).args(&sweep);
    let run = job.succeed();
    let [event] = &events(&run, "sweep")[..] else { panic!("{}", run.stdout) };
    let runs = event["runs"].as_array().unwrap();
    let of = |run: &Value| (run["set"].to_string(), run["status"].clone(), run["steps"].clone());
    assert_eq!(runs.len(), 4);
    assert_eq!(
        of(&runs[2]),
        (
            r#"["optimizer.lr=1e-2","trainer.accumulate_grad_batches=1"]"#.into(),
            "success".into(),
            3.into()
        )
    );
    let alone = scratch.small().set(&["trainer.max_steps=3", "optimizer.lr=1e-2"]).succeed();
    assert_eq!(runs[2]["metrics"]["train_loss"], events(&alone, "summary")[0]["last_loss"]);
    let kept = scratch.path().join("kept/optimizer.lr=1e-2,trainer.accumulate_grad_batches=1");
    assert!(Path::new(&kept).join("last").exists());
    // Human output has a table; the output of each run goes to stderr.
    let mut human = scratch.small().set(&["trainer.max_steps=1"]).args(&sweep[..2]);
    human.replace("json", "human");
    let run = human.succeed();
    let lines: Vec<_> = run.stdout.lines().map(|line| line.split_whitespace().take(3)).collect();
    let lines: Vec<_> =
        lines.into_iter().map(|words| words.collect::<Vec<_>>().join(" ")).collect();
    assert_snapshot!(lines.join("\n"), @r#"
    optimizer.lr status steps
    1e-3 success 1
    1e-2 success 1
    "#);
}

#[test]
fn stopped_sweep_ends_its_run_cleanly() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let scratch = Scratch::with_tokens();
        let keys =
            ["trainer.max_steps=1000000", "checkpoint.dir=kept", "checkpoint.save_last=true"];
        let job = scratch.small().set(&keys).args(&["--sweep", "optimizer.lr=1e-3,1e-2"]);
        let running = job.start();
        running.reach(2);
        running.signal(signal);
        let run = running.wait();
        assert_eq!(run.code(), Some(code), "{}", run.stderr);
        let [event] = &events(&run, "sweep")[..] else { panic!("{}", run.stdout) };
        let [row] = &event["runs"].as_array().unwrap()[..] else { panic!("{event}") };
        assert_eq!(row["status"], "interrupted");
        // The run has saved, as a single run does.
        assert!(row["steps"].as_u64().unwrap() >= 2, "{row}");
        assert!(scratch.path().join("kept/optimizer.lr=1e-3/last").exists());
        assert!(!scratch.path().join("kept/optimizer.lr=1e-2").exists(), "no further one");
    }
}

// checklist: composer: automatic micro-batches
#[test]
fn batch_size_search_leaves_nothing() {
    let scratch = Scratch::with_tokens();
    let keys = [
        "trainer.devices=2",
        "trainer.strategy=fsdp",
        "checkpoint.dir=kept",
        "checkpoint.save_last=true",
    ];
    let run = scratch.small().set(&keys).args(&["--find-batch-size"]).succeed();
    let [event] = &events(&run, "batch_size")[..] else { panic!("{}", run.stdout) };
    // 57 samples: with the last size, a step of two ranks takes 32 of them.
    let sizes: Vec<_> =
        event["runs"].as_array().unwrap().iter().map(|run| &run["batch_size"]).collect();
    assert_snapshot!(json!(sizes), @"[1,2,4,8,16]");
    assert_eq!(
        (&event["largest"], &event["key"]),
        (sizes[sizes.len() - 1], &json!("data.batch_size"))
    );
    for run in event["runs"].as_array().unwrap() {
        let number = |key: &str| run[key].as_f64().unwrap();
        assert!(number("peak_rss_mib") > 2.0 && number("items_per_s") > 0.0, "{event}");
    }
    assert_eq!(files(&scratch), ["tokens.u16"]);
    // The search does not resume from a checkpoint either.
    let saving = ["checkpoint.dir=kept", "checkpoint.save_last=true", "trainer.ckpt_path=last"];
    scratch.small().set(&saving).succeed();
    let resuming = |path: &str| {
        let path = format!("trainer.ckpt_path={path}");
        scratch.small().set(&saving).set(&[&path]).args(&["--find-batch-size"]).succeed()
    };
    for path in ["last", "kept/step-00000008"] {
        let events = events(&resuming(path), "batch_size");
        assert_eq!(events[0]["largest"], 32, "{path}");
    }
    // A step of several micro-batches takes several times the samples.
    for keys in ["trainer.accumulate_grad_batches=4", "trainer.global_batch_size=8"] {
        let run = scratch.small().set(&[keys]).args(&["--find-batch-size"]).succeed();
        assert_eq!(events(&run, "batch_size")[0]["largest"], 8, "{keys}: {}", run.stderr);
    }
    assert_eq!(files(&scratch), ["fulgurite_logs", "kept", "tokens.u16"]);
    let mut human = scratch.small().args(&["--find-batch-size=data.batch_size"]);
    human.replace("json", "human");
    let said = human.succeed().stdout;
    assert!(said.contains("(twice as many are more than the training data)"), "{said}");

    let error = |args: &[&str]| scratch.small().args(args).fail();
    assert_says!(error(&["--find-batch-size=data.samples"]), "error: … unknown … `data.samples` …");
    assert_says!(
        error(&["--find-batch-size", "--set", "model.hidden_size=0"]),
        "error: --find-batch-size: --set model.hidden_size=0 … from 1 to 1048576, found 0"
    );
}

#[test]
fn invalid_sweep_starts_no_run() {
    let scratch = Scratch::with_tokens();
    let error = |sweep: &str| scratch.small().args(&["--sweep", sweep]).fail();
    assert_says!(error("optimizer.eps=1e-8,3.5e38"), "error: --sweep … optimizer.eps … got 3.5e38");
    assert_says!(error("optimizer.lr"), "error: --sweep optimizer.lr … no `=` … KEY=VALUE,VALUE …");
    assert_says!(error("optimizer.lr=1e-3,"), "error: --sweep optimizer.lr=1e-3, … is missing …");
    assert_says!(error("optimizer.rate=1e-3"), "error: --sweep … unknown key `optimizer.rate` …");
    assert_eq!(files(&scratch), ["tokens.u16"]);
    // A failing run does not stop the other runs.
    let diverging = scratch.small().args(&["--sweep", "optimizer.lr=1e30,1e-3"]).run();
    assert_eq!(diverging.code(), Some(1));
    let event = &events(&diverging, "sweep")[0];
    let statuses: Vec<_> =
        event["runs"].as_array().unwrap().iter().map(|run| &run["status"]).collect();
    assert_eq!(statuses, ["failed (1)", "success"]);
    assert!(diverging.stderr.contains("1 of 2 runs of the sweep failed"), "{}", diverging.stderr);
}

#[test]
fn doctor_predicts_the_findings_of_a_run() {
    let scratch = Scratch::with_tokens();
    let mut job = scratch.small();
    job.replace("fit", "doctor");
    let report = job.clone().env("FULGURITE_SEED__", "").run();
    assert_eq!(report.code(), Some(1), "{}", report.stdout);
    let whats = |run: &Run| -> String {
        let lines =
            run.stdout.lines().filter(|line| line.starts_with("ok") || line.starts_with("error"));
        let words = lines.map(|line| line.split("  ").filter(|part| !part.is_empty()));
        words.map(|mut parts| parts.nth(1).unwrap().trim().to_owned() + "\n").collect()
    };
    let good = job.clone().succeed();
    for what in [
        "host",
        "cores",
        "vector instructions",
        "shared memory",
        "launcher",
        "plugins",
        "configuration",
        "runs",
    ] {
        assert!(whats(&good).lines().any(|line| line == what), "{what} is not in {}", good.stdout);
    }
    let few = job.clone().limited("-n 64").succeed();
    assert!(few.stdout.contains("at most 64 (ulimit -n)"), "{}", few.stdout);
    let wrong = job.set(&["trainer.default_root_dir=/proc/runs", "model.hidden_size=21"]).run();
    assert_eq!(wrong.code(), Some(1));
    let errors: Vec<_> = wrong.stdout.lines().filter(|line| line.starts_with("error")).collect();
    assert!(errors.len() == 2 && errors[0].contains("`model.hidden_size`"), "{errors:#?}");
}

/// The program's log follows the filters of `env_logger` and `tracing`.
// checklist: torchtune: loggers
#[test]
fn log_filter_from_environment() {
    let scratch = Scratch::with_tokens();
    let first =
        ["--set", "checkpoint.dir=out", "--set", "checkpoint.every_n_steps=4", "--set", "seed=1"];
    scratch.small().args(&first).succeed();
    let resumed = |level: Option<&str>| {
        let other =
            ["--set", "checkpoint.dir=out", "--set", "seed=2", "--set", "trainer.ckpt_path=last"];
        let job = scratch.small().args(&other);
        let job = match level {
            Some(level) => job.env("FULGURITE_LOG", level),
            None => job,
        };
        job.succeed().stderr
    };
    let [usual, quiet, talking] = [None, Some("error"), Some("info")].map(resumed);
    let warning = " the checkpoint was written with seed 1";
    assert!(usual.contains(warning) && !usual.contains("INFO"), "{usual}");
    assert!(!quiet.contains("seed"), "{quiet}");
    assert!(talking.contains(warning) && talking.contains("INFO"), "{talking}");
}

// checklist: composer: log_execution_time
#[test]
fn durations_are_logged() {
    let scratch = Scratch::with_tokens();
    let run = |more: &[&str]| {
        let job = scratch
            .small()
            .args(&["--set", "checkpoint.dir=out", "--set", "checkpoint.every_n_steps=4"])
            .args(more);
        job.env("FULGURITE_LOG", "fulgurite::time=debug").succeed().stderr
    };
    let of_ranks = |log: &str, what: &str| {
        log.lines().filter(|line| line.contains(&format!("DEBUG {what} took "))).count()
    };
    let first = run(&[]);
    let ranks = of_ranks(&first, "describing the model");
    assert!(ranks > 0, "{first}");
    assert_eq!(of_ranks(&first, "distributing and initialising the model"), ranks, "{first}");
    assert_eq!(of_ranks(&first, "loading the checkpoint"), 0, "{first}");
    let resumed = run(&["--set", "trainer.ckpt_path=last", "--set", "trainer.max_steps=9"]);
    assert_eq!(of_ranks(&resumed, "loading the checkpoint"), ranks, "{resumed}");
}
