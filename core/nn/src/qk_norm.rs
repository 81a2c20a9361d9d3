//! Norms of queries and keys within attention.

/// RMS norms of queries and keys before the rotation, the layers `q_norm` and `k_norm` of an
/// attention block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNorm {
    /// Added to the mean square.
    pub eps: f64,
    /// The elements that are normalised together.
    pub scope: QkNormScope,
    /// Whether the factor of an element is `1 + weight`, with initial weights of 0, as in Gemma 3.
    /// Otherwise it is `weight`, initially 1.
    pub unit_offset: bool,
}

/// The elements that a [`QkNorm`] normalises together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNormScope {
    /// Each head, with one weight of `head_dim` elements for all heads: Qwen3, Gemma 3.
    Head,
    /// All heads of a token, with a weight for each element of the projection: OLMo 2.
    Projection,
}
