//! The configuration of quantised weights.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_config::ConfigType;
use fulgurite_engine::module::Quantization;
use fulgurite_engine::quantization::WeightFormat;

fulgurite_config::config_struct! {
    /// Frozen weights of linear layers that are held in fewer bits, beside which adapters are trained (QLoRA): the
    /// table `[trainer.quantization]`. Weights that are trained, embeddings and shared weights are never quantised.
    /// Layers are chosen by patterns.
    #[derive(Debug, Clone, PartialEq)]
    pub struct QuantizationConfig {
        /// `"nf4"`: four bits, with double quantisation, as QLoRA and bitsandbytes do it. `"int8"`: eight bits,
        /// relative to the largest of the row.
        pub format: FormatName = FormatName::Nf4,
        /// Elements that share a scale in `"nf4"`, an even number that divides the inputs of every layer; 64 if it
        /// is left out.
        pub block_size: Option<usize> = None,
        /// The layers that are quantised, such as `["*_proj"]`: without it every linear layer.
        pub targets: Vec<String> = Vec::new(),
        /// Layers that are not quantised all the same.
        pub exclude: Vec<String> = vec!["lm_head".to_owned()],
    }
}

/// How weights are held: `trainer.quantization.format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormatName {
    /// In four bits.
    #[default]
    Nf4,
    /// In eight bits.
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
    /// What a model is built with.
    ///
    /// # Errors
    /// [`Error::Config`], naming the key, for a block size that cannot be and an empty pattern.
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
