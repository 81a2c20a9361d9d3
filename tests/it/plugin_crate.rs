//! A crate that depends on `fulgurite-core` alone adds a strategy, a logger, a checkpoint IO and a
//! parallelize function.

use std::path::Path;
use std::process::{Command, Output};

use fulgurite::core::config::ConfigLayers;
use fulgurite::core::run::RunConfig;
use fulgurite_test_message::assert_says;
use tempfile::TempDir;
use toml::Table;

use crate::program::plugin_program;

const CONFIG: &str = r#"
[data]
path = "text.txt"
seq_len = 32
batch_size = 4

[optimizer]
type = "adamw"
lr = 0.01

[trainer]
devices = 2
max_steps = 8
log_every_n_steps = 4
enable_progress_bar = false
loggers = [{ type = "markdown", columns = ["train_loss", "grad_norm"] }]
strategy = { type = "local_sgd", sync_every = 4 }
"#;

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A directory with the configuration and its data.
fn workplace() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let lines: String = (0..2000).map(|i| format!("{i} bottles\n")).collect();
    std::fs::write(dir.path().join("text.txt"), lines).unwrap();
    std::fs::write(dir.path().join("run.toml"), CONFIG).unwrap();
    dir
}

fn fit(dir: &TempDir, set: &[&str]) -> Output {
    let overrides = set.iter().flat_map(|set| ["--set", set]);
    Command::new(plugin_program())
        .args(["fit", "--config", "run.toml", "--output", "json"])
        .args(overrides)
        .current_dir(dir.path())
        .output()
        .unwrap()
}

/// The summary of a run; asserts that the run succeeded and learned.
fn summary(output: &Output) -> serde_json::Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    let last = text(&output.stdout).lines().last().unwrap();
    let summary: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!((&summary["steps"], &summary["world_size"]), (&8.into(), &2.into()), "{summary}");
    let loss = |name: &str| summary[name].as_f64().unwrap();
    assert!(loss("last_loss") < 0.7 * loss("first_loss"), "{summary}");
    summary
}

#[test]
fn linked_strategy_and_logger_train() {
    let dir = workplace();
    assert_eq!(summary(&fit(&dir, &[]))["strategy"], "local_sgd");
    let table = dir.path().join("fulgurite_logs/version_0/metrics.md");
    let table = std::fs::read_to_string(table).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[..2], ["| step | train_loss | grad_norm |", "| ---: | ---: | ---: |"]);
    let steps: Vec<&str> = lines[2..].iter().map(|line| &line[..4]).collect();
    assert_eq!(steps, ["| 1 ", "| 4 ", "| 8 "]);
}

// checklist: Lightning: parallelize_fn
#[test]
fn linked_parallelize_chooses_shards() {
    let dir = workplace();
    let strategy = "trainer.strategy={ type = \"fsdp\", parallelize = { type = \"every_other\" } }";
    let long = summary(&fit(&dir, &[strategy]));
    assert_eq!(long["strategy"], "fsdp");
    let strategy = "trainer.strategy={ type = \"fsdp\", parallelize = \"every_other\" }";
    let short = summary(&fit(&dir, &[strategy]));
    assert_eq!(long["last_loss"], short["last_loss"]);
}

#[test]
fn linked_checkpoint_io_sees_commits_and_end() {
    let dir = workplace();
    let io = "checkpoint.io={ type = \"journal\", io = \"local\" }";
    summary(&fit(&dir, &[io, "checkpoint.dir=kept", "checkpoint.every_n_steps=4"]));
    let journal = std::fs::read_to_string(dir.path().join("kept/journal.txt")).unwrap();
    assert_eq!(journal, "step-00000004\nstep-00000008\n");
    // The journal is not mistaken for a checkpoint, and the wrapping IO reads through the inner
    // one.
    let resumed =
        fit(&dir, &[io, "checkpoint.dir=kept", "trainer.ckpt_path=last", "trainer.max_steps=9"]);
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    let misspelt = fit(&dir, &["checkpoint.io={ type = \"journal\", io = \"locale\" }"]);
    assert!(text(&misspelt.stderr).contains("unknown checkpoint_io `locale`"), "{misspelt:?}");
}

#[test]
fn program_lists_linked_plugins() {
    let say = |args: &[&str]| {
        let output = Command::new(plugin_program()).arg("plugins").args(args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    let list = say(&["list"]);
    for plugin in ["local_sgd", "markdown", "every_other", "journal", "fsdp", "csv"] {
        assert!(list.lines().any(|line| line.split_whitespace().nth(1) == Some(plugin)), "{list}");
    }
    insta::assert_snapshot!(say(&["show", "every_other"]), @r#"
    parallelize `every_other`
      every other unit is sharded on its own, the rest with the root
      example: trainer.strategy = { type = "fsdp", parallelize = "every_other" }
      from:    fulgurite-local-sgd 0.1.0
    "#);
}

#[test]
fn out_of_range_option_is_named() {
    let dir = workplace();
    let output = fit(&dir, &["trainer.strategy.sync_every=0"]);
    assert!(!output.status.success());
    let message = text(&output.stderr);
    assert!(
        message.contains("`trainer.strategy.sync_every` = 0: expected at least 1"),
        "{message}"
    );
}

/// This program does not link the crate.
#[test]
fn without_the_link_the_error_says_how_to_link() {
    let refusal = |overrides: &[&str]| {
        let layers = ConfigLayers::new().defaults(CONFIG.parse::<Table>().unwrap());
        let layers = overrides.iter().try_fold(layers, |layers, set| layers.set(set)).unwrap();
        let run = RunConfig::<Table, Table>::from_layers(layers).unwrap();
        run.check_plugins().unwrap_err().to_string()
    };
    assert_says!(
        refusal(&["trainer.loggers=[]"]),
        "unknown strategy `local_sgd` … plugin crate … `use that_crate as _;` …"
    );
    assert_says!(
        refusal(&["trainer.strategy=ddp"]),
        "unknown logger `markdown` … plugin crate … `use that_crate as _;` …"
    );
}

#[test]
fn guide_matches_the_plugin_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let code: String = [
        "src/local_sgd.rs",
        "src/markdown.rs",
        "src/power_sgd.rs",
        "src/every_other.rs",
        "src/glu.rs",
        "src/journal.rs",
        "examples/train.rs",
        "tests/conformance.rs",
    ]
    .iter()
    .map(|file| read(&format!("examples/plugin-crate/{file}")))
    .collect();
    let guide = read("docs/src/guides/writing-a-plugin.md");
    let blocks: Vec<&str> =
        guide.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() > 4);
    for block in blocks {
        assert!(code.contains(block.trim_end()), "this is not in the crate any more:\n{block}");
    }
}
