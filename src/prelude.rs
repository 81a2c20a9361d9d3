//! The usual imports of a training program: `use fulgurite::prelude::*;`.
//!
//! It can be combined with candle's trait `Module`, however that is imported:
//!
//! ```
//! mod by_name {
//!     use candle_core::Module; // from here on `Module` is candle's
//!     use fulgurite::prelude::*;
//!
//!     pub fn both(ours: &Linear, theirs: &candle_nn::Linear, x: &Tensor) -> Result<Tensor> {
//!         ours.forward(&theirs.forward(x)?)
//!     }
//! }
//!
//! mod for_its_method {
//!     use candle_nn::Module as _;
//!     use fulgurite::prelude::*;
//!
//!     pub struct Block(candle_nn::Linear, Unit<Linear>);
//!
//!     impl Module for Block {
//!         fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!             self.1.forward(&self.0.forward(x)?)
//!         }
//!     }
//! }
//!
//! mod with_all {
//!     use candle_nn::*;
//!     use fulgurite::prelude::*;
//!
//!     pub fn both(ours: &GeluMlp, theirs: &PReLU, x: &Tensor) -> Result<Tensor> {
//!         ours.forward(&theirs.forward(x)?)
//!     }
//! }
//! # fn main() {}
//! ```

pub use candle_core::{DType, Device, Tensor};
pub use fulgurite_config_derive::DocumentedForPrograms as Documented;
pub use fulgurite_core::autograd::no_grad;
pub use fulgurite_core::data::{DataContext, DataModule, Samples, Split, TokenBatch};
pub use fulgurite_core::fabric::{Fabric, FabricOptimizer};
pub use fulgurite_core::files;
pub use fulgurite_core::mesh::DeviceMesh;
pub use fulgurite_core::metric::{Accuracy, Metric, Perplexity};
pub use fulgurite_core::module::{
    Activations, CandleModule, ForwardScope, FullyShard, Module, ModuleBuilder, ModuleTree, Unit,
};
// Also without a name: a program may import candle's trait under this name.
pub use fulgurite_core::module::Module as _;
pub use fulgurite_core::nn::{
    AdaptiveAvgPool2d, AdaptiveMaxPool2d, AttentionConfig, AvgPool2d, AvgPool2dConfig, BatchNorm,
    BatchNormConfig, CausalSelfAttention, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, CrossEntropy,
    Dropout, Embedding, GeluMlp, GroupNorm, Gru, LayerNorm, Linear, Loss, Lstm, LstmState,
    MaxPool2d, MaxPool2dConfig, MultiHeadAttention, MultiHeadAttentionConfig, QkNorm, QkNormScope,
    RecurrentConfig, RmsNorm, Rope, RopeConfig, RopeScaling, SwiGluMlp, cross_entropy,
    linear_cross_entropy, linear_predicted_classes, predicted_classes, residual,
};
pub use fulgurite_core::optim::{AdamW, Sgd};
pub use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
pub use fulgurite_core::parameter::{Buffer, BufferOptions, Init, Parameter};
pub use fulgurite_core::plan;
pub use fulgurite_core::random::{Purpose, Stream};
pub use fulgurite_core::strategy::{ParallelizeFn, Strategy, StrategyConfig};
pub use fulgurite_core::trainer::{
    Callback, HookContext, Hooks, LightningModule, LogOptions, Reduce, RunPurpose, StepContext,
    Trainer,
};
pub use fulgurite_core::{Error, Result};
pub use fulgurite_data::TextData;
