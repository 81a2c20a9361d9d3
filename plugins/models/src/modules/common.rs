//! Code that modules share: the model under a head, its weights, and its fit to data.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fulgurite_checkpoint::{TensorInfo, TensorSource};
use fulgurite_data::{LabelledTexts, PaddedTexts};
use fulgurite_engine::module::{ModuleBuilder, ModuleInit};
use fulgurite_engine::shard::Region;
use fulgurite_error::{Error, Result};
use fulgurite_nn::Documents;
use fulgurite_trainer::trainer::LightningModule;

use crate::config::{ModelConfig, OF_MODULES};
use crate::decoder::Decoder;
use crate::encoder::{Encoder, EncoderConfig, EncoderInput, InputConfig};
use crate::families::{Architecture, Description};
use crate::weights::MappedSource;

/// The heads that weights to start from may lack. Tokens are predicted with layers that
/// classifications of ModernBERT share.
pub(super) const HEADS: [&str; 3] = [".classifier", ".score", ".lm_head"];

/// Returns [`HEADS`] as patterns of parameters.
pub(super) fn new_heads() -> Vec<String> {
    HEADS.map(str::to_owned).into()
}

/// Returns the configuration with the keys of `config.json`, if it names a directory.
///
/// # Errors
/// If the file is missing or damaged.
pub(super) fn complete(config: &ModelConfig) -> Result<ModelConfig> {
    let mut config = config.clone();
    config.read_file()?;
    Ok(config)
}

/// Tells the builder the names that the layers of module `M` have in files of `transformers`.
///
/// # Errors
/// If the configuration is wrong.
pub(super) fn name_layers<M: LightningModule<Config = ModelConfig>>(
    config: &ModelConfig,
    b: &ModuleBuilder,
) -> Result<()> {
    let description = config.clone().describe_for(OF_MODULES)?;
    b.set_foreign_names(Arc::new(description.weights_of(M::module_type().unwrap_or_default())));
    Ok(())
}

/// Returns the encoder of a configuration, for a module that takes `keys` of `[model]` itself.
///
/// # Errors
/// If the configuration is wrong or of another kind of model.
pub(super) fn encoder(config: &ModelConfig, keys: &[&str]) -> Result<EncoderConfig> {
    match config.clone().describe_for(keys)?.architecture {
        Architecture::Encoder(encoder) => Ok(*encoder),
        Architecture::Decoder(_) | Architecture::EncoderDecoder(_) => {
            Err(config.is_no("an encoder, such as \"bert\""))
        }
    }
}

/// The error of an encoder-decoder in a module that takes decoders and encoders.
pub(super) fn no_encoder_decoder(config: &ModelConfig) -> Error {
    config.is_no("a decoder or an encoder, such as \"llama\" or \"bert\"")
}

/// Maps the names of a Hugging Face file to the names of module `M`, and leaves out other heads.
///
/// # Errors
/// As [`MappedSource::new`].
pub(super) fn map_weights<M: LightningModule<Config = ModelConfig>>(
    config: &ModelConfig,
    keys: &[&str],
    source: Box<dyn TensorSource>,
) -> Result<Box<dyn TensorSource>> {
    let description = config.clone().describe_for(keys)?;
    let builder = ModuleBuilder::new(ModuleInit::default());
    let module = M::configure_model(config, &builder)?;
    let tree = builder.finish()?;
    let own: BTreeSet<&str> = tree
        .parameters()
        .iter()
        .map(|p| p.fqn())
        .chain(tree.aliases().map(|(alias, _)| alias))
        .collect();
    let layout = description.weights_of(M::module_type().unwrap_or_default());
    let source = MappedSource::new(source, &layout)?;
    let is_kept = |name: &&str| own.contains(name) || name.starts_with("model.");
    let names = source.names().into_iter().filter(is_kept).map(str::to_owned).collect();
    drop(module);
    Ok(Box::new(WithoutOtherHeads { source, names }))
}

/// A file without the heads of other tasks.
struct WithoutOtherHeads<S> {
    source: S,
    names: BTreeSet<String>,
}

impl<S: TensorSource> TensorSource for WithoutOtherHeads<S> {
    fn location(&self) -> &Path {
        self.source.location()
    }

    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.source.info(name).filter(|_| self.names.contains(name))
    }

    fn read(&self, name: &str, region: &Region, dtype: DType, device: &Device) -> Result<Tensor> {
        self.source.read(name, region, dtype, device)
    }

    fn read_into(&self, name: &str, region: &Region, target: &Tensor) -> Result<()> {
        self.source.read_into(name, region, target)
    }

    fn unreadable(&self, name: &str) -> Option<&str> {
        self.source.unreadable(name).filter(|_| self.names.contains(name))
    }

    fn filtered(&self) -> Option<&str> {
        self.source.filtered()
    }

    fn warning(&self) -> Option<String> {
        self.source.warning()
    }
}

