//! The built-in strategies fulfil the contract of the `Strategy` trait.

use fulgurite_core::Result;
use fulgurite_core::collective::{ProcessGroup, Solo};
use fulgurite_core::conformance::{self, Equivalence};
use fulgurite_core::strategy::StrategyConfig;
use fulgurite_strategies::{
    AccumulationSync, Auto, DTypeName, Ddp, Diloco, Fsdp, MixedPrecisionPolicy, ModelParallel,
    ReshardAfterForward, SingleDevice, Size,
};
use fulgurite_transports::run_ranks;
use std::sync::Arc;

fn conforms<S: StrategyConfig>(config: &S, equivalence: Equivalence) {
    for world_size in 1..=3 {
        run_ranks(world_size, |world| conformance::strategy(config, &world, equivalence)).unwrap();
    }
}

// checklist: Lightning: setup_environment
#[test]
fn single_device() {
    let world: Arc<dyn ProcessGroup> = Arc::new(Solo::new("world", 0));
    conformance::strategy(&SingleDevice::default(), &world, Equivalence::OneRank).unwrap();
}

#[test]
fn auto() {
    conforms(&Auto::default(), Equivalence::OneRank);
}

// checklist: Lightning: setup_environment
#[test]
fn ddp() {
    conforms(&Ddp::default(), Equivalence::OneRank);
}

#[test]
fn ddp_with_a_bucket_for_each_parameter() {
    let small = Ddp { bucket_cap_mb: 0.0, first_bucket_mb: 0.0, ..Ddp::default() };
    conforms(&small, Equivalence::OneRank);
}

// checklist: Lightning: setup_environment
#[test]
fn fsdp() {
    conforms(&Fsdp::default(), Equivalence::OneRank);
}

#[test]
fn fsdp_with_other_options() {
    let never = ReshardAfterForward::Never;
    let no_prefetch = Fsdp { prefetch: 0.into(), ..Fsdp::default() };
    conforms(&no_prefetch, Equivalence::OneRank);
    conforms(&Fsdp { reshard_after_forward: never, ..Fsdp::default() }, Equivalence::OneRank);
    conforms(
        &Fsdp {
            shard_conditions: vec!["blocks.1".to_owned()],
            prefetch: 2.into(),
            ..Fsdp::default()
        },
        Equivalence::OneRank,
    );
}

#[test]
fn fsdp_in_bf16() {
    let mixed_precision =
        MixedPrecisionPolicy { param_dtype: Some(DTypeName::Bf16), ..Default::default() };
    conforms(&Fsdp { mixed_precision, ..Fsdp::default() }, Equivalence::None);
}

#[test]
fn model_parallel() {
    // The model has no plan for cutting its layers.
    let whole = Some(Size::Ranks(1));
    let sharded = ModelParallel { tensor_parallel_size: whole, ..ModelParallel::default() };
    conforms(&sharded, Equivalence::OneRank);
}

#[test]
fn model_parallel_of_replicas() {
    let replicas = ModelParallel {
        data_parallel_replicate_size: Some(Size::Auto),
        data_parallel_shard_size: Some(Size::Ranks(1)),
        tensor_parallel_size: Some(Size::Ranks(1)),
        ..ModelParallel::default()
    };
    conforms(&replicas, Equivalence::OneRank);
}

#[test]
fn accumulation_that_communicates() {
    for accumulation_sync in [AccumulationSync::ReduceScatter, AccumulationSync::All] {
        conforms(&Fsdp { accumulation_sync, ..Fsdp::default() }, Equivalence::OneRank);
    }
}

#[test]
fn diloco() {
    let apart = Diloco { sync_every: 2, ..Diloco::default() };
    conforms(&apart, Equivalence::None);
    conforms(&Diloco { warmup_steps: 100, ..apart }, Equivalence::OneRank);
}

#[test]
fn one_device_is_one_rank() {
    let refused = run_ranks(2, |world| -> Result<()> {
        conformance::strategy(&SingleDevice::default(), &world, Equivalence::OneRank)
    });
    assert!(refused.is_err());
}
