//! Classifying the words of texts.

use std::path::PathBuf;

use candle_core::{D, DType, Device, Tensor};
use fulgurite_checkpoint::TensorSource;
use fulgurite_data::{LabelledTexts, Labels, PaddedTexts, RowKind, TextBatch};
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Dropout, Linear, Loss, cross_entropy, predicted_classes};
use fulgurite_trainer::metric::{Accuracy, Average, F1Score};
use fulgurite_trainer::trainer::{HookContext, Hooks, LightningModule, StepContext};

use super::classes::{self, ClassMap, DataClasses};
use super::common::{self, TextSizes};
use crate::config::{ModelConfig, Reader};
use crate::decoder::Decoder;
use crate::encoder::{Classifier, Encoder};
use crate::families::Architecture;

/// A target that the loss leaves out.
const IGNORED: i64 = -100;

/// A model that gives each word of a text a tag, such as the kind of a name: any encoder with its
/// head for tokens, or any decoder with dropout (`model.classifier_dropout`, 0.1) and a linear
/// layer `score`, on [`LabelledTexts`] of type `"words"`.
///
/// The first token of a word has the word's tag, and other tokens do not count. Validation logs
/// `val_accuracy` and `val_f1` (macro), both of words and not of names of several words.
#[derive(Debug)]
pub struct TokenClassification {
    network: Network,
    names: Option<Vec<String>>,
    map: ClassMap,
}

#[derive(Debug)]
enum Network {
    Encoder(Box<(Encoder, Classifier)>),
    Decoder(Box<Decoder>, Dropout, Linear),
}

impl TokenClassification {
    /// Returns the logits of all tokens, `[batch, time, classes]`.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub fn forward(&self, texts: &PaddedTexts) -> Result<Tensor> {
        match &self.network {
            Network::Encoder(encoder) => {
                let (encoder, head) = &**encoder;
                head.forward(&common::encode(encoder, texts)?)
            }
            Network::Decoder(decoder, dropout, score) => {
                score.forward(&dropout.forward(&common::decode(decoder, texts)?)?)
            }
        }
    }

    /// Returns the cross entropy of the words of a batch.
    ///
    /// # Errors
    /// If a text is longer than the model's positions, or there are no tags.
    pub fn loss(&self, batch: &TextBatch) -> Result<Loss> {
        cross_entropy(&self.forward(&batch.texts)?, &self.targets(batch)?)
    }

    fn targets(&self, batch: &TextBatch) -> Result<Tensor> {
        let shape = batch.texts.ids.shape();
        match &batch.labels {
            Labels::Classes(classes) if classes.len() == shape.elem_count() => {
                let classes: Vec<i64> = classes.iter().map(|class| self.map.of(*class)).collect();
                Ok(Tensor::from_vec(classes, shape, &Device::Cpu)?)
            }
            _ => Err(Error::Data("`token_classification` needs a tag for each word".to_owned())),
        }
    }
}

impl LightningModule for TokenClassification {
    type Config = ModelConfig;
    type Data = LabelledTexts;

    fn module_type() -> Option<&'static str> {
        Some("token_classification")
    }

    fn pretrained_key() -> Option<&'static str> {
        Some("from_pretrained")
    }

    fn peft_task_type() -> Option<&'static str> {
        Some("TOKEN_CLS")
    }

    fn configure_from_data(config: &mut ModelConfig, data: &LabelledTexts) -> Result<()> {
        if data.kind() != RowKind::Words {
            return Err(Error::Config(format!(
                "data.type is \"{}\", and `token_classification` needs \"{}\"",
                data.kind().name(),
                RowKind::Words.name()
            )));
        }
        common::fit_to_texts(config, classes::KEYS, TextSizes::of(data))?;
        let (names, count) = (data.class_names(), data.num_classes());
        let place = |class| data.place_of_class(class);
        classes::settle(config, &DataClasses { names, count, place: &place })
    }

    fn configure_model(config: &ModelConfig, b: &ModuleBuilder) -> Result<Self> {
        let config = &common::complete(config)?;
        let (classes, names) = (classes::count(config)?, classes::names(config)?);
        common::name_layers::<Self>(config, b)?;
        let network = match config.clone().describe_for(classes::KEYS)?.architecture {
            Architecture::Encoder(encoder) => Network::Encoder(Box::new((
                Encoder::new(&encoder, b)?,
                Classifier::new(b, &encoder, encoder.token_classifier, classes)?,
            ))),
            Architecture::Decoder(decoder) => {
                let dropout = Reader::new(config).probability("classifier_dropout", 0.1)?;
                let score = b.pp("score");
                let (width, init) = (decoder.hidden_size, decoder.init());
                let linear = Linear::with_init(&score, width, classes, init)?
                    .add_bias(&score, fulgurite_engine::parameter::Init::ZEROS)?;
                Network::Decoder(
                    Box::new(Decoder::without_head(&decoder, b)?),
                    Dropout::new(&b.pp("score_dropout"), dropout)?,
                    linear,
                )
            }
            Architecture::EncoderDecoder(_) => return Err(common::no_encoder_decoder(config)),
        };
        Ok(Self { network, names, map: ClassMap::default() })
    }

    fn pretrained(config: &ModelConfig) -> Option<PathBuf> {
        config.weights()
    }

    fn map_weights(
        config: &ModelConfig,
        source: Box<dyn TensorSource>,
    ) -> Result<Box<dyn TensorSource>> {
        common::map_weights::<Self>(config, classes::KEYS, source)
    }

    fn new_parameters(_: &ModelConfig) -> Vec<String> {
        common::new_heads()
    }

    fn training_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }

    fn validation_step(&mut self, batch: &TextBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (logits, targets) = (self.forward(&batch.texts)?, self.targets(batch)?);
        ctx.log("val_accuracy", Accuracy::of(&logits, &targets)?);
        ctx.log("val_f1", F1Score::of(&logits, &targets, Average::Macro)?);
        cross_entropy(&logits, &targets)
    }

    /// Returns the class of each token, i64 `[batch, data.seq_len]`; -100 behind a text's end.
    fn predict_step(&mut self, batch: &TextBatch, _: &mut StepContext) -> Result<Tensor> {
        let (classes, _) = predicted_classes(&self.forward(&batch.texts)?)?;
        let classes = classes.to_device(&Device::Cpu)?.to_dtype(DType::I64)?;
        let (rows, time) = classes.dims2()?;
        let ignored = Tensor::full(IGNORED, (rows, batch.longest), &Device::Cpu)?;
        let mask = batch.texts.mask.to_device(&Device::Cpu)?;
        let seen = mask.where_cond(&classes, &ignored.narrow(1, 0, time)?.contiguous()?)?;
        Ok(match batch.longest - time {
            0 => seen,
            more => Tensor::cat(&[&seen, &ignored.narrow(1, 0, more)?], D::Minus1)?,
        })
    }
}

impl Hooks<LabelledTexts> for TokenClassification {
    fn setup(&mut self, ctx: &mut HookContext<LabelledTexts>) -> Result<()> {
        self.map = ClassMap::new(self.names.as_deref(), ctx.data().class_names().as_deref());
        Ok(())
    }
}
