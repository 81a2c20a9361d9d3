//! The memory predicted before ranks exist is the memory that ranks hold.

use std::sync::Arc;

use candle_core::DType;
use fulgurite_core::Result;
use fulgurite_core::collective::{Planned, ProcessGroup};
use fulgurite_core::fabric::Fabric;
use fulgurite_core::mesh::DeviceMesh;
use fulgurite_core::module::{ModuleBuilder, ModuleInit};
use fulgurite_core::nn::{Linear, SwiGluMlp};
use fulgurite_core::parameter::Init;
use fulgurite_core::strategy::{BuildContext, RankMemory, Strategy, StrategyConfig};
use fulgurite_test_message::assert_says;
use fulgurite_transports::run_ranks;

const HIDDEN: usize = 12;
const PLAN: &str = r#""parallelize": {"type": "plan", "plan": {
    "model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise"}}"#;

/// Layers with the names of a Llama's; shards do not divide all of their sizes.
fn build(b: &ModuleBuilder) -> Result<()> {
    for i in 0..2 {
        b.unit(&format!("model.layers.{i}"), |b| {
            SwiGluMlp::with_init(&b.pp("mlp"), HIDDEN, 20, Init::ZEROS)
        })?;
    }
    Linear::new(&b.frozen().pp("lm_head"), HIDDEN, 31)?;
    Ok(())
}

fn strategy(config: &str, ranks: usize) -> Box<dyn Strategy> {
    let config: Box<dyn StrategyConfig> = serde_json::from_str(config).unwrap();
    config.build(&BuildContext::new(ranks)).unwrap()
}

fn plan(config: &str, ranks: usize, init: ModuleInit) -> RankMemory {
    let mut strategy = strategy(config, ranks);
    let mesh = strategy.device_mesh(Arc::new(Planned::world(ranks))).unwrap();
    let b = ModuleBuilder::new(strategy.module_init_context(init));
    build(&b).unwrap();
    plan_module(&mut *strategy, b, &mesh).unwrap().unwrap()
}

fn plan_module(
    strategy: &mut dyn Strategy,
    b: ModuleBuilder,
    mesh: &DeviceMesh,
) -> Result<Option<RankMemory>> {
    strategy.extensions().unwrap().plan_module(&mut b.finish().unwrap(), mesh)
}

/// Bytes of the values that rank 0 updates or keeps, and the elements that it updates.
fn held(config: &str, ranks: usize, init: &ModuleInit) -> (u64, u64) {
    let all = run_ranks(ranks, |world: Arc<dyn ProcessGroup>| {
        let mut fabric = Fabric::new(world, strategy(config, ranks), init.clone(), 1)?;
        fabric.setup_module(build)?;
        let (mut bytes, mut updated) = (0, 0);
        for parameter in fabric.module_tree()?.parameters() {
            let elements = parameter.local()?.values.elem_count();
            bytes += elements * parameter.dtype().size_in_bytes();
            updated += if parameter.requires_grad() { elements } else { 0 };
        }
        Ok((bytes as u64, updated as u64))
    });
    all.unwrap().swap_remove(0)
}

#[test]
fn planned_memory_is_what_rank_0_holds() {
    for (config, ranks) in [
        (r#"{"type": "single_device"}"#.to_owned(), 1),
        (r#"{"type": "ddp"}"#.to_owned(), 2),
        (r#"{"type": "fsdp"}"#.to_owned(), 3),
        (r#"{"type": "fsdp", "ignored": ["lm_head", "model.layers.1"]}"#.to_owned(), 3),
        (format!(r#"{{"type": "tp", {PLAN}}}"#), 2),
        (format!(r#"{{"type": "fsdp_tp", {PLAN}}}"#), 4),
        (r#"{"type": "hsdp", "data_parallel_replicate_size": 2}"#.to_owned(), 4),
    ] {
        let config = config.as_str();
        let init = ModuleInit::default();
        let planned = plan(config, ranks, init.clone());
        let found = (planned.parameters, planned.updated_elements);
        assert_eq!(found, held(config, ranks, &init), "{config}");
        assert_eq!(planned.gradients, 4 * planned.updated_elements, "{config}");
    }
}

#[test]
fn units_are_gathered_in_the_compute_dtype() {
    let init = ModuleInit { compute_dtype: DType::BF16, ..ModuleInit::default() };
    let planned = plan(r#"{"type": "fsdp"}"#, 2, init);
    let unit = 3 * HIDDEN * 20;
    assert_eq!(planned.gathered_unit, 2 * unit.max(HIDDEN * 31) as u64);
}

/// One configuration for any number of ranks: a plan that cuts nothing is not compared with the
/// model's names.
#[test]
fn a_plan_is_for_ranks_that_share_layers_only() {
    for plan_of in [
        r#"{"type": "plan", "plan": {"nothing": "colwise"}}"#,
        r#"{"type": "llama", "sequence_parallel": true, "prefix": "elsewhere"}"#,
        r#"{"type": "hf", "plan": {"nothing": "rowwise"}}"#,
    ] {
        let on = |tensor: usize, ranks: usize| {
            let config = format!(
                r#"{{"type": "model_parallel", "tensor_parallel_size": {tensor}, "parallelize": {plan_of}}}"#
            );
            let mut strategy = strategy(&config, ranks);
            let mesh = strategy.device_mesh(Arc::new(Planned::world(ranks))).unwrap();
            let b = ModuleBuilder::new(strategy.module_init_context(ModuleInit::default()));
            build(&b).unwrap();
            plan_module(&mut *strategy, b, &mesh)
        };
        on(1, 1).unwrap();
        on(1, 2).unwrap();
        assert!(on(2, 2).is_err(), "{plan_of}");
    }
    let units = r#"{"type": "fsdp", "parallelize": {"type": "plan", "units": ["nothing.*"]}}"#;
    let mut strategy = strategy(units, 2);
    let mesh = strategy.device_mesh(Arc::new(Planned::world(2))).unwrap();
    let b = ModuleBuilder::new(ModuleInit::default());
    build(&b).unwrap();
    assert!(plan_module(&mut *strategy, b, &mesh).is_err());
}

#[test]
fn models_a_plan_cannot_cut_are_refused() {
    let config =
        r#"{"type": "tp", "parallelize": {"type": "plan", "plan": {"nothing": "colwise"}}}"#;
    let mut strategy = strategy(config, 2);
    let mesh = strategy.device_mesh(Arc::new(Planned::world(2))).unwrap();
    let b = ModuleBuilder::new(ModuleInit::default());
    build(&b).unwrap();
    let error = plan_module(&mut *strategy, b, &mesh).unwrap_err();
    assert_says!(error, "module `nothing`: no layer matches … model's layers are lm_head …");
}
