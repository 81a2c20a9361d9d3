//! Callbacks that a configuration can name.
//!
//! ```
//! use fulgurite_callbacks as _; // links the callbacks, so that they can be named
//! use fulgurite_core::config::PluginValue;
//! use fulgurite_core::registry::kind;
//! use fulgurite_core::trainer::CallbackConfig;
//!
//! let value: PluginValue =
//!     serde_json::from_str(r#"{ "type": "early_stopping", "monitor": "val_loss" }"#).unwrap();
//! let config: Box<dyn CallbackConfig> = value.build(kind::CALLBACK, "trainer.callbacks[0]")?;
//! let callback = config.build()?;
//! assert!(callback.decides_by_metrics());
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! In a configuration file:
//!
//! ```toml
//! [trainer]
//! callbacks = [
//!     { type = "early_stopping", monitor = "val_loss", patience = 3 },
//!     { type = "model_checkpoint", monitor = "val_loss", filename = "best-{step}-{val_loss:.3}" },
//!     { type = "throughput_monitor", peak_tflops = 312.0 },
//! ]
//! ```

mod accumulation;
mod device_stats;
mod early_stopping;
mod file_name;
mod gradient_norms;
mod learning_rate_finder;
mod model_checkpoint;
mod model_summary;
mod on_exception_checkpoint;
mod plateau;
mod stochastic_weight_averaging;
mod throughput;

pub use accumulation::GradientAccumulationScheduler;
pub use device_stats::DeviceStatsMonitorConfig;
pub use early_stopping::{EarlyStopping, EarlyStoppingConfig};
pub use file_name::Template;
pub use gradient_norms::GradientNormsConfig;
pub use learning_rate_finder::{LearningRateFinder, LearningRateFinderConfig, SweepMode};
pub use model_checkpoint::{ModelCheckpoint, ModelCheckpointConfig};
pub use model_summary::ModelSummaryConfig;
pub use on_exception_checkpoint::OnExceptionCheckpointConfig;
pub use plateau::ReduceLrOnPlateauConfig;
pub use stochastic_weight_averaging::{AnnealingStrategy, StochasticWeightAveragingConfig};
pub use throughput::ThroughputMonitorConfig;
