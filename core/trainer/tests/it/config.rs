//! Error messages for wrong configurations, and the merging of layers.

use std::collections::BTreeMap;
use std::path::Path;

use fulgurite_core::config::{
    self, ConfigLayers, PluginValue, plugin, reference, to_table, to_toml,
};
use fulgurite_core::registry::{self, kind};
use fulgurite_core::run::{RunConfig, reference_sections};
use fulgurite_core::trainer::{Callback, CallbackConfig, Logger, LoggerConfig};
use fulgurite_core::{Error, Result};
use fulgurite_test_message::assert_says;
use serde::{Deserialize, Serialize};
use toml::Table;

/// A plugin with a required option, a default and a plugin inside.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tee {
    every: u64,
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    limits: Limits,
    #[serde(default, deserialize_with = "plugin::deserialize_option")]
    inner: Option<Box<dyn LoggerConfig>>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Limits {
    min: f64,
    max: f64,
}

#[typetag::serde(name = "tee")]
impl LoggerConfig for Tee {
    fn build(&self, _dir: &Path) -> Result<Box<dyn Logger>> {
        Err(Error::other("not built in this test"))
    }
}
fulgurite_core::register_logger!("tee", Tee);

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Chime {
    #[serde(default)]
    volume: u64,
}

#[typetag::serde(name = "chime")]
impl CallbackConfig for Chime {
    fn build(&self) -> Result<Box<dyn Callback>> {
        Err(Error::other("not built in this test"))
    }
}
fulgurite_core::register_callback!("chime", Chime);

#[derive(Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
struct Model {
    hidden_size: usize,
    rates: BTreeMap<String, f64>,
    kind: Kind,
}

#[derive(Debug, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    #[default]
    Plain,
    Gated {
        width: usize,
    },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Data {
    path: String,
}

type Run = RunConfig<Model, Data>;

const BASE: &str = "data.path = 'text'\n";

fn run(text: &str) -> Result<Run> {
    Run::from_layers(ConfigLayers::new().text("base.toml", BASE)?.text("run.toml", text)?)
}

fn run_error(text: &str) -> String {
    run(text).expect_err("the configuration is wrong").to_string()
}

fn tee(text: &str) -> Result<Box<dyn LoggerConfig>> {
    let value = PluginValue::deserialize(text.parse::<toml::Value>().expect("it is TOML"))
        .expect("it is a name or a table");
    value.build(kind::LOGGER, "trainer.loggers[1]")
}

#[test]
fn registered_callbacks_are_known_by_name() {
    let all = registry::plugins();
    let chime = all.iter().find(|plugin| (plugin.kind, plugin.name) == (kind::CALLBACK, "chime"));
    assert_eq!(chime.unwrap().krate, env!("CARGO_PKG_NAME"));
    let error = |callback: &str| {
        let run = run(&format!("trainer.callbacks = [{callback}]")).unwrap();
        run.trainer.callbacks[0].check(kind::CALLBACK, "trainer.callbacks[0]").unwrap_err()
    };
    assert_says!(error("'chim'"), "unknown callback `chim` … `chime`? … `use that_crate as _;` …");
    assert_says!(
        error("{ type = 'chime', volum = 3 }"),
        "unknown … `trainer.callbacks[0].volum` …"
    );
}

// checklist: composer: FSDP2Config
#[test]
fn unknown_keys_are_errors_everywhere() {
    assert_says!(
        run_error("[trainer]\nmax_step = 3"),
        "run.toml: unknown key `trainer.max_step` …"
    );
    assert_says!(
        run_error("[model]\nhiden_size = 3"),
        "run.toml: unknown key `model.hiden_size` …"
    );
    assert_says!(
        run_error("[model.kind.gated]\nwidht = 3"),
        "run.toml: … `model.kind.gated.widht` …"
    );
    assert_says!(run_error("[data]\nwhere = 3"), "run.toml: unknown key `data.where` … are path)");
    assert_says!(run_error("[modle]"), "run.toml: unknown key `modle`; did you mean `model`? …");
    assert_says!(run_error("max_steps = 3"), "run.toml: unknown key … `trainer.max_steps`? …");
    assert_says!(
        run_error("checkpoint.evry_n_steps = 3"),
        "run.toml: … `checkpoint.evry_n_steps` …"
    );
}

