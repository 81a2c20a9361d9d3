//! What micro-batches before the last of a step communicate.

use serde::{Deserialize, Serialize};

/// What the backward of a micro-batch communicates under
/// [`no_backward_sync`](fulgurite_core::strategy::Strategy::no_backward_sync), that is for all
/// micro-batches of a step but the last. Results differ in rounding only.
///
/// For `P` bytes of gradients, `N` ranks that shard parameters and `R` replicas:
///
/// | | memory between micro-batches | sent in each micro-batch but the last |
/// |---|---|---|
/// | `"none"` | `P`: unsharded gradients | nothing |
/// | `"reduce_scatter"` | `P / N` | `P (N - 1) / N`, within the shard group |
/// | `"all"` | `P / N` | the same and `2 P / N (R - 1) / R`, over the replicas |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccumulationSync {
    /// Nothing: least traffic, most memory.
    #[default]
    None,
    /// Gradients are reduce-scattered in the shard group; replicas wait for the last micro-batch.
    ReduceScatter,
    /// Everything, as if each micro-batch were the last.
    All,
}
