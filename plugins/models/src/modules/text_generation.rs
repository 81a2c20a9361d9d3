//! Generating answers to prompts.

use std::fmt;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::Tokenizer;
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
use crate::encoder_decoder::{EncoderDecoder, SourceTexts};
use crate::families::Architecture;
use crate::generation::{
    Answer, BeamSearch, GenerationRanks, Generator, Prompt, PromptBatch, Prompts, TextObserver,
    Writer, end_tokens,
};

/// A language model that continues [`Prompts`], or writes texts for them, in a prediction. Train it
/// as [`CausalLm`](crate::CausalLm) or [`Seq2SeqLm`](crate::Seq2SeqLm), whose checkpoints it loads.
pub struct TextGeneration {
    network: Network,
    /// The end tokens that the model's files name, if there are files.
    end_tokens: Option<Vec<u32>>,
    ranks: Option<GenerationRanks>,
    interrupted: Option<fn() -> bool>,
    /// The answers to each prompt of the last batch, as JSON.
    last: Vec<Value>,
}

/// The model.
#[derive(Debug)]
enum Network {
    /// Continues prompts.
    Decoder(Box<Decoder>),
    /// Reads prompts, and writes other texts.
    EncoderDecoder(Box<EncoderDecoder>),
}

impl TextGeneration {
    /// The decoder.
    ///
    /// # Errors
    /// If the model is no decoder that continues texts.
    pub fn decoder(&self) -> Result<&Decoder> {
        match &self.network {
            Network::Decoder(decoder) => Ok(decoder),
            Network::EncoderDecoder(_) => Err(Error::Config(
                "the model reads a text and writes another one, and a decoder that continues texts is needed here; use \
                 `fulgurite generate`, or `fulgurite predict` with `module.type` = \"seq2seq_lm\""
                    .to_owned(),
            )),
        }
    }

    /// The end tokens that the model's files name; `None` without files.
    pub fn end_tokens(&self) -> Option<&[u32]> {
        self.end_tokens.as_deref()
    }

    /// Lets the ranks of `fabric`, whose model is set up, generate together. A prediction of the
    /// trainer does so itself.
    ///
    /// # Errors
    /// Within another call of the strategy.
    pub fn set_ranks(&mut self, fabric: &Fabric) -> Result<()> {
        self.ranks = Some(GenerationRanks::of(fabric)?);
        Ok(())
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
        let (tokenizer, ranks) = (batch.settings.tokenizer.as_ref(), self.ranks.clone());
        let (generation, interrupted) = (&generation, self.interrupted);
        match &self.network {
            Network::Decoder(decoder) => {
                Generator { decoder, generation, tokenizer, ranks, interrupted }
                    .generate(&batch.prompts, show)
            }
            Network::EncoderDecoder(model) => {
                let writer = Writer { generation, tokenizer, ranks, interrupted };
                let [ids, mask] = sources(&batch.prompts, &writer, model.device())?;
                let source = SourceTexts { ids: &ids, mask: Some(&mask) };
                let indices: Vec<u64> = batch.prompts.iter().map(|prompt| prompt.index).collect();
                let search = BeamSearch::default();
                model.write(source, &indices, &writer, &search, &mut TextObserver(show))
            }
        }
    }
}

/// Prompts as an encoder reads them, each with the end that the tokenizer puts behind texts: padded
/// ids, and 1 for tokens and 0 for padding. A row of padding without prompts.
fn sources(prompts: &[Prompt], writer: &Writer<'_>, device: &Device) -> Result<[Tensor; 2]> {
    let end = writer.tokenizer.and_then(Tokenizer::added_end);
    let texts = prompts.iter().map(|prompt| {
        let mut ids = prompt.ids.clone();
        ids.extend(end.filter(|end| ids.last() != Some(end)));
        ids
    });
    let texts: Vec<Vec<u32>> = texts.collect();
    let time = texts.iter().map(Vec::len).max().unwrap_or(1);
    let rows = texts.len().max(1);
    let (mut ids, mut mask) = (vec![0u32; rows * time], vec![0u8; rows * time]);
    for (row, text) in texts.iter().enumerate() {
        ids[row * time..][..text.len()].copy_from_slice(text);
        mask[row * time..][..text.len()].fill(1);
    }
    let ids = Tensor::from_vec(ids, (rows, time), device)?;
    Ok([ids, Tensor::from_vec(mask, (rows, time), device)?])
}

/// Whether the configuration describes an encoder-decoder.
fn is_encoder_decoder(config: &ModelConfig) -> Result<bool> {
    let architecture = config.clone().describe()?.architecture;
    Ok(matches!(architecture, Architecture::EncoderDecoder(_)))
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
        if is_encoder_decoder(config)? {
            let vocabulary = config.encoder_decoder(&[])?.vocab_size;
            let end = data.settings().tokenizer.as_ref().and_then(Tokenizer::added_end);
            for prompt in data.prompts() {
                let wrong =
                    |what: String| Err(Error::Data(format!("{}: {what}", data.name(prompt.index))));
                if prompt.ids.is_empty() {
                    return wrong("the prompt is empty; there is nothing to read".to_owned());
                }
                if let Some(id) =
                    prompt.ids.iter().chain(&end).find(|id| **id as usize >= vocabulary)
                {
                    return wrong(format!(
                        "token {id} is not of the model, whose tokens are below {vocabulary}; is the tokenizer another \
                         model's?"
                    ));
                }
            }
            return Ok(());
        }
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
        common::name_layers::<Self>(config, b)?;
        let network = match is_encoder_decoder(&common::complete(config)?)? {
            true => {
                let model = config.clone().encoder_decoder(&[])?;
                Network::EncoderDecoder(Box::new(EncoderDecoder::new(&model, b)?))
            }
            false => Network::Decoder(Box::new(Decoder::new(&config.clone().decoder()?, b)?)),
        };
        // The directory of a checkpoint's first weights may be gone.
        let directory = config.directory().ok().flatten();
        let end_tokens = directory.as_deref().map(end_tokens).transpose()?;
        // A text that is written needs an end, and some files of T5 leave it to the tokenizer.
        let is_writer = matches!(network, Network::EncoderDecoder(_));
        let end_tokens = end_tokens.filter(|tokens| !(is_writer && tokens.is_empty()));
        Ok(Self { network, end_tokens, ranks: None, interrupted: None, last: Vec::new() })
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
            "`module.type` = \"text_generation\" predicts only; train and validate with \"causal_lm\" or \"seq2seq_lm\"".to_owned(),
        ))
    }

    fn predicts_in_stages(&self) -> bool {
        true
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
        self.set_ranks(ctx.fabric())
    }
}

impl fmt::Debug for TextGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextGeneration").field("network", &self.network).finish_non_exhaustive()
    }
}
