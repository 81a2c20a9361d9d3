//! How one mesh dimension lays out a tensor.

use serde::{Deserialize, Serialize};

/// How the ranks along one mesh dimension hold a tensor (as PyTorch's DTensor placements).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Tensor dimension `d` is cut into one contiguous chunk a rank, as `torch.chunk`: all chunks
    /// have `ceil(n / ranks)` entries, the last ones fewer or none.
    Shard(usize),
    /// Every rank holds the whole.
    Replicate,
}