/// The texts that a module computes with, for a check before ranks start.
#[derive(Debug, Clone, Copy)]
pub(super) struct TextSizes {
    /// The tokenizer's number of ids.
    pub(super) ids: usize,
    /// The longest text.
    pub(super) seq_len: usize,
    /// Number of segments.
    pub(super) segments: usize,
    /// The id of padding, for texts that are padded.
    pub(super) padding: Option<u32>,
}

impl TextSizes {
    pub(super) fn of(data: &LabelledTexts) -> Self {
        Self {
            ids: data.vocab_size(),
            seq_len: data.seq_len(),
            segments: data.num_segments(),
            padding: Some(data.pad_id()),
        }
    }
}

/// Checks that texts fit the model. A model without a vocabulary gets the tokenizer's, and a new
/// one its padding.
///
/// # Errors
/// If the model has too few tokens, positions or segments, or is one of pictures.
pub(super) fn fit_to_texts(
    config: &mut ModelConfig,
    keys: &[&str],
    texts: TextSizes,
) -> Result<()> {
    config.read_file()?;
    // An error here may only be due to the missing vocabulary.
    if let Ok(Description { architecture: Architecture::Encoder(encoder), .. }) =
        config.clone().describe_for(keys)
        && matches!(encoder.input, InputConfig::Patches(_))
    {
        return Err(takes_pictures(config));
    }
    if !config.has("vocab_size") && config.model_type() != crate::config::AUTO {
        // Padding lets tensor-parallel ranks divide the vocabulary evenly.
        config.set("vocab_size", texts.ids.next_multiple_of(8))?;
    }
    if let Some(padding) = texts.padding.filter(|_| !config.is_pretrained())
        && !config.has("pad_token_id")
    {
        config.set("pad_token_id", padding)?;
    }
    let description = config.describe_for(keys)?;
    description.warn_of_dropout();
    let Description { architecture, .. } = description;
    let (vocab_size, positions, segments) = match &architecture {
        Architecture::Decoder(decoder) => (decoder.vocab_size, Some(decoder.max_positions), 0),
        Architecture::Encoder(encoder) => match encoder.input {
            InputConfig::Text(text) => (text.vocab_size, text.max_positions(), text.segments),
            InputConfig::Patches(_) => return Err(takes_pictures(config)),
        },
        Architecture::EncoderDecoder(model) => (model.vocab_size, None, 0),
    };
    let TextSizes { ids, seq_len, segments: wanted, .. } = texts;
    if ids > vocab_size {
        return Err(Error::Config(format!(
            "data.tokenizer has {ids} ids, and the model only {vocab_size} (`model.vocab_size`); name the tokenizer of \
             the model"
        )));
    }
    if let Some(positions) = positions.filter(|positions| seq_len > *positions) {
        return Err(Error::Config(format!(
            "data.seq_len is {seq_len}, and the model has {positions} positions; it must be at most that"
        )));
    }
    if segments > 0 && wanted > segments {
        return Err(Error::Config(format!(
            "data.tokenizer distinguishes {wanted} segments, and the model {segments} (`model.type_vocab_size`); name \
             the tokenizer of the model"
        )));
    }
    Ok(())
}

fn takes_pictures(config: &ModelConfig) -> Error {
    Error::Config(format!(
        "`model.type`: a model of type \"{}\" takes pictures, and this `module.type` has texts; pictures are for \
         \"image_classification\"",
        config.model_type()
    ))
}

/// The mask of padded texts, if there is padding.
pub(super) fn mask(texts: &PaddedTexts) -> Option<&Tensor> {
    let is_padded = texts.lengths.iter().any(|length| *length < texts.time());
    is_padded.then_some(&texts.mask)
}

/// An encoder's hidden states of texts, `[batch, time, hidden]`.
pub(super) fn encode(encoder: &Encoder, texts: &PaddedTexts) -> Result<Tensor> {
    let segments = Some(&texts.segments);
    encoder.forward(EncoderInput::Text { ids: &texts.ids, segments, mask: mask(texts) })
}

/// A decoder's hidden states of texts, `[batch, time, hidden]`.
pub(super) fn decode(decoder: &Decoder, texts: &PaddedTexts) -> Result<Tensor> {
    let documents = mask(texts).map(Documents::of_mask).transpose()?;
    let _documents = documents.as_ref().map(Documents::enter);
    decoder.hidden(&texts.ids)
}

/// The hidden states of each text's last token, `[batch, hidden]`.
pub(super) fn last_token(hidden: &Tensor, texts: &PaddedTexts) -> Result<Tensor> {
    let (batch, time, _) = hidden.dims3()?;
    let last = texts.lengths.iter().enumerate();
    let rows: Vec<u32> =
        last.map(|(row, length)| (row * time + length.max(&1) - 1) as u32).collect();
    let rows = Tensor::from_vec(rows, batch, hidden.device())?;
    Ok(hidden.flatten(0, 1)?.contiguous()?.index_select(&rows, 0)?)
}
