//! The strategy `ddp`: every rank holds the model, and gradients are all-reduced in buckets during
//! backward.

use fulgurite_config::plugin;
use fulgurite_engine::strategy::{
    BuildContext, GradientCompressionConfig, Strategy, StrategyConfig,
};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::mesh_strategy::{GradientSettings, MeshStrategy, Settings, Sharding};

/// `strategy = "ddp"`.
#[derive(Debug, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct Ddp {
    /// Size of a gradient bucket in MiB, as in PyTorch DDP.
    #[default(25.0)]
    pub bucket_cap_mb: f64,
    /// Size of the first bucket in MiB. A small one starts the reduction early.
    #[default(1.0)]
    pub first_bucket_mb: f64,
    /// Patterns of parameters excluded from data parallelism: every rank holds them whole, and
    /// their gradients are not reduced.
    pub ignored: Vec<String>,
    /// Compression of gradients when they are summed over replicas: `"bf16"`, `"fp16"`, a plugin's
    /// name, or a table with a `type`. By default gradients are not compressed.
    #[serde(deserialize_with = "plugin::deserialize_option")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_compression: Option<Box<dyn GradientCompressionConfig>>,
    /// Divisor of gradients before they are summed over ranks; the sum is multiplied by it. A power
    /// of two, so that the division does not round. By default 1, or the compression's choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradient_predivide_factor: Option<f64>,
}

#[typetag::serde(name = "ddp")]
impl StrategyConfig for Ddp {
    fn build(&self, _context: &BuildContext) -> Result<Box<dyn Strategy>> {
        let bytes = |key, mb: f64| {
            if mb.is_finite() && mb >= 0.0 {
                Ok((mb * 1024.0 * 1024.0) as usize)
            } else {
                Err(Error::Config(format!(
                    "`trainer.strategy.{key}` = {mb}: expected 0 or more MiB"
                )))
            }
        };
        let bucket_bytes = [
            bytes("first_bucket_mb", self.first_bucket_mb)?,
            bytes("bucket_cap_mb", self.bucket_cap_mb)?,
        ];
        let gradients = GradientSettings::new(
            self.gradient_compression.as_deref(),
            self.gradient_predivide_factor,
        )?;
        let settings = Settings::new("ddp", [None, Some(1), Some(1), Some(1)], Sharding::Never);
        Ok(Box::new(MeshStrategy::new(Settings {
            bucket_bytes,
            ignored: self.ignored.clone(),
            gradients,
            ..settings
        })))
    }
}

fulgurite_config::register_strategy!(
    "ddp",
    Ddp,
    "every rank holds the model; gradients are all-reduced in buckets during backward",
    "{ type = \"ddp\", bucket_cap_mb = 25.0 }"
);
