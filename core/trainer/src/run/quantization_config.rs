//! The configuration of quantised weights.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_config::ConfigType;
use fulgurite_engine::module::Quantization;
use fulgurite_engine::quantization::WeightFormat;

/// Frozen weights of linear layers in fewer bits, beside which adapters are trained (QLoRA):
/// the table `[trainer.quantization]`. Trained weights, embeddings and shared weights are never
/// quantised. Layers are chosen by patterns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct QuantizationConfig {
    /// `"nf4"`: four bits, with double quantisation, as in QLoRA and bitsandbytes. `"int8"`:
    /// eight bits, relative to the largest value of the row.
    #[default(FormatName::Nf4)]
    pub format: FormatName,
    /// Number of elements that share a scale in `"nf4"`; by default 64. Must be even and divide
    /// the inputs of every layer.
    pub block_size: Option<usize>,
    /// The layers that are quantised, such as `["*_proj"]`; by default every linear layer.
    pub targets: Vec<String>,
    /// Layers that are not quantised, even if `targets` matches them.
    #[default(vec!["lm_head".to_owned()])]
    pub exclude: Vec<String>,
}

/// The format of quantised weights: `trainer.quantization.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormatName {
    /// Four bits.
    #[default]
    Nf4,
    /// Eight bits.
    Int8,
}

impl ConfigType for FormatName {
    fn describe() -> String {
        "`\"nf4\"` or `\"int8\"`".to_owned()
    }
}

impl ConfigType for QuantizationConfig {
    fn describe() -> String {
        "table".to_owned()
    }
}

impl QuantizationConfig {
    /// Returns the quantisation to build a model with.
    ///
    /// # Errors
    /// [`Error::Config`] that names the key, for a wrong block size or an empty pattern.
    pub fn quantization(&self) -> Result<Quantization> {
        let format = match (self.format, self.block_size) {
            (FormatName::Nf4, block_size) => {
                WeightFormat::Nf4 { block_size: block_size.unwrap_or(64) }
            }
            (FormatName::Int8, None) => WeightFormat::Int8,
            (FormatName::Int8, Some(_)) => {
                return Err(Error::Config(
                    "`trainer.quantization.block_size` is for format = \"nf4\"; \"int8\" has a scale a row"
                        .to_owned(),
                ));
            }
        };
        let (targets, exclude) = (self.targets.clone(), self.exclude.clone());
        let quantization = Quantization { format, targets, exclude };
        quantization.validate()?;
        Ok(quantization)
    }
}
