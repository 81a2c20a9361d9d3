//! Training a decoder to predict the next token.

use std::path::PathBuf;

use candle_core::Tensor;
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::TextData;
use fulgurite_engine::data::TokenBatch;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::{Error, Result};
use fulgurite_nn::Loss;
use fulgurite_trainer::metric::{Accuracy, Perplexity};
use fulgurite_trainer::trainer::{Hooks, LightningModule, StepContext};

use super::common;
use super::expert_load::log_expert_load;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::weights::MappedSource;

/// A language model that predicts the next token: any decoder of this crate on [`TextData`].
#[derive(Debug)]
pub struct CausalLm {
    model: Decoder,
}

impl CausalLm {
    /// The decoder.
    pub fn model(&self) -> &Decoder {
        &self.model
    }
}

impl LightningModule for CausalLm {
    type Config = ModelConfig;
    type Data = TextData;

    fn module_type() -> Option<&'static str> {
        Some("causal_lm")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &TextData) -> Result<()> {
        let largest = data.largest_first_id() as usize + 1;
        fit_to_tokens(config, &[], data.seq_len(), (data.vocab_size(), largest))
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let decoder = config.clone().decoder()?;
        common::name_layers::<Self>(config, b)?;
        Ok(Self { model: Decoder::new(&decoder, b)? })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        let description = config.clone().describe()?;
        Ok(Box::new(MappedSource::new(source, &description.weights)?))
    }

    fn training_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let loss = self.model.loss(&batch.inputs, &batch.targets)?;
        log_expert_load(&self.model, ctx);
        Ok(loss)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, next_tokens) = self.model.evaluate(&batch.inputs, &batch.targets)?;
        ctx.log("val_accuracy", Accuracy::of_classes(&next_tokens, &batch.targets)?);
        ctx.log("val_perplexity", Perplexity::of(&loss)?);
        Ok(loss)
    }

    /// Returns the most likely next token at each position.
    fn predict_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Tensor> {
        Ok(self.model.evaluate(&batch.inputs, &batch.targets)?.1)
    }
}

impl<D> Hooks<D> for CausalLm {}

/// Sets the vocabulary of a new model, and checks that the data's sequences and ids fit the model.
/// `keys` are those of `[model]` that the module takes itself, and
/// `ids` is the exclusive upper bound of the ids, if it is known, and one by the ids read so far.
pub(super) fn fit_to_tokens(
    config: &mut ModelConfig,
    keys: &[&str],
    seq_len: usize,
    ids: (Option<usize>, usize),
) -> Result<()> {
    config.read_file()?;
    if !config.has("vocab_size")
        && let Some(tokens) = ids.0
    {
        // Padding lets tensor-parallel ranks divide the vocabulary evenly.
        config.set("vocab_size", tokens.next_multiple_of(8))?;
    }
    let decoder = config.decoder_for(keys)?;
    config.describe_for(keys)?.warn_of_dropout();
    let wrong =
        |key: &str, message: String| Err(Error::Config(format!("`model.{key}`: {message}")));
    let positions = decoder.max_positions;
    if seq_len > positions {
        let message = format!("must be at least data.seq_len = {seq_len}, found {positions}");
        return wrong(
            if config.model_type() == "gpt2" { "n_positions" } else { "max_position_embeddings" },
            message,
        );
    }
    let ids = ids.0.unwrap_or(ids.1);
    if decoder.vocab_size < ids {
        let message = format!(
            "must be above the data's ids, which go up to {}, found {}; or are data.path, data.token_dtype or \
             data.tokenizer other than meant?",
            ids - 1,
            decoder.vocab_size
        );
        return wrong("vocab_size", message);
    }
    Ok(())
}
