//! Optimizers, parameter groups, schedulers.

mod optimizer;

pub use optimizer::{GradScale, Optimizer, OptimizerConfig, SchedulerConfig, StateTensor};
