//! Suggestions in messages: names of other libraries, keys of other tables, Python and YAML values.

use fulgurite_core::Result;
use fulgurite_core::config::{ConfigLayers, Documented};
use fulgurite_core::registry::kind;
use fulgurite_core::run::{RunConfig, TrainerConfig};
use serde::{Deserialize, Serialize};
use toml::Table;

#[derive(Debug, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
struct Data {
    /// Samples in a batch.
    #[default(1)]
    batch_size: usize,
    /// Tokens in a sample.
    #[default(8)]
    seq_len: usize,
}

type Run = RunConfig<Table, Data>;

fn run(text: &str) -> Result<Run> {
    Run::from_layers(ConfigLayers::new().text("run.toml", text)?)
}

fn error(text: &str) -> String {
    let error = run(text).err().unwrap_or_else(|| panic!("{text} is accepted")).to_string();
    error.strip_prefix("run.toml: ").unwrap_or(&error).to_owned()
}

/// The error without the trailing list of keys.
fn start(text: &str) -> String {
    error(text).split(" (the keys").next().unwrap_or_default().to_owned()
}

#[test]
fn names_of_other_libraries_are_translated() {
    insta::assert_snapshot!(error("trainer.gpus = 2"), @"unknown key `trainer.gpus`; did you mean `trainer.devices`?");
    insta::assert_snapshot!(error("trainer.gradient_accumulation_steps = 2"), @"unknown key `trainer.gradient_accumulation_steps`; did you mean `trainer.accumulate_grad_batches`?");
    insta::assert_snapshot!(error("trainer.accumulate_grad_batch = 2"), @"unknown key `trainer.accumulate_grad_batch`; did you mean `accumulate_grad_batches`?");
    insta::assert_snapshot!(error("trainer.num_train_epochs = 2"), @"unknown key `trainer.num_train_epochs`; did you mean `trainer.max_epochs`?");
    insta::assert_snapshot!(error("trainer.fp16 = true"), @"unknown key `trainer.fp16`; did you mean `trainer.precision`?");
    insta::assert_snapshot!(error("trainer.per_device_train_batch_size = 2"), @"unknown key `trainer.per_device_train_batch_size`; did you mean `data.batch_size`?");
    insta::assert_snapshot!(error("trainer.deterministic = true"), @"unknown key `trainer.deterministic`; runs are deterministic without a key");
    insta::assert_snapshot!(start("epochs = 3"), @"unknown key `epochs`; did you mean `trainer.max_epochs`?");
    insta::assert_snapshot!(error("trainer.maxEpochs = 3"), @"unknown key `trainer.maxEpochs`; did you mean `max_epochs`?");
    // This program does not have a key for a tokenizer.
    insta::assert_snapshot!(start("tokenizer_name = 'x'"), @"unknown key `tokenizer_name`");
}

#[test]
fn keys_of_other_tables_are_suggested() {
    insta::assert_snapshot!(start("batch_size = 4"), @"unknown key `batch_size`; did you mean `data.batch_size`?");
    insta::assert_snapshot!(error("trainer.batch_size = 4"), @"unknown key `trainer.batch_size`; did you mean `data.batch_size`?");
    insta::assert_snapshot!(error("trainer.every_n_steps = 4"), @"unknown key `trainer.every_n_steps`; did you mean `checkpoint.every_n_steps`?");
    insta::assert_snapshot!(error("trainer.seed = 4"), @"unknown key `trainer.seed`; did you mean `seed`?");
    insta::assert_snapshot!(start("data.num_workers = 4"), @"unknown key `data.num_workers`; did you mean `trainer.num_workers`?");
    let run = run("optimizer = { type = 'sgd', betas = [0.9, 0.9] }").unwrap();
    insta::assert_snapshot!(run.optimizer.check(kind::OPTIMIZER, "optimizer").unwrap_err(), @"unknown key `optimizer.betas`; it is an option of the optimizer `adam`, the optimizer `adamw`, the optimizer `lion` or the optimizer `schedule_free_adamw` (the keys of `optimizer` are lr, momentum, dampening, nesterov, weight_decay, no_decay, groups, state_dtype)");
    insta::assert_snapshot!(error("trainer.strict = true"), @"unknown key `trainer.strict`; did you mean `checkpoint.load.strict`?");
}

