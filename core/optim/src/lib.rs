//! Optimizers, parameter groups, learning-rate schedules, gradient norms, and averages of weights.
//!
//! Optimizers work on this rank's shards. A configuration ([`AdamW`], [`Muon`], a plugin's) builds
//! an [`Optimizer`] for a list of parameters. [`Muon`] and [`Adafactor`] need whole tensors: they
//! communicate over the [`UpdateRanks`] that they are given. State is keyed by FQN, sharded as
//! the parameters are, and allocated at the first step. Its dtype is f32 (f64 for f64 parameters)
//! or bf16 ([`StateDtype`]). Schedules are pure functions of the step.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fulgurite_core::module::{ModuleBuilder, ModuleInit};
//! use fulgurite_core::optim::{AdamW, GradScale, OptimizerConfig};
//! use fulgurite_core::parameter::{Init, LocalShard};
//! use fulgurite_core::shard::Region;
//!
//! let b = ModuleBuilder::new(ModuleInit::default());
//! b.pp("up").parameter("weight", [2, 2], Init::ONES)?;
//! b.pp("norm").parameter("weight", [2], Init::ONES)?;
//! let mut tree = b.finish()?;
//! // A strategy sets values and gradients.
//! for slot in tree.slots() {
//!     let values = Tensor::ones(slot.elem_count(), slot.dtype(), &Device::Cpu)?;
//!     slot.set_local_grad(Some(values.copy()?));
//!     slot.set_local(LocalShard { values, region: Region::full(slot.global_shape()) });
//! }
//!
//! let config = AdamW { lr: 0.1, no_decay: vec!["*norm*".into()], ..AdamW::default() };
//! let mut optimizer = config.build(tree.parameters())?;
//! optimizer.step(&GradScale::default())?;
//! assert!((tree.parameters()[1].local()?.values.to_vec1::<f32>()?[0] - 0.9).abs() < 1e-6);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests read tensors"))]

mod adafactor;
mod adagrad;
mod adam;
mod adamw;
mod by_epoch;
mod cycles;
mod elementwise;
mod elementwise_optimizer;
mod exact_sums;
mod factored;
#[cfg(feature = "cuda")]
mod gpu;
mod grad_norm;
mod groups;
mod lion;
mod loss_scale;
mod matrix_owners;
mod muon;
mod muon_rules;
mod optimizer;
mod orthogonalize;
#[cfg(test)]
mod peers;
mod rmsprop;
#[cfg(test)]
mod rules;
mod schedule;
mod schedule_free;
mod sgd;
mod state;
mod state_dtype;
mod step_scale;
#[cfg(test)]
mod testing;
mod update_ranks;
mod weight_average;

pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::AdamW;
pub use by_epoch::ByEpoch;
pub use cycles::{
    CosineWarmRestarts, Exponential, OneCycle, Polynomial, Sequential, WarmupStableDecay,
};
pub use grad_norm::{SquaredNorm, clip_factor};
pub use groups::{ParamGroup, ParamGroupConfig};
pub use lion::Lion;
pub use loss_scale::LossScale;
pub use muon::{AdjustLr, Muon, MuonAdamW};
pub use optimizer::{Interval, Optimizer, OptimizerConfig, SchedulerConfig, StateTensor};
pub use rmsprop::RmsProp;
pub use schedule::{Constant, Cosine, Linear, Step};
pub use schedule_free::ScheduleFreeAdamW;
pub use sgd::Sgd;
pub use state_dtype::StateDtype;
pub use step_scale::{GradScale, StepScale};
pub use update_ranks::UpdateRanks;
pub use weight_average::WeightAverage;

pub use fulgurite_error::{Error, Result};
