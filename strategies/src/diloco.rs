//! `strategy = "diloco"`: replicas train on their own, and an outer optimizer brings them together every so
//! many steps.

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::ReshardAfterForward;
use crate::mesh_strategy::{MeshStrategy, OuterSettings, Settings, Sharding};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::schedule::fsdp::Prefetch;

/// `strategy = "diloco"` (Douillard et al., 2023: DiLoCo, Distributed Low-Communication Training of Language
/// Models).
///
/// Each replica trains with the run's optimizer on its own data alone. Every `sync_every` steps the change of the
/// parameters since the last synchronisation, averaged over replicas, is the gradient of an outer SGD with
/// momentum, from whose result all replicas go on. With `outer = { lr = 1.0, momentum = 0.0 }` parameters are
/// averaged: local SGD, as PyTorch's `PostLocalSGDOptimizer` with `warmup_steps`.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Diloco {
    /// Optimizer steps from one synchronisation of the replicas to the next; the paper's 500 unless given.
    pub sync_every: u64,
    /// Steps at the beginning of the training in which gradients are summed over replicas, as by `ddp`.
    pub warmup_steps: u64,
    /// The outer optimizer: `lr`, `momentum` and `nesterov`.
    pub outer: OuterSgd,
    /// Number of ranks that share a replica, sharded over them as by `fsdp`; 1 unless given.
    pub data_parallel_shard_size: usize,
    /// Number of replicas; as many as the ranks make unless given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_replicate_size: Option<usize>,
    /// Whether a unit's parameters are freed between its forward and its backward, where replicas are sharded:
    /// `true` (which is `"auto"`), `false`, `"all_but_last"`, or the number of ranks over which a part of each is
    /// kept.
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// How many units ahead parameters are gathered while one computes, or a table of `forward` and
    /// `backward`.
    pub prefetch: Prefetch,
    /// Allows a model of which no unit is gathered on its own.
    pub allow_root_only: bool,
}

/// The outer optimizer of [`Diloco`]: SGD, as PyTorch's. Its state is in f32 (f64 for parameters in f64), cut as
/// the parameters are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OuterSgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum, from 0 up to but not including 1.
    pub momentum: f64,
    /// Whether momentum is Nesterov's. Without momentum it changes nothing.
    pub nesterov: bool,
}

impl Default for OuterSgd {
    /// The paper's.
    fn default() -> Self {
        Self { lr: 0.7, momentum: 0.9, nesterov: true }
    }
}

impl Default for Diloco {
    fn default() -> Self {
        Self {
            sync_every: 500,
            warmup_steps: 0,
            outer: OuterSgd::default(),
            data_parallel_shard_size: 1,
            data_parallel_replicate_size: None,
            reshard_after_forward: ReshardAfterForward::Auto,
            mixed_precision: MixedPrecisionPolicy::default(),
            prefetch: Prefetch::default(),
            allow_root_only: false,
        }
    }
}

impl Diloco {
    fn outer(&self) -> Result<OuterSettings> {
        let Self { sync_every, warmup_steps, outer: OuterSgd { lr, momentum, nesterov }, .. } =
            *self;
        let refuse = |key: &str, value: f64, expected: &str| {
            Err(Error::Config(format!("`trainer.strategy.{key}` = {value}: expected {expected}")))
        };
        if sync_every == 0 {
            return refuse("sync_every", 0.0, "at least 1 step");
        }
        if !(lr.is_finite() && lr > 0.0) {
            return refuse("outer.lr", lr, "a number greater than 0");
        }
        if !(0.0..1.0).contains(&momentum) {
            return refuse("outer.momentum", momentum, "a number from 0 on and less than 1");
        }
        Ok(OuterSettings { sync_every, warmup_steps, lr, momentum, nesterov })
    }
}

#[typetag::serde(name = "diloco")]
impl StrategyConfig for Diloco {
    fn build(&self, context: &BuildContext) -> Result<Box<dyn Strategy>> {
        let outer = self.outer()?;
        let (replicas, shards) = (self.data_parallel_replicate_size, self.data_parallel_shard_size);
        let sizes = [replicas, Some(shards), Some(1), Some(1)];
        // Sizes that do not fit are an error before any rank is started.
        if context.world_size > 0 {
            let [replicate, shard, cp, tp] = sizes;
            DeviceMesh::layout_for(context.world_size, replicate, shard, cp, tp)?;
        }
        self.mixed_precision.check()?;
        Ok(Box::new(MeshStrategy::new(Settings {
            outer: Some(outer),
            reshard_after_forward: self.reshard_after_forward,
            mixed_precision: self.mixed_precision.clone(),
            prefetch: self.prefetch,
            allow_root_only: self.allow_root_only,
            ..Settings::new("diloco", sizes, Sharding::WhereUseful)
        })))
    }
}

fulgurite_config::register_strategy!(
    "diloco",
    Diloco,
    "replicas train on their own; every few steps an outer optimizer brings them together",
    "{ type = \"diloco\", sync_every = 64, outer = { lr = 0.7, momentum = 0.9, nesterov = true } }"
);