#[test]
fn a_long_table_lists_similar_keys_alone() {
    insta::assert_snapshot!(error("trainer.clip_gradient = 1"), @"unknown key `trainer.clip_gradient` (similar keys of `trainer`: gradient_clip_val, gradient_clip_algorithm)");
    let keys = TrainerConfig::keys().len();
    let none = format!("unknown key `trainer.zzz` (`--help` lists the {keys} keys of `trainer`)");
    assert_eq!(error("trainer.zzz = 1"), none);
}

#[test]
fn python_and_yaml_values_get_suggestions() {
    insta::assert_snapshot!(error("trainer.max_steps = '100'"), @r#"`trainer.max_steps`: expected an integer, at least 0, found the string "100"; write 100"#);
    insta::assert_snapshot!(error("trainer.max_steps = 1e3"), @"`trainer.max_steps`: expected an integer, at least 0, found `1000.0`; write 1000");
    insta::assert_snapshot!(error("trainer.max_steps = '1,000'"), @r#"`trainer.max_steps`: expected an integer, at least 0, found the string "1,000"; write 1000"#);
    insta::assert_snapshot!(error("trainer.max_steps = -1"), @"`trainer.max_steps`: expected an integer, at least 0, found `-1`; for no limit leave the key out");
    insta::assert_snapshot!(error("trainer.limit_val_batches = '20%'"), @r#"`trainer.limit_val_batches`: expected a count (an integer, at least 0) or a fraction (a float from 0.0 to 1.0), found the string "20%"; write 0.2"#);
    insta::assert_snapshot!(error("trainer.default_root_dir = '~bob/runs'"), @"`~bob/runs`: `~bob` is not known; write the whole path");
    insta::assert_snapshot!(error("trainer.gradient_clip_val = '.5'"), @r#"`trainer.gradient_clip_val`: expected a number, found the string ".5"; write 0.5"#);
    insta::assert_snapshot!(error("trainer.ema_decay = '1e-4'"), @r#"`trainer.ema_decay`: expected a number, found the string "1e-4"; write 0.0001"#);
    insta::assert_snapshot!(error("trainer.detect_anomaly = 'True'"), @r#"`trainer.detect_anomaly`: expected true or false, found the string "True"; write true"#);
    insta::assert_snapshot!(error("trainer.detect_anomaly = 0"), @"`trainer.detect_anomaly`: expected true or false, found `0`; write false");
    insta::assert_snapshot!(error("trainer.max_steps = 'None'"), @r#"`trainer.max_steps`: expected an integer, at least 0, found the string "None"; for no value leave the key out, or take it away with `--set KEY=null`"#);
    insta::assert_snapshot!(error("trainer.num_nodes = 'null'"), @r#"`trainer.num_nodes`: expected an integer, at least 0, found the string "null"; leave the key out for its default, or take it away with `--set KEY=null`"#);
    insta::assert_snapshot!(error("trainer.freeze = 'head, body'"), @r#"`trainer.freeze`: expected a list, found the string "head, body"; write ["head", "body"]"#);
    insta::assert_snapshot!(error("trainer.freeze = '(a, 2)'"), @r#"`trainer.freeze`: expected a list, found the string "(a, 2)"; write ["a", 2]"#);
    insta::assert_snapshot!(error("trainer.devices = -1"), @r#"`trainer.devices`: expected a number of ranks, at least 1, or "auto", found `-1`; did you mean "auto"?"#);
    insta::assert_snapshot!(error("trainer.devices = '0,1'"), @r#"`trainer.devices`: expected a number of ranks, at least 1, or "auto", found the string "0,1"; it is a number of devices, not a list of them: for a choice set CUDA_VISIBLE_DEVICES"#);
    insta::assert_snapshot!(error("trainer.devices = '2'"), @r#"`trainer.devices`: expected a number of ranks, at least 1, or "auto", found the string "2"; write 2"#);
    insta::assert_snapshot!(error("trainer.precision = 'fp16'"), @r#"`trainer.precision`: expected "32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true" or "64-true", found the string "fp16"; did you mean "16-mixed"?"#);
    let set = |set: &str| ConfigLayers::new().set(set).err().unwrap().to_string();
    insta::assert_snapshot!(set("checkpoint.dir=None"), @r#"--set checkpoint.dir=None: write `null` for no value, or "None" in quotes for a text"#);
    insta::assert_snapshot!(set("trainer.callbacks+=['x']"), @"--set trainer.callbacks+=['x']: nothing can be appended to a list; write the whole list; expected key=value, such as trainer.max_steps=100");
}

fn with_null(assignments: &[&str]) -> Table {
    let base = "seed = 3\n[trainer]\nmax_steps = 5\nstrategy = { type = 'fsdp', prefetch = 2 }";
    let layers = ConfigLayers::new().text("base.toml", base).unwrap();
    assignments.iter().try_fold(layers, |layers, a| layers.set(a)).unwrap().resolve()
}

#[test]
fn null_takes_a_value_away() {
    let trainer = |assignments: &[&str]| with_null(assignments)["trainer"].to_string();
    insta::assert_snapshot!(trainer(&["trainer.max_steps=null"]), @r#"{ strategy = { prefetch = 2, type = "fsdp" } }"#);
    insta::assert_snapshot!(trainer(&["trainer.max_steps=null", "trainer.max_steps=7", "trainer.strategy=null"]), @"{ max_steps = 7 }");
    insta::assert_snapshot!(trainer(&["trainer.max_steps=7", "trainer.max_steps=null", "trainer.strategy.prefetch=null"]), @r#"{ strategy = { type = "fsdp" } }"#);
    // A missing key, and a quoted text.
    insta::assert_snapshot!(trainer(&["trainer.ckpt_path=null", "trainer.max_steps='null'"]), @r#"{ max_steps = "null", strategy = { prefetch = 2, type = "fsdp" } }"#);
    let layers = ConfigLayers::new().text("base.toml", "trainer.max_steps = 5").unwrap();
    let run = Run::from_layers(layers.set("trainer.max_steps=null").unwrap()).unwrap();
    assert_eq!(run.trainer.max_steps, None);
}

#[test]
fn a_path_in_the_home_directory_is_expanded() {
    let home = std::env::var("HOME").unwrap();
    let dir = |run: Run| run.checkpoint.dir.unwrap();
    let wanted = std::path::Path::new(&home).join("runs/a");
    assert_eq!(dir(run("checkpoint.dir = '~/runs/a'").unwrap()), wanted);
    let layers = ConfigLayers::new().set("checkpoint.dir=~/runs/a").unwrap();
    assert_eq!(dir(Run::from_layers(layers).unwrap()), wanted);
    // Expanded only at the start of a path.
    assert_eq!(dir(run("checkpoint.dir = 'a~/b'").unwrap()), std::path::Path::new("a~/b"));
}

#[test]
fn text_files_of_other_systems_are_read() {
    let read = |text: &str| run(text).unwrap().trainer.max_steps;
    assert_eq!(read("\u{feff}[trainer]\nmax_steps = 3\n"), Some(3));
    assert_eq!(read("[trainer]\r\nmax_steps = 3\r\n"), Some(3));
}

#[test]
fn other_formats_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = ConfigLayers::new().file(&path).unwrap_err().to_string();
        error.replace(&dir.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!(file("run.yaml", b"# nothing\n"), @"DIR/run.yaml: YAML by its name; a configuration is TOML: `[trainer]` and below it `max_steps = 100`");
    insta::assert_snapshot!(file("run.JSON", b"{}"), @"DIR/run.JSON: JSON by its name; a configuration is TOML: `[trainer]` and below it `max_steps = 100`");
    let json = file("run.conf", b"{ \"seed\": 3 }");
    assert!(json.ends_with("\nThis looks like JSON; a configuration is TOML."), "{json}");
    let hint = |text: &str| {
        let error = file("run.conf", text.as_bytes());
        error.lines().last().unwrap().to_owned()
    };
    insta::assert_snapshot!(hint("[trainer]\nmax_steps = null # none\n"), @"TOML has no null: leave the key out for no value.");
    insta::assert_snapshot!(hint("[trainer]\nenable_progress_bar = True\n"), @"TOML writes `true` and `false`.");
    insta::assert_snapshot!(hint("trainer:\n  max_steps: 3\n"), @"This looks like YAML; a configuration is TOML: `[trainer]` and below it `max_steps = 100`.");
    insta::assert_snapshot!(file("run.toml", b"\xff\xfes\0e\0e\0d\0"), @"reading the configuration file DIR/run.toml: it is not UTF-8 text");
    insta::assert_snapshot!(file("twice.toml", b"[trainer]\nmax_steps = 1\nmax_steps = 2\n"), @r"
        DIR/twice.toml: TOML parse error at line 3, column 1
          |
        3 | max_steps = 2
          | ^^^^^^^^^
        duplicate key
        ");
}

#[test]
fn names_of_plugins_get_a_suggestion() {
    // This program links no strategy; the optimizers are the engine's.
    let name = |text: &str| {
        let run = run(text).unwrap();
        let optimizer = run.optimizer.check(kind::OPTIMIZER, "optimizer");
        let checked = optimizer.and_then(|()| run.scheduler.check(kind::SCHEDULER, "scheduler"));
        let error = checked.unwrap_err().to_string();
        error.split(" If a plugin crate").next().unwrap().to_owned()
    };
    insta::assert_snapshot!(name("optimizer = 'AdamW'"), @"unknown optimizer `AdamW`; did you mean `adamw`? Available: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd.");
    insta::assert_snapshot!(name("optimizer = 'adamv'"), @"unknown optimizer `adamv`; did you mean `adamw`? Available: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd.");
    insta::assert_snapshot!(name("optimizer = 'mouon'"), @"unknown optimizer `mouon`; did you mean `muon`? Available: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd.");
    let start = |text: &str| name(text).split(" Available").next().unwrap().to_owned();
    insta::assert_snapshot!(start("scheduler = 'cosine_with_warmup'"), @"unknown scheduler `cosine_with_warmup`; did you mean `cosine`?");
    insta::assert_snapshot!(start("scheduler = 'StepLR'"), @"unknown scheduler `StepLR`; did you mean `step`?");
    insta::assert_snapshot!(start("scheduler = 'ReduceLROnPlateau'"), @"unknown scheduler `ReduceLROnPlateau`; the callback `reduce_lr_on_plateau` does it (`trainer.callbacks`).");
    insta::assert_snapshot!(name("optimizer = 'shampoo'"), @"unknown optimizer `shampoo`; available: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, schedule_free_adamw, sgd.");
}

fn variable(name: &str) -> Result<Vec<String>> {
    let layers = ConfigLayers::new().environment(
        "FULGURITE_",
        &["seed"],
        &["LOG", "JOB_KEY"],
        [(name.into(), "5".into())],
    )?;
    layers.check_variables().map(<[String]>::to_vec)
}

#[test]
fn misspelled_variables_are_errors() {
    let error = |name: &str| variable(name).unwrap_err().to_string();
    insta::assert_snapshot!(error("FULGURITE_TRAINER_MAX_STEPS"), @"the variable FULGURITE_TRAINER_MAX_STEPS has no effect; did you mean FULGURITE_TRAINER__MAX_STEPS? (In a variable two underscores stand for the point of a key.)");
    insta::assert_snapshot!(error("FULGURITE_TRAINER_MAX_STEP"), @"the variable FULGURITE_TRAINER_MAX_STEP has no effect; did you mean FULGURITE_TRAINER__MAX_STEPS? (In a variable two underscores stand for the point of a key.)");
    insta::assert_snapshot!(error("FULGURITE_OPTIMIZER_LR"), @"the variable FULGURITE_OPTIMIZER_LR has no effect; did you mean FULGURITE_OPTIMIZER__LR? (In a variable two underscores stand for the point of a key.)");
    insta::assert_snapshot!(error("FULGURITE_JOBKEY"), @"the variable FULGURITE_JOBKEY has no effect; did you mean FULGURITE_JOB_KEY? (In a variable two underscores stand for the point of a key.)");
    // Another program may own this variable.
    assert_eq!(variable("FULGURITE_HOME_PAGE").unwrap(), ["FULGURITE_HOME_PAGE"]);
    for known in ["FULGURITE_LOG", "FULGURITE_SEED", "FULGURITE_TRAINER__MAX_STEPS", "OTHER_LOG"] {
        assert!(variable(known).unwrap().is_empty(), "{known}");
    }
}
