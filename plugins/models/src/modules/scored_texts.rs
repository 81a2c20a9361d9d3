//! A model with a head that gives each text some numbers.

use candle_core::Tensor;
use fulgurite_data::PaddedTexts;
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_error::Result;
use fulgurite_nn::Linear;

use super::common;
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::encoder::{Classifier, Encoder};
use crate::families::Architecture;

/// An encoder with its classification head, or a decoder with a linear layer `score` on the last
/// token, as the `ForSequenceClassification` of `transformers`.
#[derive(Debug)]
pub(super) enum ScoredTexts {
    Encoder(Box<(Encoder, Classifier)>),
    Decoder(Box<Decoder>, Linear),
}

impl ScoredTexts {
    /// Describes the model and a head of `outputs` numbers, for a module that takes `keys` of
    /// `[model]` itself.
    ///
    /// # Errors
    /// If the configuration is wrong.
    pub(super) fn new(
        config: &ModelConfig,
        keys: &[&str],
        outputs: usize,
        b: &ModuleBuilder,
    ) -> Result<Self> {
        Ok(match config.clone().describe_for(keys)?.architecture {
            Architecture::Encoder(encoder) => Self::Encoder(Box::new((
                Encoder::new(&encoder, b)?,
                Classifier::new(b, &encoder, encoder.classifier, outputs)?,
            ))),
            Architecture::Decoder(decoder) => Self::Decoder(
                Box::new(Decoder::without_head(&decoder, b)?),
                Linear::with_init(&b.pp("score"), decoder.hidden_size, outputs, decoder.init())?,
            ),
            Architecture::EncoderDecoder(_) => return Err(common::no_encoder_decoder(config)),
        })
    }

    /// The numbers of texts, `[batch, outputs]`.
    ///
    /// # Errors
    /// If a text is longer than the model's positions.
    pub(super) fn forward(&self, texts: &PaddedTexts) -> Result<Tensor> {
        match self {
            Self::Encoder(encoder) => {
                let (encoder, head) = &**encoder;
                head.classify(&common::encode(encoder, texts)?, common::mask(texts))
            }
            Self::Decoder(decoder, score) => {
                score.forward(&common::last_token(&common::decode(decoder, texts)?, texts)?)
            }
        }
    }
}

/// Gives a decoder the token of padding, by which `transformers` finds the last token of a text.
/// `keys` says where another one can be named, for a warning.
///
/// # Errors
/// If the key cannot be set.
pub(super) fn set_padding(
    config: &mut ModelConfig,
    pad_id: u32,
    ends_in_padding: bool,
    keys: &str,
) -> Result<()> {
    config.set("pad_token_id", pad_id)?;
    if ends_in_padding {
        tracing::warn!(
            "texts end in the token of padding, {pad_id}, and `transformers` would classify such texts by the token \
             before; name another token of padding ({keys})"
        );
    }
    Ok(())
}
