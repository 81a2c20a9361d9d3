//! The strategy `diloco`: replicas train independently, and an outer optimizer synchronises them at
//! intervals.

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::strategy::{BuildContext, Strategy, StrategyConfig};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::ReshardAfterForward;
use crate::mesh_strategy::{MeshStrategy, OuterSettings, Settings, Sharding};
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::schedule::fsdp::Prefetch;

/// `strategy = "diloco"` (Douillard et al., 2023: DiLoCo, Distributed Low-Communication Training of
/// Language Models).
///
/// Each replica trains with the run's optimizer on its own data only. Every `sync_every` steps, the
/// parameters' change since the last synchronisation is averaged over replicas. This average is the
/// gradient of an outer SGD with momentum; all replicas continue from its result. With
/// `outer = { lr = 1.0, momentum = 0.0 }` parameters are averaged: local SGD, like PyTorch's
/// `PostLocalSGDOptimizer` with `warmup_steps`.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Diloco {
    /// Optimizer steps between synchronisations of the replicas; by default 500, as in the paper.
    #[default(500)]
    pub sync_every: u64,
    /// Steps at the start of training in which gradients are summed over replicas, as in `ddp`.
    pub warmup_steps: u64,
    /// The outer optimizer: `lr`, `momentum` and `nesterov`.
    pub outer: OuterSgd,
    /// Number of ranks that a replica is sharded over, as in `fsdp`; by default 1.
    #[default(1)]
    pub data_parallel_shard_size: usize,
    /// Number of replicas; by default the ranks divided by the shard size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_replicate_size: Option<usize>,
    /// Whether a unit's parameters are freed between its forward and its backward, if replicas are
    /// sharded: `true` (same as `"auto"`), `false`, `"all_but_last"`, or the number of ranks over
    /// which parts are kept.
    #[default(ReshardAfterForward::Auto)]
    pub reshard_after_forward: ReshardAfterForward,
    /// dtypes to gather, compute and reduce in.
    pub mixed_precision: MixedPrecisionPolicy,
    /// Number of units whose parameters are gathered ahead of the computing unit, or a table of
    /// `forward` and `backward`.
    pub prefetch: Prefetch,
    /// Allows a model in which no unit is gathered on its own.
    pub allow_root_only: bool,
}

/// The outer optimizer of [`Diloco`]: SGD, as in PyTorch. Its state is in f32 (f64 for parameters
/// in f64), sharded like the parameters. Defaults are the paper's.
#[derive(
    Debug, Clone, Copy, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct OuterSgd {
    /// Learning rate.
    #[default(0.7)]
    pub lr: f64,
    /// Momentum, from 0 up to but not including 1.
    #[default(0.9)]
    pub momentum: f64,
    /// Whether momentum is Nesterov's. Has no effect without momentum.
    #[default(true)]
    pub nesterov: bool,
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
        // Reports wrong sizes before any rank is started.
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
