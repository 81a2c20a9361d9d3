//! Shared code for tests of several crates: models with training loops ([`training`]), a model in
//! checkpoints ([`checkpoints`]), the example's model ([`llama`], [`hugging_face`]), and a counting
//! allocator ([`allocator`]).

pub mod allocator;
pub mod checkpoints;
#[path = "../../examples/pretrain/hugging_face.rs"]
pub mod hugging_face;
#[path = "../../examples/pretrain/llama.rs"]
pub mod llama;
pub mod training;

/// Imports of the example's files.
mod prelude {
    pub(crate) use candle_core::Tensor;
    pub(crate) use fulgurite_core::checkpoint;
    pub(crate) use fulgurite_core::config::Documented;
    pub(crate) use fulgurite_core::module::{Module, ModuleBuilder, Unit};
    pub(crate) use fulgurite_core::nn::{
        AttentionConfig, CausalSelfAttention, Dropout, Embedding, Linear, Loss, RmsNorm, Rope,
        SwiGluMlp, linear_cross_entropy, linear_predicted_classes,
    };
    pub(crate) use fulgurite_core::parameter::Init;
    pub(crate) use fulgurite_core::{Error, Result};
}
