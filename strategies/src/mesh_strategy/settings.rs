//! The settings of the mesh strategy.

use fulgurite_engine::strategy::ParallelizeFn;
use serde::{Deserialize, Serialize};

use super::outer::OuterSettings;
use super::pipeline::PipelineSettings;
use super::reduction::GradientSettings;
use crate::fsdp::ReshardAfterForward;
use crate::mixed_precision::MixedPrecisionPolicy;
use crate::schedule::fsdp::{Prefetch, ReduceScope};

/// Communication of a micro-batch's backward under `Fabric::no_backward_sync`.
///
/// This concerns all micro-batches of a step except the last. Results differ in rounding only.
///
/// For `P` bytes of gradients, `N` ranks that shard parameters and `R` replicas:
///
/// | | memory between micro-batches | sent per micro-batch before the last |
/// |---|---|---|
/// | `"none"` | `P`: unsharded gradients | nothing |
/// | `"reduce_scatter"` | `P / N` | `P (N - 1) / N`, within the shard group |
/// | `"all"` | `P / N` | like `"reduce_scatter"`, and `2 P / N (R - 1) / R` over the replicas |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccumulationSync {
    /// Nothing: least traffic, most memory.
    #[default]
    None,
    /// Gradients are reduce-scattered in the shard group; replicas wait for the last micro-batch.
    ReduceScatter,
    /// Everything, as for the last micro-batch.
    All,
}

impl AccumulationSync {
    /// The ranks over which a backward reduces gradients.
    pub(super) fn scope(self, synchronise: bool) -> ReduceScope {
        match self {
            _ if synchronise => ReduceScope::All,
            Self::None => ReduceScope::None,
            Self::ReduceScatter => ReduceScope::Shards,
            Self::All => ReduceScope::All,
        }
    }
}

/// Whether parameters are sharded over the `dp_shard_cp` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharding {
    /// Always, even over one rank.
    Always,
    /// Over more than one rank, or with mixed dtypes, because only the sharded runtime casts.
    WhereUseful,
    /// Never: every rank holds whole parameters.
    Never,
}

/// The common settings that each configuration becomes.
pub(crate) struct Settings {
    /// The strategy's configured name.
    pub(crate) name: &'static str,
    /// Sizes of `data_parallel_replicate`, `data_parallel_shard`, `context_parallel` and
    /// `tensor_parallel`; `None` sizes follow from the world size.
    pub(crate) sizes: [Option<usize>; 4],
    /// The pipeline; `None` if every rank computes the whole model.
    pub(crate) pipeline: Option<PipelineSettings>,
    /// Number of neighbours among the ranks that share parameters. They have all experts together.
    pub(crate) expert_parallel_size: usize,
    /// Whether `device_mesh` refuses several ranks and recommends other strategies.
    pub(crate) one_rank_only: bool,
    pub(crate) sharding: Sharding,
    /// Treatment of units' parameters between forward and backward.
    pub(crate) reshard_after_forward: ReshardAfterForward,
    pub(crate) mixed_precision: MixedPrecisionPolicy,
    /// Number of units gathered ahead.
    pub(crate) prefetch: Prefetch,
    /// Patterns of units that are gathered on their own; empty: all units.
    pub(crate) shard_conditions: Vec<String>,
    pub(crate) allow_root_only: bool,
    /// Whether shards, gradients and optimizer state are in the host's memory between steps.
    pub(crate) cpu_offload: bool,
    pub(crate) accumulation_sync: AccumulationSync,
    /// Whether the trainer saves distributed checkpoints.
    pub(crate) save_distributed_checkpoint: bool,
    /// Patterns of parameters excluded from data parallelism.
    pub(crate) ignored: Vec<String>,
    /// Bytes of the first gradient bucket, and of the others.
    pub(crate) bucket_bytes: [usize; 2],
    /// Compression and predivision of gradients.
    pub(crate) gradients: GradientSettings,
    /// The synchronisation of independent replicas; `None` if they train as one.
    pub(crate) outer: Option<OuterSettings>,
    pub(crate) parallelize: Option<Box<dyn ParallelizeFn>>,
    /// Used under tensor parallelism if `parallelize` is `None`.
    pub(crate) default_parallelize: Option<Box<dyn ParallelizeFn>>,
}

impl Settings {
    /// Whether there may be several ranks: not if every dimension has size 1.
    pub(crate) fn communicates(&self) -> bool {
        self.sizes != [Some(1); 4] || self.pipeline.is_some()
    }

    /// The defaults of every option, for `sizes`.
    pub(crate) fn new(name: &'static str, sizes: [Option<usize>; 4], sharding: Sharding) -> Self {
        Self {
            name,
            sizes,
            pipeline: None,
            expert_parallel_size: 1,
            one_rank_only: false,
            sharding,
            reshard_after_forward: ReshardAfterForward::Auto,
            mixed_precision: MixedPrecisionPolicy::default(),
            prefetch: Prefetch::default(),
            shard_conditions: Vec::new(),
            allow_root_only: false,
            cpu_offload: false,
            accumulation_sync: AccumulationSync::default(),
            save_distributed_checkpoint: true,
            ignored: Vec::new(),
            bucket_bytes: [1 << 20, 25 << 20],
            gradients: GradientSettings::default(),
            outer: None,
            parallelize: None,
            default_parallelize: None,
        }
    }
}
