//! An encoder from tokens or patches to hidden states.

use candle_core::{DType, Tensor};
use fulgurite_engine::module::{Module, ModuleBuilder, Unit, stage};
use fulgurite_engine::parameter::{Init, Parameter};
use fulgurite_error::{Error, Result};
use fulgurite_nn::functional::add;
use fulgurite_nn::{AttentionConfig, Conv2d, Conv2dConfig, Documents, Dropout, Embedding, Rope};

use super::config::{EncoderConfig, InputConfig, PatchConfig, TextConfig};
use super::layer::EncoderLayer;
use crate::layers::{Norm, check_length};

/// What an encoder computes from.
#[derive(Debug, Clone, Copy)]
pub enum EncoderInput<'a> {
    /// Token ids `[batch, time]`, segments in the same shape (`None` for the first), and a mask in
    /// the same shape that is 0 at padding (`None` for no padding).
    Text {
        /// Token ids.
        ids: &'a Tensor,
        /// Segments.
        segments: Option<&'a Tensor>,
        /// The mask.
        mask: Option<&'a Tensor>,
    },
    /// Pictures `[batch, channels, height, width]`.
    Pictures(&'a Tensor),
}

/// An encoder, with the parameter names of this crate: `model.embed_tokens`, `model.layers.N`.
#[derive(Debug)]
pub struct Encoder {
    embeddings: Embeddings,
    norm_of_embeddings: Option<Norm>,
    dropout: Dropout,
    layers: Vec<Unit<EncoderLayer>>,
    norm: Option<Norm>,
}

#[derive(Debug)]
enum Embeddings {
    Text {
        config: TextConfig,
        tokens: Embedding,
        positions: Option<Embedding>,
        segments: Option<Embedding>,
    },
    Patches {
        config: PatchConfig,
        projection: Conv2d,
        class: Parameter,
        positions: Parameter,
    },
}

impl Encoder {
    /// Describes the model below `b`; allocates nothing.
    ///
    /// # Errors
    /// If a size does not fit another one.
    pub fn new(config: &EncoderConfig, b: &ModuleBuilder) -> Result<Self> {
        let model = b.pp("model");
        let width = config.hidden_size;
        let norm = |name| Norm::new(&model.pp(name), config.norm, width, config.norm_eps);
        let ropes = config.ropes.iter().map(Rope::with_config).collect::<Result<Vec<_>>>()?;
        let layer = |(i, layer): (usize, &super::EncoderLayerConfig)| {
            let rope = layer.rope.map(|i| ropes[i].clone());
            let attention = AttentionConfig { rope, ..config.attention(*layer) };
            model.unit(&format!("layers.{i}"), |b| EncoderLayer::new(b, config, *layer, &attention))
        };
        let embeddings = Embeddings::new(config, &model)?;
        let norm_of_embeddings = config.embedding_norm.then(|| norm("embed_norm")).transpose()?;
        let dropout = Dropout::new(&model.pp("embed_dropout"), config.embedding_dropout)?;
        let layers = config.layers.iter().enumerate().map(layer).collect::<Result<Vec<_>>>()?;
        let mut before = embeddings.names();
        before.extend(norm_of_embeddings.is_some().then_some("embed_norm"));
        model.stages(&before, &layers);
        Ok(Self {
            embeddings,
            norm_of_embeddings,
            dropout,
            layers,
            norm: (!config.post_norm).then(|| norm("norm")).transpose()?,
        })
    }

    /// The weight of the token embedding, for heads that share it.
    ///
    /// # Errors
    /// If the encoder has no tokens.
    pub fn token_weight(&self) -> Result<&Parameter> {
        match &self.embeddings {
            Embeddings::Text { tokens, .. } => Ok(tokens.weight()),
            Embeddings::Patches { .. } => Err(Error::other("an encoder of pictures has no tokens")),
        }
    }

    /// Returns the hidden states of all positions, `[batch, time, hidden_size]`.
    ///
    /// # Errors
    /// If the input is of another kind or shape than the encoder's, or a sequence is longer than
    /// its positions. If the ones of a mask are not beside each other.
    pub fn forward(&self, input: EncoderInput<'_>) -> Result<Tensor> {
        let mask = match input {
            EncoderInput::Text { mask, .. } => mask.map(Documents::of_mask).transpose()?,
            EncoderInput::Pictures(_) => None,
        };
        let _documents = mask.as_ref().map(Documents::enter);
        let embed = || {
            let mut x = self.embeddings.forward(input)?;
            if let Some(norm) = &self.norm_of_embeddings {
                x = norm.forward(&x)?;
            }
            self.dropout.forward(&x)
        };
        let x = stage::through(&self.layers, embed, |layer, x| layer.forward(x))?;
        match &self.norm {
            None => Ok(x),
            Some(norm) => norm.forward(&x),
        }
    }
}

