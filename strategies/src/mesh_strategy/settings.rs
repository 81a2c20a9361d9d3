//! What a configuration decides.

use fulgurite_core::strategy::ParallelizeFn;

use crate::accumulation::AccumulationSync;
use crate::mixed_precision::MixedPrecisionPolicy;

/// Whether parameters are sharded over the `dp_shard_cp` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharding {
    /// Also where that is one rank.
    Always,
    /// Where it is more than one rank, or where dtypes differ: the sharded runtime casts.
    WhereUseful,
    /// No: every rank holds whole parameters.
    Never,
}

/// What the configurations of this crate come down to.
pub(crate) struct Settings {
    /// The name that the strategy was chosen by.
    pub(crate) name: &'static str,
    /// Sizes of `data_parallel_replicate`, `data_parallel_shard`, `context_parallel` and
    /// `tensor_parallel`; those left open follow from the world size.
    pub(crate) sizes: [Option<usize>; 4],
    pub(crate) sharding: Sharding,
    /// Whether a unit's parameters are freed between forward and backward.
    pub(crate) reshard_after_forward: bool,
    pub(crate) mixed_precision: MixedPrecisionPolicy,
    /// How many units ahead are gathered.
    pub(crate) prefetch: usize,
    /// Patterns of the units that are gathered on their own; none: all units.
    pub(crate) shard_conditions: Vec<String>,
    pub(crate) allow_root_only: bool,
    pub(crate) accumulation_sync: AccumulationSync,
    /// Whether the trainer's checkpoints are distributed.
    pub(crate) save_distributed_checkpoint: bool,
    /// Bytes of the first gradient bucket, and of the others.
    pub(crate) bucket_bytes: [usize; 2],
    pub(crate) parallelize: Option<Box<dyn ParallelizeFn>>,
    /// The same where nothing was said and there is tensor parallelism.
    pub(crate) default_parallelize: Option<Box<dyn ParallelizeFn>>,
}

impl Settings {
    /// The defaults of every option, for `sizes`.
    pub(crate) fn new(name: &'static str, sizes: [Option<usize>; 4], sharding: Sharding) -> Self {
        Self {
            name,
            sizes,
            sharding,
            reshard_after_forward: true,
            mixed_precision: MixedPrecisionPolicy::default(),
            prefetch: 1,
            shard_conditions: Vec::new(),
            allow_root_only: false,
            accumulation_sync: AccumulationSync::default(),
            save_distributed_checkpoint: true,
            bucket_bytes: [1 << 20, 25 << 20],
            parallelize: None,
            default_parallelize: None,
        }
    }
}
