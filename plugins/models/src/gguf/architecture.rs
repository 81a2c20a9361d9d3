//! The architectures of llama.cpp that compute our families of models.
//!
//! Source: `src/models/*.cpp` of llama.cpp, in the copy of llama-cpp-python 0.3.36.

use fulgurite_error::{Error, Result};
use fulgurite_nn::Activation;

/// Whether an architecture has a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    Never,
    Optional,
    Always,
}

/// The pairs of elements that a rotary embedding turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rotation {
    /// Elements 2i and 2i + 1 (`LLAMA_ROPE_TYPE_NORM`): rows of queries and keys are reordered.
    Neighbours,
    /// Elements i and i + rotary_dim / 2, as in our models.
    Halves,
    /// There is none.
    None,
}

/// The layers whose attention has a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// None, so a model with windows is limited to sequences that fit one.
    None,
    /// A list in the file; without it all but every n-th layer.
    AllBut(usize),
}

/// The number that attention scores are divided by the root of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scores {
    /// The width of a head.
    HeadDim,
    /// The same, except for models of so many layers: their hidden size / number of heads.
    HeadDimExcept(usize),
}

/// The output matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// Left out if it is the embedding's.
    Optional,
    /// Written even if it is the embedding's.
    Always,
    /// Always the embedding's.
    Tied,
}

/// Ways to change the frequencies of a rotary embedding, beside linear scaling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scaling {
    Yarn,
    /// As a tensor of divisors.
    Llama3,
    /// As two tensors of divisors.
    LongRope,
}

/// What llama.cpp computes for one of our families.
#[derive(Debug, Clone, Copy)]
pub(super) struct Architecture {
    /// `model_type` in `config.json`.
    pub(super) model_type: &'static str,
    /// `general.architecture`, and the beginning of the metadata's keys.
    pub(super) name: &'static str,
    pub(super) rotation: Rotation,
    /// Whether queries, keys and values are one tensor.
    pub(super) fuses_qkv: bool,
    /// Whether gate and up projection are one tensor.
    pub(super) fuses_gate: bool,
    pub(super) qkv_bias: Presence,
    pub(super) output_bias: Presence,
    pub(super) mlp_bias: Presence,
    pub(super) activations: &'static [Activation],
    pub(super) windows: Windows,
    pub(super) scores: Scores,
    pub(super) head: Head,
    pub(super) scalings: &'static [Scaling],
    /// Whether the width of all heads may differ from the hidden size.
    pub(super) wide_heads: bool,
    /// Whether a part of each head is rotated.
    pub(super) partial_rotary: bool,
    /// The distance of layers without a rotary embedding.
    pub(super) no_rope_every: Option<usize>,
    /// Soft limits of scores and of logits.
    pub(super) softcaps: [Presence; 2],
}

const LLAMA: Architecture = Architecture {
    model_type: "llama",
    name: "llama",
    rotation: Rotation::Neighbours,
    fuses_qkv: false,
    fuses_gate: false,
    qkv_bias: Presence::Optional,
    output_bias: Presence::Optional,
    mlp_bias: Presence::Optional,
    activations: &[Activation::Silu],
    windows: Windows::None,
    scores: Scores::HeadDim,
    head: Head::Optional,
    scalings: &[Scaling::Yarn, Scaling::Llama3, Scaling::LongRope],
    wide_heads: true,
    partial_rotary: false,
    no_rope_every: None,
    softcaps: [Presence::Never, Presence::Never],
};

const QWEN: Architecture = Architecture {
    rotation: Rotation::Halves,
    output_bias: Presence::Never,
    mlp_bias: Presence::Never,
    scalings: &[Scaling::Yarn],
    ..LLAMA
};

const GEMMA: Architecture =
    Architecture { activations: &[Activation::GeluTanh], head: Head::Tied, scalings: &[], ..QWEN };

/// All architectures, a row for each family.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    LLAMA,
    Architecture { model_type: "mistral", ..LLAMA },
    Architecture { model_type: "qwen2", name: "qwen2", wide_heads: false, ..QWEN },
    Architecture { model_type: "qwen3", name: "qwen3", ..QWEN },
    Architecture { model_type: "gemma", name: "gemma", ..GEMMA },
    Architecture {
        model_type: "gemma2",
        name: "gemma2",
        windows: Windows::AllBut(2),
        scores: Scores::HeadDimExcept(46),
        softcaps: [Presence::Always, Presence::Always],
        ..GEMMA
    },
    Architecture {
        model_type: "gemma3_text",
        name: "gemma3",
        head: Head::Optional,
        windows: Windows::AllBut(6),
        scores: Scores::HeadDimExcept(62),
        softcaps: [Presence::Never, Presence::Optional],
        ..GEMMA
    },
    Architecture {
        model_type: "gpt2",
        name: "gpt2",
        rotation: Rotation::None,
        fuses_qkv: true,
        qkv_bias: Presence::Always,
        output_bias: Presence::Always,
        mlp_bias: Presence::Always,
        activations: &[Activation::GeluTanh],
        wide_heads: false,
        scalings: &[],
        ..QWEN
    },
    Architecture {
        model_type: "phi3",
        name: "phi3",
        fuses_qkv: true,
        fuses_gate: true,
        qkv_bias: Presence::Never,
        scalings: &[Scaling::LongRope],
        wide_heads: false,
        partial_rotary: true,
        ..QWEN
    },
    Architecture {
        model_type: "olmo2",
        name: "olmo2",
        head: Head::Always,
        wide_heads: false,
        ..QWEN
    },
    Architecture {
        model_type: "smollm3",
        name: "smollm3",
        output_bias: Presence::Never,
        mlp_bias: Presence::Never,
        scalings: &[Scaling::Yarn],
        no_rope_every: Some(4),
        ..LLAMA
    },
    Architecture {
        model_type: "gpt_neox",
        name: "gptneox",
        fuses_qkv: true,
        qkv_bias: Presence::Always,
        output_bias: Presence::Always,
        mlp_bias: Presence::Always,
        // llama.cpp computes both as the approximation by tanh.
        activations: &[Activation::Gelu, Activation::GeluTanh],
        head: Head::Always,
        wide_heads: false,
        partial_rotary: true,
        ..QWEN
    },
];

impl Architecture {
    /// Returns the architecture for models of this type.
    ///
    /// # Errors
    /// If llama.cpp has no architecture for them, or none that is written here.
    pub(super) fn of(model_type: &str) -> Result<&'static Self> {
        ARCHITECTURES.iter().find(|row| row.model_type == model_type).ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|row| row.model_type).collect();
            Error::Config(format!(
                "a model of type \"{model_type}\" cannot be written as GGUF; the types that can are {}",
                known.join(", ")
            ))
        })
    }

    /// The metadata's key `key` of this architecture.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }
}
