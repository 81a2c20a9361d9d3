//! Learning to write a text for another one.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{LabelledTexts, PaddedTexts, RowKind, TextBatch, Tokenizer};
use fulgurite_engine::module::ModuleBuilder;
use fulgurite_error::{Error, Result};
use fulgurite_nn::Loss;
use fulgurite_trainer::metric::{Accuracy, Perplexity};
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};
use serde_json::{Value, json};

use super::common::{self, TextSizes};
use super::seq2seq_config::WritingConfig;
use crate::config::ModelConfig;
use crate::encoder_decoder::{EncoderDecoder, SourceTexts};
use crate::generation::{GenerationRanks, TextObserver, Writer, end_tokens};
use crate::weights::MappedSource;

/// The keys of `[model]` that the module takes itself.
const KEYS: &[&str] = &["generation"];

/// A model that reads a text and writes another one: an encoder-decoder of this crate on
/// [`LabelledTexts`] of type `"text_to_text"`.
///
/// The loss is the mean cross entropy of the tokens of the texts to write, each predicted from the
/// ones before it. Validation logs `val_accuracy` and `val_perplexity` of these tokens. A
/// prediction writes texts token by token, as `model.generation` says.
pub struct Seq2SeqLm {
    model: EncoderDecoder,
    writing: WritingConfig,
    /// The end tokens that the model's files name.
    end_tokens: Vec<u32>,
    tokenizer: Option<Tokenizer>,
    ranks: Option<GenerationRanks>,
    /// The texts of the last batch, as JSON.
    last: Vec<Value>,
}

impl Seq2SeqLm {
    /// The model.
    pub fn model(&self) -> &EncoderDecoder {
        &self.model
    }

    /// The targets of a batch, i64 `[batch, time]`: the tokens to write, and -100 at padding.
    fn targets(batch: &TextBatch) -> Result<Tensor> {
        let missing = || Error::Data("rows have no text to write (data.target_key)".to_owned());
        let targets = batch.others.first().ok_or_else(missing)?;
        let ids = targets.ids.to_dtype(DType::I64)?;
        let ignored = Tensor::full(-100i64, ids.dims(), ids.device())?;
        Ok(targets.mask.where_cond(&ids, &ignored)?)
    }
}

fn source(texts: &PaddedTexts) -> SourceTexts<'_> {
    SourceTexts { ids: &texts.ids, mask: common::mask(texts) }
}

impl LightningModule for Seq2SeqLm {
    type Config = ModelConfig;
    type Data = LabelledTexts;

    fn module_type() -> Option<&'static str> {
        Some("seq2seq_lm")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        Some("SEQ_2_SEQ_LM")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &LabelledTexts) -> Result<()> {
        if data.kind() != RowKind::TextToText {
            return Err(Error::Config(format!(
                "data.type is \"{}\", and `seq2seq_lm` needs \"{}\"",
                data.kind().name(),
                RowKind::TextToText.name()
            )));
        }
        common::fit_to_texts(config, KEYS, TextSizes::of(data))?;
        config.encoder_decoder(KEYS)?;
        WritingConfig::of(config).map(drop)
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let mut config = common::complete(config)?;
        let model = config.encoder_decoder(KEYS)?;
        common::name_layers::<Self>(&config, b)?;
        // The directory of a checkpoint's first weights may be gone.
        let directory = config.directory().ok().flatten();
        let of_files = |directory: &Path| end_tokens(directory);
        Ok(Self {
            model: EncoderDecoder::new(&model, b)?,
            writing: WritingConfig::of(&config)?,
            end_tokens: directory.as_deref().map(of_files).transpose()?.unwrap_or_default(),
            tokenizer: None,
            ranks: None,
            last: Vec::new(),
        })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        let description = config.clone().describe_for(KEYS)?;
        Ok(Box::new(MappedSource::new(source, &description.weights)?))
    }

    fn training_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Loss> {
        self.model.loss(source(&batch.texts), &Self::targets(batch)?)
    }

    fn validation_step(&mut self, batch: &TextBatch, ctx: &mut StepContext) -> Result<Loss> {
        let targets = Self::targets(batch)?;
        let (loss, likely) = self.model.evaluate(source(&batch.texts), &targets)?;
        ctx.log("val_accuracy", Accuracy::of_classes(&likely, &targets)?);
        ctx.log("val_perplexity", Perplexity::of(&loss)?);
        Ok(loss)
    }

    /// Writes a text for each of the batch, and returns its tokens, i64 `[batch, max_new_tokens]`;
    /// -1 after its end.
    fn predict_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Tensor> {
        let mut generation = self.writing.generation();
        generation.end_tokens = match &*self.end_tokens {
            [] => self.tokenizer.iter().filter_map(Tokenizer::end_of_text).collect(),
            tokens => tokens.to_vec(),
        };
        let writer = Writer {
            generation: &generation,
            tokenizer: self.tokenizer.as_ref(),
            ranks: self.ranks.clone(),
            interrupted: None,
        };
        let indices: Vec<u64> = (0..batch.texts.lengths.len() as u64).collect();
        let (texts, search) = (source(&batch.texts), self.writing.search());
        let observer = &mut TextObserver(&mut |_, _, _| ());
        let answers = self.model.write(texts, &indices, &writer, &search, observer)?;
        let (rows, new) = (answers.len(), generation.max_new_tokens);
        let mut ids = Vec::with_capacity(rows * new);
        for answer in &answers {
            let padding = std::iter::repeat_n(-1, new - answer.ids.len());
            ids.extend(answer.ids.iter().map(|id| i64::from(*id)).chain(padding));
        }
        self.last = answers
            .iter()
            .map(|answer| json!({ "text": answer.text, "ids": answer.ids, "end": answer.end }))
            .collect();
        Ok(Tensor::from_vec(ids, (rows, new), &Device::Cpu)?)
    }

    fn output_values(&self) -> Option<&[Value]> {
        Some(&self.last)
    }
}

impl Hooks<LabelledTexts> for Seq2SeqLm {
    fn on_predict_start(&mut self, ctx: &mut HookContext<LabelledTexts>) -> Result<()> {
        self.ranks = Some(GenerationRanks::of(ctx.fabric())?);
        self.tokenizer = Some(Tokenizer::from_file(ctx.data().tokenizer_file())?);
        Ok(())
    }
}

impl std::fmt::Debug for Seq2SeqLm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seq2SeqLm").field("model", &self.model).finish_non_exhaustive()
    }
}
