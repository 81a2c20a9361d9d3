//! What a training program usually imports: `use fulgurite::prelude::*;`.

pub use candle_core::{DType, Device, Tensor};
pub use fulgurite_core::autograd::no_grad;
pub use fulgurite_core::data::{DataContext, DataModule, Split, TokenBatch};
pub use fulgurite_core::fabric::{Fabric, FabricOptimizer};
pub use fulgurite_core::mesh::DeviceMesh;
pub use fulgurite_core::module::{
    ForwardScope, FullyShard, Module, ModuleBuilder, ModuleTree, Unit,
};
pub use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, CrossEntropy, Dropout, Embedding, GeluMlp, LayerNorm,
    Linear, Loss, RmsNorm, Rope, SwiGluMlp, cross_entropy, linear_cross_entropy, residual,
};
pub use fulgurite_core::optim::{AdamW, Sgd};
pub use fulgurite_core::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, PrepareModuleOutput, Rowwise,
    SequenceParallel,
};
pub use fulgurite_core::parameter::{Init, Parameter};
pub use fulgurite_core::plan;
pub use fulgurite_core::random::{Purpose, Stream};
pub use fulgurite_core::strategy::{ParallelizeFn, Strategy, StrategyConfig};
pub use fulgurite_core::trainer::{Callback, HookContext, LightningModule, StepContext, Trainer};
pub use fulgurite_core::{Error, Result};
pub use fulgurite_data::TextData;
