//! Layers of several projections that compute as one operation.

/// The projections of an attention or MLP block.
pub(super) struct Block {
    /// Those of the input.
    pub(super) inputs: &'static [&'static str],
    /// The one to the output.
    pub(super) output: &'static str,
}

impl Block {
    /// The block that a layer of this kind is, if it is one.
    pub(super) fn of(kind: &str) -> Option<Self> {
        Some(match kind {
            "CausalSelfAttention" => {
                Self { inputs: &["q_proj", "k_proj", "v_proj"], output: "o_proj" }
            }
            "SwiGluMlp" => Self { inputs: &["gate_proj", "up_proj"], output: "down_proj" },
            "GeluMlp" => Self { inputs: &["up_proj"], output: "down_proj" },
            _ => return None,
        })
    }

    /// All projections.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.inputs.iter().copied().chain([self.output])
    }
}
