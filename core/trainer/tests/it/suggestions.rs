//! Suggestions in messages: names of other libraries, keys of other tables, Python and YAML values.

use fulgurite_core::Result;
use fulgurite_core::config::{ConfigLayers, Documented};
use fulgurite_core::registry::kind;
use fulgurite_core::run::{RunConfig, TrainerConfig};
use fulgurite_test_message::assert_says;
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
    assert_says!(error("trainer.gpus = 2"), "unknown key `trainer.gpus` … `trainer.devices`?");
    assert_says!(
        error("trainer.gradient_accumulation_steps = 2"),
        "… key `trainer.gradient_accumulation_steps` … `trainer.accumulate_grad_batches`?"
    );
    assert_says!(
        error("trainer.accumulate_grad_batch = 2"),
        "unknown key `trainer.accumulate_grad_batch` … `accumulate_grad_batches`?"
    );
    assert_says!(
        error("trainer.num_train_epochs = 2"),
        "unknown key `trainer.num_train_epochs` … `trainer.max_epochs`?"
    );
    assert_says!(error("trainer.fp16 = true"), "unknown key `trainer.fp16` … `trainer.precision`?");
    assert_says!(
        error("trainer.per_device_train_batch_size = 2"),
        "unknown key `trainer.per_device_train_batch_size` … `data.batch_size`?"
    );
    assert_says!(
        error("trainer.deterministic = true"),
        "unknown key `trainer.deterministic` … deterministic without a key"
    );
    assert_says!(start("epochs = 3"), "unknown key `epochs` … `trainer.max_epochs`?");
    assert_says!(error("trainer.maxEpochs = 3"), "unknown key `trainer.maxEpochs` … `max_epochs`?");
    // This program does not have a key for a tokenizer.
    assert_says!(start("tokenizer_name = 'x'"), "unknown key `tokenizer_name`");
}

#[test]
fn keys_of_other_tables_are_suggested() {
    assert_says!(start("batch_size = 4"), "unknown key `batch_size` … `data.batch_size`?");
    assert_says!(
        error("trainer.batch_size = 4"),
        "unknown key `trainer.batch_size` … `data.batch_size`?"
    );
    assert_says!(
        error("trainer.every_n_steps = 4"),
        "unknown key `trainer.every_n_steps` … `checkpoint.every_n_steps`?"
    );
    assert_says!(error("trainer.seed = 4"), "unknown key `trainer.seed`; did you mean `seed`?");
    assert_says!(
        start("data.num_workers = 4"),
        "unknown key `data.num_workers` … `trainer.num_workers`?"
    );
    let run = run("optimizer = { type = 'sgd', betas = [0.9, 0.9] }").unwrap();
    assert_says!(
        run.optimizer.check(kind::OPTIMIZER, "optimizer").unwrap_err(),
        "unknown key `optimizer.betas` … an option of … `adam` … `schedule_free_adamw` …"
    );
    assert_says!(
        error("trainer.strict = true"),
        "unknown key `trainer.strict` … `checkpoint.load.strict`?"
    );
}

#[test]
fn a_long_table_lists_similar_keys_alone() {
    assert_says!(
        error("trainer.clip_gradient = 1"),
        "unknown key `trainer.clip_gradient` (similar … gradient_clip_val, gradient_clip_algorithm)"
    );
    let keys = TrainerConfig::keys().len();
    let none = format!("unknown key `trainer.zzz` (`--help` lists the {keys} keys of `trainer`)");
    assert_eq!(error("trainer.zzz = 1"), none);
}

