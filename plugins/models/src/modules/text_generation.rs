//! Generating answers to prompts.

use std::fmt;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::{Error, Result};
use fulgurite_nn::Loss;
use fulgurite_trainer::fabric::Fabric;
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};
use serde_json::Value;

use super::CausalLm;
use super::common;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::generation::{Answer, GenerationRanks, Generator, PromptBatch, Prompts, end_tokens};

/// A language model that continues [`Prompts`], in a prediction. Train it as
/// [`CausalLm`](crate::CausalLm), whose checkpoints it loads.
pub struct TextGeneration {
    model: Decoder,
    /// The end tokens that the model's files name, if there are files.
    end_tokens: Option<Vec<u32>>,
    ranks: Option<GenerationRanks>,
    interrupted: Option<fn() -> bool>,
    /// The answers to each prompt of the last batch, as JSON.
    last: Vec<Value>,
}

impl TextGeneration {
    /// The decoder.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// The end tokens that the model's files name; `None` without files.
    pub fn end_tokens(&self) -> Option<&[u32]> {
        self.end_tokens.as_deref()
    }

    /// Lets the ranks of `fabric` generate together. A prediction of the trainer does so itself.
    pub fn set_ranks(&mut self, fabric: &Fabric) {
        self.ranks = Some(GenerationRanks::of(fabric));
    }

    /// Sets a function that says whether this rank is asked to end, asked before each token.
    pub fn set_interrupted(&mut self, interrupted: fn() -> bool) {
        self.interrupted = Some(interrupted);
    }

    /// Returns the answers to the prompts of a batch, in order, and calls `show` with each piece of
    /// text. Collective.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn answer(
        &self,
        batch: &PromptBatch,
        show: &mut dyn FnMut(u64, usize, &str),
    ) -> Result<Vec<Answer>> {
        let generation = batch.settings.with_end_tokens(self.end_tokens());
        Generator {
            decoder: &self.model,
            generation: &generation,
            tokenizer: batch.settings.tokenizer.as_ref(),
            ranks: self.ranks.clone(),
            interrupted: self.interrupted,
        }
        .generate(&batch.prompts, show)
    }
}

impl LightningModule for TextGeneration {
    type Config = ModelConfig;
    type Data = Prompts;

    fn module_type() -> Option<&'static str> {
        Some("text_generation")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &Prompts) -> Result<()> {
        config.read_file()?;
        let decoder = config.decoder()?;
        let new = data.settings().generation.max_new_tokens;
        for prompt in data.prompts() {
            decoder.check_prompt(&prompt.ids, new).map_err(|error| match error {
                Error::Data(what) => Error::Data(format!("{}: {what}", data.name(prompt.index))),
                error => error,
            })?;
        }
        Ok(())
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        b.no_stages("it generates text, with the whole model");
        let decoder = config.clone().decoder()?;
        common::name_layers::<Self>(config, b)?;
        let model = Decoder::new(&decoder, b)?;
        // The directory of a checkpoint's first weights may be gone.
        let directory = config.directory().ok().flatten();
        let end_tokens = directory.as_deref().map(end_tokens).transpose()?;
        Ok(Self { model, end_tokens, ranks: None, interrupted: None, last: Vec::new() })
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

    fn training_step(&mut self, _: &PromptBatch, _: &mut StepContext) -> Result<Loss> {
        Err(Error::Config(
            "`module.type` = \"text_generation\" predicts only; train and validate with \"causal_lm\"".to_owned(),
        ))
    }

    /// Returns the new tokens of all answers to each prompt, i64
    /// `[prompts, samples, max_new_tokens]`; -1 after the end of an answer.
    fn predict_step(&mut self, batch: &PromptBatch, _: &mut StepContext) -> Result<Tensor> {
        let answers = self.answer(batch, &mut |_, _, _| ())?;
        let generation = &batch.settings.generation;
        let (prompts, new) = (batch.prompts.len(), generation.max_new_tokens);
        let mut ids = Vec::with_capacity(answers.len() * new);
        for answer in &answers {
            let padding = std::iter::repeat_n(-1, new - answer.ids.len());
            ids.extend(answer.ids.iter().map(|id| i64::from(*id)).chain(padding));
        }
        let json = |answers: &[Answer]| serde_json::to_value(answers).map_err(Error::other);
        self.last = answers.chunks(generation.samples).map(json).collect::<Result<_>>()?;
        Ok(Tensor::from_vec(ids, (prompts, generation.samples, new), &Device::Cpu)?)
    }

    fn output_values(&self) -> Option<&[Value]> {
        Some(&self.last)
    }
}

impl Hooks<Prompts> for TextGeneration {
    fn on_predict_start(&mut self, ctx: &mut HookContext<Prompts>) -> Result<()> {
        self.set_ranks(ctx.fabric());
        Ok(())
    }
}

impl fmt::Debug for TextGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextGeneration").field("model", &self.model).finish_non_exhaustive()
    }
}
