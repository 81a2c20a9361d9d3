//! Layers with hand-written gradients.
//!
//! A layer computes outside the graph and enters it as one operation. It holds its parameters by
//! handle: their memory may be released after forward and return for backward, and their gradients
//! are written directly into the strategy's buffers. On the CPU, layers use hand-written kernels;
//! on every other device, tensor operations. bf16 and f16 are computed in f32 on the CPU and
//! rounded at the edge of each operation. Linear layers in bf16 use the bf16 instructions of some
//! CPUs ([`bf16_products`]).
//!
//! ```
//! use candle_core::Tensor;
//! use fulgurite_core::Result;
//! use fulgurite_core::module::{Module, ModuleBuilder, ModuleInit};
//! use fulgurite_core::nn::{Linear, RmsNorm, functional};
//!
//! struct Block { norm: RmsNorm, up: Linear, down: Linear }
//!
//! impl Block {
//!     fn new(b: &ModuleBuilder, dim: usize) -> Result<Self> {
//!         Ok(Self {
//!             norm: RmsNorm::new(&b.pp("norm"), dim, 1e-6)?,
//!             up: Linear::new(&b.pp("up"), dim, 4 * dim)?,
//!             down: Linear::new(&b.pp("down"), 4 * dim, dim)?,
//!         })
//!     }
//! }
//!
//! impl Module for Block {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         let hidden = self.up.forward(&self.norm.forward(x)?)?;
//!         Ok((x + self.down.forward(&functional::gelu(&hidden)?)?)?)
//!     }
//! }
//!
//! let b = ModuleBuilder::new(ModuleInit::default());
//! let block = Block::new(&b.pp("block"), 64)?;
//! assert_eq!(b.finish()?.elem_count(), 64 + 2 * 4 * 64 * 64);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

mod adapter;
mod attention;
mod backend;
mod batch_norm;
mod conv;
mod cross_entropy;
mod documents;
mod dora;
mod dropout;
mod embedding;
mod experts;
mod experts_balance;
mod experts_capacity;
mod experts_config;
mod experts_exchange;
mod experts_load;
mod experts_lora;
mod experts_mixed;
mod experts_router;
mod experts_shared;
pub mod functional;
pub mod gemm;
mod gemm_bf16;
mod gradients;
mod group_norm;
mod host;
mod input;
mod kernels;
mod kv_cache;
mod latent_attention;
#[doc(hidden)]
pub mod layer_table;
mod linear;
mod linear_cross_entropy;
mod lookup;
mod lora;
mod mlp;
mod multi_head_attention;
mod norm;
mod parallel_for;
mod pooling;
mod predicted_classes;
mod product;
mod qk_norm;
mod recurrent;
mod relative_position_bias;
mod residual;
mod rope;
mod rope_scaling;
mod sizes;
mod styles;
mod weight;

pub use attention::{AttentionConfig, CausalSelfAttention};
pub use backend::force_portable;
pub use batch_norm::{BatchNorm, BatchNormConfig};
pub use conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
pub use cross_entropy::{CrossEntropy, Reduction, cross_entropy, log_probability};
pub use documents::Documents;
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use experts::MixtureOfExperts;
pub use experts_balance::{RouterSums, load_balancing_loss};
pub use experts_config::{
    CorrectionBias, ExpertActivation, MixtureOfExpertsConfig, RouterConfig, RouterScore,
    SharedExpertConfig,
};
pub use experts_load::ExpertLoad;
pub use fulgurite_engine::strategy::Loss;
pub use fulgurite_engine::{Error, Result};
pub use gemm_bf16::bf16_products;
pub use group_norm::GroupNorm;
pub use kernels::activation::Activation;
pub use kernels::clamped::ClampedSwiGlu;
pub use kernels::routing::ExpertGroups;
pub use kv_cache::{CachedTokens, KvCache, RowTokens};
pub use latent_attention::{LatentAttention, LatentAttentionConfig};
pub use linear::Linear;
pub use linear_cross_entropy::{LinearCrossEntropy, linear_cross_entropy};
pub use mlp::{GatedMlp, GeluMlp, Mlp, MlpConfig, SwiGluMlp};
pub use multi_head_attention::{KeysValues, MultiHeadAttention, MultiHeadAttentionConfig};
pub use norm::{LayerNorm, RmsNorm};
pub use pooling::{
    AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig,
};
pub use predicted_classes::{linear_predicted_classes, predicted_classes};
pub use qk_norm::{QkNorm, QkNormScope};
pub use recurrent::{Gru, Lstm, LstmState, RecurrentConfig};
pub use relative_position_bias::{RelativePositionBias, RelativePositionBiasConfig};
pub use residual::{FusedLayer, residual};
pub use rope::{Rope, RopeConfig};
pub use rope_scaling::RopeScaling;