#[test]
fn python_and_yaml_values_get_suggestions() {
    assert_says!(error("trainer.max_steps = '100'"), r#"`trainer.max_steps` … "100"; write 100"#);
    assert_says!(error("trainer.max_steps = 1e3"), "`trainer.max_steps` … `1000.0`; write 1000");
    assert_says!(error("trainer.max_steps = '1,000'"), r#"`trainer.max_steps` … "1,000" … 1000"#);
    assert_says!(error("trainer.max_steps = -1"), "`trainer.max_steps` … `-1`; for no limit …");
    assert_says!(error("trainer.limit_val_batches = '20%'"), "`trainer.limit_val_batches` … 0.2");
    assert_says!(error("trainer.default_root_dir = '~bob/runs'"), "`~bob/runs` … is not known …");
    assert_says!(error("trainer.gradient_clip_val = '.5'"), "`trainer.gradient_clip_val` … 0.5");
    assert_says!(error("trainer.ema_decay = '1e-4'"), r#"`trainer.ema_decay` … "1e-4" … 0.0001"#);
    assert_says!(
        error("trainer.detect_anomaly = 'True'"),
        r#"`trainer.detect_anomaly` … "True" …"#
    );
    assert_says!(error("trainer.detect_anomaly = 0"), "`trainer.detect_anomaly` … `0` … false");
    assert_says!(error("trainer.max_steps = 'None'"), r#"`trainer.max_steps` … "None" … leave …"#);
    assert_says!(error("trainer.num_nodes = 'null'"), r#"`trainer.num_nodes` … "null"; leave …"#);
    assert_says!(error("trainer.freeze = 'head, body'"), r#"`trainer.freeze` … ["head", "body"]"#);
    assert_says!(error("trainer.freeze = '(a, 2)'"), r#"`trainer.freeze` … "(a, 2)" … ["a", 2]"#);
    assert_says!(error("trainer.devices = -1"), r#"`trainer.devices` … least 1 … `-1` … "auto"?"#);
    assert_says!(error("trainer.devices = '0,1'"), r#"`trainer.devices` … "0,1" … not a list …"#);
    assert_says!(error("trainer.devices = '2'"), r#"`trainer.devices` … least 1 … "2"; write 2"#);
    assert_says!(
        error("trainer.precision = 'fp16'"),
        r#"`trainer.precision` … "fp16" … "16-mixed"?"#
    );
    let set = |set: &str| ConfigLayers::new().set(set).err().unwrap().to_string();
    assert_says!(set("checkpoint.dir=None"), r#"--set checkpoint.dir=None … `null` … "None" …"#);
    assert_says!(set("trainer.callbacks+=['x']"), "--set trainer.callbacks+=['x'] … appended …");
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
    assert_says!(file("run.yaml", b"# nothing\n"), "DIR/run.yaml: YAML by its name … is TOML …");
    assert_says!(file("run.JSON", b"{}"), "DIR/run.JSON: JSON by its name … TOML: `[trainer]` …");
    let json = file("run.conf", b"{ \"seed\": 3 }");
    assert!(json.ends_with("\nThis looks like JSON; a configuration is TOML."), "{json}");
    let hint = |text: &str| {
        let error = file("run.conf", text.as_bytes());
        error.lines().last().unwrap().to_owned()
    };
    assert_says!(hint("[trainer]\nmax_steps = null # none\n"), "TOML has no null … key out …");
    insta::assert_snapshot!(hint("[trainer]\nenable_progress_bar = True\n"), @"TOML writes `true` and `false`.");
    assert_says!(hint("trainer:\n  max_steps: 3\n"), "This looks like YAML … TOML: `[trainer]` …");
    assert_says!(file("run.toml", b"\xff\xfes\0e\0e\0d\0"), "reading … DIR/run.toml … not UTF-8 …");
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
    assert_says!(name("optimizer = 'AdamW'"), "unknown optimizer `AdamW`; did you mean `adamw`? …");
    assert_says!(name("optimizer = 'adamv'"), "unknown optimizer `adamv`; did you mean `adamw`? …");
    assert_says!(name("optimizer = 'mouon'"), "unknown optimizer `mouon`; did you mean `muon`? …");
    let start = |text: &str| name(text).split(" Available").next().unwrap().to_owned();
    assert_says!(start("scheduler = 'cosine_with_warmup'"), "unknown scheduler … mean `cosine`?");
    assert_says!(start("scheduler = 'StepLR'"), "unknown scheduler `StepLR`; did you mean `step`?");
    assert_says!(
        start("scheduler = 'ReduceLROnPlateau'"),
        "unknown scheduler `ReduceLROnPlateau`; the callback `reduce_lr_on_plateau` does it (`trainer.callbacks`)."
    );
    assert_says!(
        name("optimizer = 'shampoo'"),
        "unknown optimizer `shampoo`; available: adafactor … adamw …"
    );
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
    assert_says!(
        error("FULGURITE_TRAINER_MAX_STEPS"),
        "the variable FULGURITE_TRAINER_MAX_STEPS … mean FULGURITE_TRAINER__MAX_STEPS? …"
    );
    assert_says!(
        error("FULGURITE_TRAINER_MAX_STEP"),
        "the variable FULGURITE_TRAINER_MAX_STEP … mean FULGURITE_TRAINER__MAX_STEPS? …"
    );
    assert_says!(
        error("FULGURITE_OPTIMIZER_LR"),
        "the variable FULGURITE_OPTIMIZER_LR … mean FULGURITE_OPTIMIZER__LR? …"
    );
    assert_says!(error("FULGURITE_JOBKEY"), "the variable FULGURITE_JOBKEY … FULGURITE_JOB_KEY …");
    // Another program may own this variable.
    assert_eq!(variable("FULGURITE_HOME_PAGE").unwrap(), ["FULGURITE_HOME_PAGE"]);
    for known in ["FULGURITE_LOG", "FULGURITE_SEED", "FULGURITE_TRAINER__MAX_STEPS", "OTHER_LOG"] {
        assert!(variable(known).unwrap().is_empty(), "{known}");
    }
}
