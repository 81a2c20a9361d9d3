//! Layout of a tensor along one mesh dimension.

use serde::{Deserialize, Serialize};

/// Layout of a tensor over the ranks of a mesh dimension, as PyTorch's DTensor placements, or over
/// the stages of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Tensor dimension `d` is cut into one contiguous chunk a rank, as by `torch.chunk`: chunks
    /// have `ceil(n / ranks)` entries, the last ones fewer or zero.
    Shard(usize),
    /// Every rank holds the whole tensor.
    Replicate,
    /// The ranks at these two coordinates, which may be one, hold the whole tensor. The others hold
    /// nothing. The first owns it.
    Stages(usize, usize),
}