#[test]
fn module_of_another_program_is_refused() {
    let named = |text: &str, name| run(text).and_then(|mut run| run.set_module(name).map(|()| run));
    let causal = PluginValue::new("causal_lm");
    for (text, name, recorded) in [
        ("", Some("causal_lm"), Some(&causal)),
        ("module = 'causal_lm'", Some("causal_lm"), Some(&causal)),
        ("", None, None),
    ] {
        assert_eq!(named(text, name).unwrap().module.as_ref(), recorded);
    }
    let error = |text: &str, name| named(text, name).unwrap_err().to_string();
    assert_says!(
        error("module = 'embedding'", Some("causal_lm")),
        r#"`module.type` … does not train "embedding", but "causal_lm" …"#
    );
    assert_says!(error("module = 'embedding'", None), r#"`module.type` … "embedding" … its own …"#);
    assert_says!(
        error("module = { type = 'causal_lm', depth = 3 }", Some("causal_lm")),
        "`module.depth`: unknown key; the only key of `module` is `type` … `[model]`"
    );
}

#[test]
fn wrong_values_name_the_full_path() {
    assert_says!(run_error("[trainer]\nmax_steps = 'many'"), r#"… `trainer.max_steps` … "many""#);
    assert_says!(run_error("trainer = 3"), "run.toml: `trainer`: expected a table, found `3`");
    assert_says!(run_error("seed = -1"), "run.toml: `seed` … an integer, at least 0, found `-1`");
    assert_says!(run_error("data.path = 2024"), "run.toml: `data.path` … a string, found `2024` …");
    assert_says!(
        run_error("[model.rates]\n\"a.b\" = 'x'"),
        r#"run.toml: `model.rates."a.b"` … "x""#
    );
    assert_says!(run_error("model.kind = 'gatd'"), r#"run.toml: `model.kind` … "gatd" … "gated"?"#);
    assert_says!(run_error("model.kind.gated.width = 'x'"), r#"… `model.kind.gated.width` … "x""#);
    assert_says!(run_error("optimizer = { type = 3 }"), "run.toml: `optimizer.type` … found `3` …");
    assert_says!(run_error("optimizer = 3"), "run.toml: `optimizer` … a name or a table … `3`");
    assert_says!(
        run_error("checkpoint.every_n_steps = 0"),
        "`checkpoint.every_n_steps` … least 1 …"
    );
    let error = Run::from_layers(ConfigLayers::new()).unwrap_err();
    assert_says!(error, "missing key `data.path`, which has no default");
}

#[test]
fn plugin_errors_name_the_full_path() {
    let error = |text| tee(text).unwrap_err();
    assert_says!(error("{ type = 'tee', every = 'x' }"), r#"`trainer.loggers[1].every` … "x""#);
    assert_says!(error("{ type = 'tee', evry = 3 }"), "unknown key `trainer.loggers[1].evry` …");
    assert_says!(error("{ type = 'tee' }"), "missing key `trainer.loggers[1].every` … no default");
    assert_says!(
        error("{ type = 'tee', every = 1, names = ['a', 2] }"),
        "`trainer.loggers[1].names[1]`: expected a string, found `2` …"
    );
    assert_says!(
        error("{ type = 'tee', every = 1, limits = { mx = 2 } }"),
        "unknown key `trainer.loggers[1].limits.mx`; did you mean `max`? …"
    );
    assert_says!(
        error("{ type = 'tee', every = 1, limits = { max = true } }"),
        "`trainer.loggers[1].limits.max` … a number, found `true`"
    );
    assert_says!(error("{ type = 'tea' }"), "unknown logger `tea`; did you mean `tee`? … plugin …");
    assert_says!(
        error("{ type = 'tee', every = 1, inner = 'tea' }"),
        "`trainer.loggers[1].inner`: unknown logger `tea`; did you mean `tee`? … plugin …"
    );
    assert_says!(
        error("{ type = 'tee', every = 1, inner = 3 }"),
        "`trainer.loggers[1].inner` … `3`"
    );
    assert_says!(
        error("{ type = 'tee', every = 1, inner = { every = 1 } }"),
        "missing key `trainer.loggers[1].inner.type` … no default"
    );
    assert_says!(
        error(
            "{ type = 'tee', every = 1, inner = { type = 'tee', every = 2, limits = { mn = 0 } } }"
        ),
        "unknown key `trainer.loggers[1].inner.limits.mn`; did you mean `min`? …"
    );
    assert!(matches!(error("'tea'"), Error::UnknownPlugin { .. }));
}

#[test]
fn plugins_nest_and_survive_a_round_trip() {
    let text = "{ type = 'tee', every = 1, inner = { type = 'tee', names = ['a'], every = 2 } }";
    let built = tee(text).unwrap();
    let written = to_table(&built).unwrap();
    insta::assert_snapshot!(to_toml(&written).unwrap(), @r#"
every = 1
names = []
type = "tee"

[inner]
every = 2
names = ["a"]
type = "tee"

[inner.limits]
max = 0.0
min = 0.0

[limits]
max = 0.0
min = 0.0
"#);
    let again: Box<dyn LoggerConfig> = config::parse(written.clone()).unwrap();
    assert_eq!(to_table(&again).unwrap(), written);
}

#[test]
fn a_plugin_field_reads_other_formats_too() {
    #[derive(Deserialize)]
    struct Holder {
        #[serde(deserialize_with = "plugin::deserialize")]
        logger: Box<dyn LoggerConfig>,
    }
    let read = |text: &str| serde_json::from_str::<Holder>(text).map(|holder| holder.logger);
    for text in [
        r#"{ "logger": { "type": "tee", "every": 4, "inner": null } }"#,
        r#"{ "logger": { "every": 4, "type": "tee" } }"#,
    ] {
        assert_eq!(to_table(&read(text).unwrap()).unwrap()["every"].as_integer(), Some(4));
    }
    let error = read(r#"{ "logger": { "every": 4, "type": "tea" } }"#).unwrap_err().to_string();
    assert!(
        error.starts_with("unknown logger `tea`; did you mean `tee`? Available: tee."),
        "{error}"
    );
}

#[test]
fn missing_or_malformed_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none.toml");
    let error = ConfigLayers::new().file(&missing).unwrap_err().to_string();
    let shown = error.replace(&dir.path().display().to_string(), "DIR");
    assert_says!(shown, "reading the configuration file DIR/none.toml … (os error 2)");
    let broken = dir.path().join("broken.toml");
    std::fs::write(&broken, "[trainer]\nmax_steps = = 3\n").unwrap();
    let error = ConfigLayers::new().file(&broken).unwrap_err().to_string();
    let shown = error.replace(&dir.path().display().to_string(), "DIR");
    insta::assert_snapshot!(shown, @r#"
DIR/broken.toml: TOML parse error at line 2, column 13
  |
2 | max_steps = = 3
  |             ^
extra `=`, expected nothing
"#);
}

fn set(assignment: &str) -> Result<Table> {
    ConfigLayers::new().set(assignment).map(|layers| layers.resolve())
}

#[test]
fn overrides_are_toml_or_else_strings() {
    let check = |assignment: &str, toml: &str| {
        assert_eq!(set(assignment).unwrap(), toml.parse::<Table>().unwrap(), "{assignment}");
    };
    check("seed=7", "seed = 7");
    check("optimizer.lr=3e-4", "optimizer.lr = 3e-4");
    check("trainer.strategy=ddp", "trainer.strategy = 'ddp'");
    check("trainer.precision=32-true", "trainer.precision = '32-true'");
    check("data.path=foo.txt", "data.path = 'foo.txt'");
    check("data.path=", "data.path = ''");
    check("data.path=a=b c", "data.path = 'a=b c'");
    check("data.path='2024'", "data.path = '2024'");
    check("data.path=1\nseed = 3", "data.path = \"1\\nseed = 3\"");
    check("trainer.max_time=00:12:00", "trainer.max_time = '00:12:00'");
    check("trainer.loggers=[\"csv\"]", "trainer.loggers = ['csv']");
    check("optimizer = {type=\"sgd\", lr=1}", "optimizer = { type = 'sgd', lr = 1 }");
    check("plan.\"a.b=c\".x=true", "plan.'a.b=c'.x = true");
}

#[test]
fn malformed_overrides_name_the_expected_form() {
    let error = |assignment| set(assignment).unwrap_err();
    assert_says!(error("trainer.max_steps"), "--set trainer.max_steps … no `=` … key=value …");
    assert_says!(
        error("trainer..max_steps=3"),
        "--set trainer..max_steps=3: the key is malformed … key=value …"
    );
    assert_says!(error("=3"), "--set =3: the key is malformed; expected key=value …");
    assert_says!(error("[trainer]=3"), "--set [trainer]=3: the key is malformed … key=value …");
    assert_says!(error("trainer.loggers=[csv]"), "--set trainer.loggers=[csv] … need quotes");
    let layers = ConfigLayers::new().text("base.toml", BASE).unwrap();
    let layers = layers.set("trainer.max_stepz=3").unwrap();
    let message = Run::from_layers(layers).unwrap_err().to_string();
    let start = message.split(" (").next().unwrap();
    assert_says!(start, "--set trainer.max_stepz=3: unknown key … did you mean `max_steps`?");
}

fn merged(layers: &[&str]) -> String {
    let mut all = ConfigLayers::new();
    for (i, text) in layers.iter().enumerate() {
        all = all.text(i, text).unwrap();
    }
    all.resolve().to_string()
}

#[test]
fn a_type_may_follow_its_keys_in_overrides() {
    let base = "optimizer = { type = 'adamw', lr = 1, betas = [0, 0] }\ndata.type = 'text'";
    let config = |assignments: &[&str]| {
        let layers = ConfigLayers::new().text("base.toml", base).unwrap();
        let layers = assignments.iter().try_fold(layers, |layers, a| layers.set(a)).unwrap();
        layers.resolve()
    };
    let expected = config(&["optimizer.type=sgd", "optimizer.lr=2"]);
    assert_eq!(expected["optimizer"], toml::toml! { type = "sgd" lr = 2 }.into());
    assert_eq!(config(&["optimizer.lr=2", "optimizer.type=sgd"]), expected);
    assert_eq!(config(&["optimizer.lr=2", "optimizer=sgd"]), expected);
    let data = config(&["data.path=a.u16", "seed=1", "data.type=tokens"]);
    assert_eq!(data["data"], toml::toml! { type = "tokens" path = "a.u16" }.into());
    // Two types: the later one wins, without the other's options.
    let last = config(&["optimizer.type=lion", "optimizer.beta=2", "optimizer.type=sgd"]);
    assert_eq!(last["optimizer"], toml::toml! { type = "sgd" }.into());
}

#[test]
fn layers_merge_deeply_and_the_later_wins() {
    insta::assert_snapshot!(merged(&["a = { x = 1, y = { p = 1, q = 2 } }\nl = [1, 2]", "a = { y = { q = 3 } }\nl = [3]"]), @r#"
l = [3]

[a]
x = 1

[a.y]
p = 1
q = 3
"#);
}

#[test]
fn a_table_whose_type_changes_is_replaced() {
    let fsdp = "s = { type = 'fsdp', reshard = false, mp = { param = 'bf16' } }";
    insta::assert_snapshot!(merged(&[fsdp, "s = { type = 'ddp', cap = 3 }"]), @r#"
[s]
cap = 3
type = "ddp"
"#);
    insta::assert_snapshot!(merged(&[fsdp, "s = { type = 'fsdp', mp = { reduce = 'f32' } }"]), @r#"
[s]
reshard = false
type = "fsdp"

[s.mp]
param = "bf16"
reduce = "f32"
"#);
    insta::assert_snapshot!(merged(&[fsdp, "s.reshard = true"]), @r#"
[s]
reshard = true
type = "fsdp"

[s.mp]
param = "bf16"
"#);
}

#[test]
fn a_name_is_short_for_a_table_with_a_type() {
    insta::assert_snapshot!(merged(&["s = 'ddp'", "s.cap = 3"]), @r#"
[s]
cap = 3
type = "ddp"
"#);
    insta::assert_snapshot!(merged(&["s = 'ddp'", "s = { type = 'ddp', cap = 3 }"]), @r#"
[s]
cap = 3
type = "ddp"
"#);
    insta::assert_snapshot!(merged(&["s = 'ddp'", "s = { type = 'fsdp', r = 3 }"]), @r#"
[s]
r = 3
type = "fsdp"
"#);
    insta::assert_snapshot!(merged(&["s = { type = 'ddp', cap = 3 }", "s = 'ddp'"]), @r#"
[s]
cap = 3
type = "ddp"
"#);
    insta::assert_snapshot!(merged(&["s = { type = 'ddp', cap = 3 }", "s = 'fsdp'"]), @r#"
[s]
type = "fsdp"
"#);
    insta::assert_snapshot!(merged(&["s = 'ddp'", "s = 'fsdp'"]), @r#"s = "fsdp""#);
}

#[test]
fn resolved_configuration_round_trips() {
    let layers = ConfigLayers::new()
        .text("base.toml", BASE)
        .and_then(|layers| layers.set("optimizer.lr=1e-3"))
        .and_then(|layers| layers.set("trainer.strategy=fsdp"))
        .and_then(|layers| layers.set("model.kind.gated.width=3"))
        .unwrap();
    let run = Run::from_layers(layers).unwrap();
    let text = to_toml(&run).unwrap();
    insta::assert_snapshot!(text, @r#"
    seed = 42
    scheduler = "constant"

    [model]
    hidden_size = 0

    [model.rates]

    [model.kind.gated]
    width = 3

    [data]
    path = "text"

    [optimizer]
    type = "adamw"
    lr = 0.001

    [trainer]
    accelerator = "auto"
    devices = 1
    num_nodes = 1
    prefetch_factor = 2
    last_batch = "wrap"
    accumulate_grad_batches = 1
    gradient_clip_algorithm = "norm"
    val_check_interval = 1.0
    check_val_every_n_epoch = 1
    num_sanity_val_steps = 2
    limit_train_batches = 1.0
    limit_val_batches = 1.0
    limit_test_batches = 1.0
    limit_predict_batches = 1.0
    overfit_batches = 0
    fast_dev_run = false
    detect_anomaly = false
    sync_buffers = "broadcast"
    sync_batchnorm = false
    log_every_n_steps = 10
    late_reads = "auto"
    precision = "32-true"
    keep_in_fp32 = []
    default_root_dir = "fulgurite_logs"
    enable_progress_bar = true
    enable_plan = true
    unused_parameters = "error"
    freeze = []
    eval_mode = []
    activation_checkpointing = "none"
    timeout_secs = 600
    flight_recorder = 20000
    memory_check = "error"
    strategy = "fsdp"
    process_group = "auto"
    callbacks = []
    loggers = ["csv", "jsonl"]

    [trainer.elastic]
    enabled = false
    min_ranks = 1
    max_restarts = 3
    replicas = 0
    replicate_every_n_steps = 1
    replace_slow_ranks = false

    [checkpoint]
    save_last = true
    async_save = false
    max_failed_saves = 0
    mode = "min"
    weights_only = false
    allow_other_data = false
    overwrite = false
    io = "local"

    [checkpoint.load]
    strict = true
    include = []
    exclude = []
    broadcast_from_rank0 = false
    rename = []
    "#);
    let again = Run::from_layers(ConfigLayers::new().text("again", &text).unwrap()).unwrap();
    assert_eq!(again, run);
}

#[test]
fn the_reference_knows_every_key() {
    let sections = reference_sections().unwrap();
    let page = reference::markdown(&sections);
    for key in ["`seed`", "`max_steps`", "`every_n_steps`"] {
        assert!(page.contains(&format!("| {key} |")), "{page}");
    }
    let stale = reference::Section::new("x", Vec::new(), &toml::toml! { a = 1 });
    assert_says!(stale.unwrap_err(), "the reference of `x` is out of date … are ; there are a");
}

#[test]
fn an_excluded_key_is_removed() {
    let base = "data = { path = 'a', validation_sets = { books = 'b', code = 'c' } }";
    let merged = |assignment: &str| {
        let layers = ConfigLayers::new()
            .exclusive_keys(
                "data",
                &[&["path", "mixture"], &["validation_path", "validation_sets"]],
            )
            .text("base.toml", base)
            .unwrap();
        layers.set(assignment).unwrap().resolve()["data"].to_string()
    };
    insta::assert_snapshot!(merged("data.validation_sets.books=x"), @r#"{ path = "a", validation_sets = { books = "x", code = "c" } }"#);
    insta::assert_snapshot!(merged("data.validation_path=x"), @r#"{ path = "a", validation_path = "x" }"#);
    insta::assert_snapshot!(merged("data.mixture=[]"), @r#"{ mixture = [], validation_sets = { books = "b", code = "c" } }"#);
}

fn tables() -> impl proptest::strategy::Strategy<Value = toml::Value> {
    use proptest::prelude::*;
    let scalar = prop_oneof![
        any::<i64>().prop_map(toml::Value::Integer),
        any::<bool>().prop_map(toml::Value::Boolean),
        "[a-z]{0,3}".prop_map(toml::Value::String),
    ];
    scalar.prop_recursive(4, 24, 4, |inner| {
        proptest::collection::btree_map("a|b|c|type", inner, 0..4)
            .prop_map(|map| toml::Value::Table(map.into_iter().collect()))
    })
}

proptest::proptest! {
    #[test]
    fn a_layer_over_itself_changes_nothing(value in tables()) {
        let table = Table::from_iter([("key".to_owned(), value)]);
        let once = ConfigLayers::new().defaults(table.clone());
        let twice = once.clone().defaults(table.clone());
        proptest::prop_assert_eq!(once.resolve(), table);
        proptest::prop_assert_eq!(twice.resolve(), once.resolve());
    }

    #[test]
    fn any_value_can_be_set(text in "\\PC*") {
        match set(&format!("a.b={text}")) {
            Ok(table) => {
                let inner = table["a"].as_table().expect("`a` is a table");
                proptest::prop_assert_eq!((table.len(), inner.len()), (1, 1));
                if let Some(string) = inner["b"].as_str() {
                    // Escapes and home directories are replaced.
                    let replaced = text.contains('\\') || text.trim_start().starts_with('~');
                    proptest::prop_assert!(text.contains(string) || replaced);
                }
            }
            Err(error) => proptest::prop_assert!(
                // `~name/` is the home of a user, who may not exist.
                text.trim_start().starts_with(['[', '{', '"', '\'', '~']),
                "{}", error
            ),
        }
    }
}
