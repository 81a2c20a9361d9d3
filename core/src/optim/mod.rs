//! Optimizers, parameter groups, schedulers.

mod grad_norm;
mod optimizer;
pub use grad_norm::local_squared_norm;

pub use optimizer::{GradScale, Optimizer, OptimizerConfig, SchedulerConfig, StateTensor};