impl Embeddings {
    fn new(config: &EncoderConfig, b: &ModuleBuilder) -> Result<Self> {
        let (width, init) = (config.hidden_size, config.init());
        let embedding = |name, rows| Embedding::with_init(&b.pp(name), rows, width, init);
        match config.input {
            InputConfig::Text(text) => Ok(Self::Text {
                config: text,
                tokens: embedding("embed_tokens", text.vocab_size)?,
                positions: text
                    .positions
                    .map(|positions| embedding("embed_positions", positions))
                    .transpose()?,
                segments: match text.segments {
                    0 => None,
                    segments => Some(embedding("embed_segments", segments)?),
                },
            }),
            InputConfig::Patches(patches) => {
                let conv =
                    Conv2dConfig { stride: [patches.patch_size; 2], ..Conv2dConfig::default() };
                let size = [patches.patch_size; 2];
                let projection =
                    Conv2d::new(&b.pp("embed_patches"), patches.channels, width, size, conv)?;
                let positions = [1, patches.patches() + 1, width];
                Ok(Self::Patches {
                    config: patches,
                    projection,
                    class: b.parameter("class_token", [1, 1, width], Init::ZEROS)?,
                    positions: b.parameter("position_embeddings", positions, init)?,
                })
            }
        }
    }

    /// The names of their modules and parameters.
    fn names(&self) -> Vec<&'static str> {
        match self {
            Self::Text { positions, segments, .. } => {
                let others = [
                    positions.as_ref().map(|_| "embed_positions"),
                    segments.as_ref().map(|_| "embed_segments"),
                ];
                std::iter::once("embed_tokens").chain(others.into_iter().flatten()).collect()
            }
            Self::Patches { .. } => vec!["embed_patches", "class_token", "position_embeddings"],
        }
    }

    fn forward(&self, input: EncoderInput<'_>) -> Result<Tensor> {
        match (self, input) {
            (
                Self::Text { config, tokens, positions, segments },
                EncoderInput::Text { ids, segments: given, mask },
            ) => {
                let (_, time) = ids.dims2()?;
                let mut x = tokens.forward(ids)?;
                if let Some(positions) = positions {
                    if let Some(rows) = config.positions {
                        check_length(time + config.first_position, rows)?;
                    }
                    let at = position_ids(ids, mask, config.first_position)?;
                    x = x.broadcast_add(&positions.forward(&at)?)?;
                }
                match (segments, given) {
                    (Some(segments), Some(given)) => add(&x, &segments.forward(given)?),
                    (Some(segments), None) => {
                        let first = Tensor::zeros((1, time), DType::U32, ids.device())?;
                        Ok(x.broadcast_add(&segments.forward(&first)?)?)
                    }
                    (None, _) => Ok(x),
                }
            }
            (
                Self::Patches { config, projection, class, positions },
                EncoderInput::Pictures(pictures),
            ) => {
                let expected = [config.channels, config.image_size, config.image_size];
                let (batch, ..) = pictures.dims4()?;
                if pictures.dims()[1..] != expected {
                    return Err(Error::other(format!(
                        "the model takes pictures of {} channels, {} by {}, got {:?}; `data.height`, `data.width` and \
                         `model.image_size` must be equal",
                        config.channels,
                        config.image_size,
                        config.image_size,
                        pictures.dims()
                    )));
                }
                let patches = projection.forward(pictures)?.flatten_from(2)?.transpose(1, 2)?;
                let class = class.tensor()?.to_dtype(patches.dtype())?;
                let width = class.dim(2)?;
                let class = class.broadcast_as((batch, 1, width))?;
                let x = Tensor::cat(&[&class, &patches], 1)?;
                Ok(x.broadcast_add(&positions.tensor()?.to_dtype(x.dtype())?)?)
            }
            _ => Err(Error::other("the encoder takes another kind of input: text or pictures")),
        }
    }
}

/// The learned positions of tokens, `[batch or 1, time]`. From 1 on, padding is at the position
/// before the first one, and is not counted, as in RoBERTa.
fn position_ids(ids: &Tensor, mask: Option<&Tensor>, first: usize) -> Result<Tensor> {
    let (batch, time) = ids.dims2()?;
    let first = first as u32;
    match mask.filter(|_| first > 0) {
        None if mask.is_none()
            && let Some(documents) = Documents::in_force(batch, time)? =>
        {
            Ok((documents.positions(ids.device())? + f64::from(first))?)
        }
        None => {
            let positions: Vec<u32> = (first..first + time as u32).collect();
            Ok(Tensor::from_vec(positions, (1, time), ids.device())?)
        }
        Some(mask) => {
            let mask = mask.to_dtype(DType::U32)?;
            let counted = mask.to_dtype(DType::F32)?.cumsum(1)?.to_dtype(DType::U32)?;
            Ok(((counted * mask)? + f64::from(first - 1))?)
        }
    }
}
