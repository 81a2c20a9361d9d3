//! Plans in configuration files and on the command line.

use fulgurite_core::Result;
use fulgurite_core::config::{ConfigLayers, PluginValue};
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::parallel::{Colwise, Layout, Plan, Rowwise, SequenceParallel};
use fulgurite_core::plan;
use fulgurite_core::strategy::ParallelizeConfig;
use fulgurite_strategies::{Fsdp, HuggingFacePlan, InlinePlan, LlamaPlan};
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;
use serde::Deserialize;

use super::models::Llama;
use super::{function, mesh};

#[derive(Debug, Deserialize)]
struct Config {
    trainer: Trainer,
}

#[derive(Debug, Deserialize)]
struct Trainer {
    strategy: PluginValue,
}

const FILE: &str = r#"
    [trainer.strategy]
    type = "fsdp"
    parallelize = { type = "plan", plan = { "layers.*.mlp.up_proj" = "colwise", "layers.*.mlp.down_proj" = { type = "rowwise", output = "shard(1)" } } }
"#;

/// The plan of the strategy described by a file and overrides.
fn plan_of(text: &str, overrides: &[&str]) -> Result<InlinePlan> {
    let mut layers = ConfigLayers::new().text("a.toml", text)?;
    for assignment in overrides {
        layers = layers.set(assignment)?;
    }
    let config: Config = layers.parse()?;
    // As a strategy's own configuration has it.
    #[derive(Deserialize)]
    struct Strategy {
        parallelize: InlinePlan,
    }
    let _: Fsdp = fulgurite_core::config::parse_at(
        "trainer.strategy",
        config.trainer.strategy.options.clone(),
    )?;
    let mut options = config.trainer.strategy.options;
    if let Some(toml::Value::Table(table)) = options.get_mut("parallelize") {
        table.remove("type");
    }
    fulgurite_core::config::parse_at::<Strategy>("trainer.strategy", options).map(|s| s.parallelize)
}

// checklist: NeMo: parallelize: Llama's plan, plans by Hugging Face's strings, globs
#[test]
fn keys_with_dots_stay_one_key() {
    let expected = plan! {
        "layers.*.mlp.down_proj" => Rowwise { output: Layout::SEQUENCE, ..Rowwise::default() },
        "layers.*.mlp.up_proj" => Colwise::default(),
    };
    assert_eq!(plan_of(FILE, &[]).unwrap().plan, expected);

    // One override adds an entry, one replaces a name by a table, one a table by a name.
    let plan = plan_of(
        FILE,
        &[
            r#"trainer.strategy.parallelize.plan."layers.*.norm"=sequence_parallel"#,
            r#"trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"={ type = "colwise", input = "shard(1)" }"#,
            r#"trainer.strategy.parallelize.plan."layers.*.mlp.down_proj"="rowwise_rep""#,
        ],
    )
    .unwrap()
    .plan;
    let part = Colwise { input: Layout::SEQUENCE, ..Colwise::default() };
    assert_eq!(plan.style("layers.*.norm"), Some(SequenceParallel::default().into()));
    assert_eq!(plan.style("layers.*.mlp.up_proj"), Some(part.into()));
    let whole = Rowwise { input: Layout::Replicate, ..Rowwise::default() };
    assert_eq!(plan.style("layers.*.mlp.down_proj"), Some(whole.into()));

    // The whole plan on the command line.
    let set = r#"trainer.strategy={ type = "fsdp", parallelize = { type = "plan", plan = { "a.b" = "colwise" }, units = ["layers.*"] } }"#;
    let all = plan_of("", &[set]).unwrap();
    assert_eq!(
        (all.plan, all.units),
        (plan! { "a.b" => Colwise::default() }, vec!["layers.*".to_owned()])
    );
}

