//! Batches of token sequences.

use candle_core::Tensor;

/// Token sequences and what follows each token of them: what a language model trains on.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    /// Token ids, u32, of shape (samples, sequence length).
    pub inputs: Tensor,
    /// The id that follows each input, i64 (so that an ignored target can be negative), of the same
    /// shape.
    pub targets: Tensor,
}

impl TokenBatch {
    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.inputs.dims().first().copied().unwrap_or(0)
    }

    /// Number of input tokens.
    pub fn tokens(&self) -> usize {
        self.inputs.elem_count()
    }
}
