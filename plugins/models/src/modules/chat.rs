//! Learning to answer in conversations.

use std::path::PathBuf;

use candle_core::Tensor;
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::ChatData;
use fulgurite_engine::data::TokenBatch;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::Result;
use fulgurite_nn::Loss;
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};

use super::causal_lm::{CausalLm, fit_to_tokens};
use crate::config::ModelConfig;
use crate::decoder::Decoder;

/// A decoder that learns to answer, on [`ChatData`]: supervised fine-tuning.
///
/// The loss is the mean over the tokens of answers. Validation logs `val_accuracy` and
/// `val_perplexity` of these tokens.
#[derive(Debug)]
pub struct Chat(CausalLm);

impl Chat {
    /// The decoder.
    pub fn model(&self) -> &Decoder {
        self.0.model()
    }
}

impl LightningModule for Chat {
    type Config = ModelConfig;
    type Data = ChatData;

    fn module_type() -> Option<&'static str> {
        Some("chat")
    }

    fn pretrained_key() -> Option<&'static str> {
        CausalLm::pretrained_key()
    }

    fn configure_from_data(config: &mut ModelConfig, data: &ChatData) -> Result<()> {
        let ids = data.tokenizer().vocab_size();
        fit_to_tokens(config, &[], data.seq_len(), (Some(ids), ids))
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        config.clone().decoder()?.check_unbalanced()?;
        CausalLm::configure_model(config, b).map(Self)
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        CausalLm::pretrained(config)
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        CausalLm::map_weights(config, source)
    }

    fn training_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        self.0.training_step(batch, ctx)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        self.0.validation_step(batch, ctx)
    }

    /// Returns the most likely next token at each position.
    fn predict_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Tensor> {
        self.0.predict_step(batch, ctx)
    }
}

impl<D> Hooks<D> for Chat {}