#[test]
fn wrong_plans_are_told_where() {
    let wrong = |style: &str| {
        let text = FILE.replace(r#""colwise""#, style);
        plan_of(&text, &[]).unwrap_err().to_string()
    };
    let messages = [
        wrong(r#""colwse""#),
        wrong("3"),
        wrong(r#""prepare_module_input""#),
        wrong(r#"{ type = "columnwise" }"#),
        wrong(r#"{ output = "shard(1)" }"#),
        wrong(r#"{ type = "colwise", inptu = "shard(1)" }"#),
        wrong(r#"{ type = "colwise", input = "shared(1)" }"#),
        wrong(r#"{ type = "colwise", input = 1 }"#),
        wrong(r#"{ type = "prepare_module_input", input = "shard(1)" }"#),
        wrong(r#"{ type = "replicated_with_grad_allreduce", input = "shard(1)" }"#),
        plan_of(FILE, &["trainer.strategy.parallelize.plan.x.y=colwise"]).unwrap_err().to_string(),
        plan_of(FILE, &["trainer.strategy.parallelize.plans={}"]).unwrap_err().to_string(),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"`: `colwse` is not a parallel style; expected one of colwise, rowwise, colwise_rep, rowwise_rep, colwise_gather_output, rowwise_split_input, embedding_rowwise, sequence_parallel, replicated_with_grad_allreduce, or a table with a `type`
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"`: expected one of colwise, rowwise, colwise_rep, rowwise_rep, colwise_gather_output, rowwise_split_input, embedding_rowwise, sequence_parallel, replicated_with_grad_allreduce, or a table with a `type`, found `3`
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"`: prepare_module_input needs layouts: write a table, { type = "prepare_module_input", input = "shard(1)", desired = "replicate" } for instance
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".type`: expected "colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel", "prepare_module_input", "prepare_module_output" or "replicated_with_grad_allreduce", found "columnwise"; did you mean "colwise"?
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"`: a style that is a table needs a `type`; if this is the first part of a pattern, put the whole pattern in quotes: "layers.*.mlp.up_proj"
      unknown key `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".inptu`; did you mean `input`? (the keys of `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj"` are input, output, loss_parallel)
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".input`: `shared(1)` is not a layout; expected "replicate", "shard(1)" (the sequence) or "shard(-1)" (the last dimension)
      `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".input`: expected a string, found `1`; write it in quotes
      missing key `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".desired`, which has no default
      unknown key `trainer.strategy.parallelize.plan."layers.*.mlp.up_proj".input`
      `trainer.strategy.parallelize.plan.x`: a style that is a table needs a `type`; if this is the first part of a pattern, put the whole pattern in quotes: "layers.*.mlp.up_proj"
      unknown key `trainer.strategy.parallelize.plans`; did you mean `plan`? (the keys of `trainer.strategy.parallelize` are plan, units)
    "#);

    let build = |text: &str| function(text).err().expect("it is wrong").to_string();
    let messages = [
        build(r#""lama""#),
        build(r#"{ type = "llama", sequence_paralel = true }"#),
        build(r#"{ type = "hf", plan = { "layers.*.mlp.up_proj" = "columnwise" } }"#),
        build(r#"{ type = "hf", plan = { "layers.*.mlp.up_proj" = { type = "colwise" } } }"#),
        build(r#"{ type = "none", units = [] }"#),
        build(r#""plan""#),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    unknown parallelize `lama`; did you mean `llama`? Available: first, hf, llama, none, plan. If a plugin crate provides `lama`, link it with `use that_crate as _;` in the program
    unknown key `parallelize.sequence_paralel`; did you mean `sequence_parallel`? (the keys of `parallelize` are sequence_parallel, loss_parallel, prefix, units)
    `parallelize.plan."layers.*.mlp.up_proj"`: expected "colwise", "rowwise", "colwise_rep", "rowwise_rep", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "sequence_parallel" or "replicated_with_grad_allreduce", found "columnwise"; did you mean "colwise"?
    `parallelize.plan."layers.*.mlp.up_proj"`: expected a string, found a table
    unknown key `parallelize.units`; it is an option of the parallelize `hf`, the parallelize `llama` or the parallelize `plan`
    `parallelize` of type "plan" has neither `plan` nor `units`; give it a table of patterns and styles, such as plan = { "layers.*.mlp.up_proj" = "colwise", … }, or choose "none"
    "#);
}

#[test]
fn configurations_survive_serialization() {
    let hf = HuggingFacePlan {
        plan: Some(fulgurite_strategies::StyleNames(vec![
            ("b.c".into(), "rowwise".into()),
            ("a".into(), "colwise".into()),
        ])),
        ..HuggingFacePlan::default()
    };
    let inline = InlinePlan {
        plan: plan! { "z.*" => Colwise::default(), "a" => Rowwise::default() },
        units: vec!["layers.*".to_owned()],
    };
    let configs: [Box<dyn ParallelizeConfig>; 4] = [
        Box::new(LlamaPlan::default()),
        Box::new(HuggingFacePlan::default()),
        Box::new(hf),
        Box::new(inline.clone()),
    ];
    for config in configs {
        let json = serde_json::to_string(&config).unwrap();
        let again: Box<dyn ParallelizeConfig> = serde_json::from_str(&json).unwrap();
        assert_eq!(format!("{again:?}"), format!("{config:?}"), "{json}");
    }
    // The order of the text is kept, if the format keeps it.
    let plan: Plan = serde_json::from_str(&serde_json::to_string(&inline.plan).unwrap()).unwrap();
    assert_eq!(plan, inline.plan);
    let twice = serde_json::from_str::<Plan>(r#"{"a": "colwise", "a": "rowwise"}"#);
    assert_says!(twice.unwrap_err(), "the plan has the pattern `a` twice at line 1 column 32");
}

#[test]
fn units_are_left_to_the_strategy_or_chosen() {
    run_ranks(2, |world| {
        let mesh = mesh(world)?;
        let chosen = |parallelize: &str| {
            let b = ModuleBuilder::new(ModuleInit::default());
            let _model = Llama::tied(&b)?;
            let mut tree = b.finish()?;
            function(parallelize)?.parallelize(&mut tree, &mesh)?;
            let units = tree.units().iter().map(|unit| tree.is_fully_sharded(unit.path()));
            Ok::<_, fulgurite_core::Error>((
                tree.has_fully_shard_choice(),
                units.collect::<Vec<_>>(),
            ))
        };
        let second = r#"units = ["model.layers.1"]"#;
        for name in ["llama", "hf"] {
            assert_eq!(chosen(&format!("{name:?}"))?, (false, vec![false, false]));
            let with = format!("{{ type = {name:?}, {second} }}");
            assert_eq!(chosen(&with)?, (true, vec![false, true]));
        }
        let with = format!(r#"{{ type = "plan", {second} }}"#);
        assert_eq!(chosen(&with)?, (true, vec![false, true]));
        Ok(())
    })
    .unwrap();
}
