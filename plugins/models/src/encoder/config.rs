//! The options of an encoder.

use fulgurite_engine::parameter::Init;
use fulgurite_nn::{Activation, AttentionConfig, RopeConfig};

use crate::layers::{FeedForward, NormKind};

/// The kind of an encoder's input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InputConfig {
    /// Token ids.
    Text(TextConfig),
    /// The patches of a picture, behind a class token.
    Patches(PatchConfig),
}

/// The embeddings of text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TextConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Number of learned positions; `None` for none.
    pub positions: Option<usize>,
    /// The learned position of the first token. Padding keeps the one before, as in RoBERTa.
    pub first_position: usize,
    /// Number of segments; 0 for none.
    pub segments: usize,
}

impl TextConfig {
    /// The most tokens of a text; `None` for any number.
    pub fn max_positions(&self) -> Option<usize> {
        self.positions.map(|rows| rows.saturating_sub(self.first_position))
    }
}

/// The embeddings of a picture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PatchConfig {
    /// Height and width of a picture.
    pub image_size: usize,
    /// Height and width of a patch.
    pub patch_size: usize,
    /// Channels of a picture.
    pub channels: usize,
}

impl PatchConfig {
    /// Number of patches.
    pub fn patches(&self) -> usize {
        (self.image_size / self.patch_size).pow(2)
    }
}

/// What layers of one encoder may have differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderLayerConfig {
    /// The index of its rotary embedding in [`EncoderConfig::ropes`]; `None` for none.
    pub rope: Option<usize>,
    /// The largest distance of a key on each side; `None` for no limit.
    pub window: Option<usize>,
    /// Whether a norm stands before the attention. Only for encoders whose norms stand before.
    pub attention_norm: bool,
}

/// The shape of an [`Encoder`](super::Encoder).
#[derive(Debug, Clone)]
pub struct EncoderConfig {
    /// The kind of input.
    pub input: InputConfig,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of heads.
    pub num_heads: usize,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of the attention has a bias.
    pub output_bias: bool,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
    /// The kind of all norms.
    pub norm: NormKind,
    /// Their epsilon.
    pub norm_eps: f64,
    /// Whether norms follow attention and MLP (BERT); otherwise they stand before (ViT,
    /// ModernBERT), and a last one follows the layers.
    pub post_norm: bool,
    /// Whether a norm follows the embeddings.
    pub embedding_norm: bool,
    /// The rotary embeddings, which layers share.
    pub ropes: Vec<RopeConfig>,
    /// The layers.
    pub layers: Vec<EncoderLayerConfig>,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Dropout of the embedding.
    pub embedding_dropout: f64,
    /// Dropout after attention and MLP.
    pub residual_dropout: f64,
    /// The head that predicts masked tokens, if the family has one.
    pub masked_lm: Option<MaskedLmConfig>,
    /// The head that classifies the whole input.
    pub classifier: ClassifierConfig,
    /// The head that classifies each token, if the family has one.
    pub token_classifier: ClassifierConfig,
}

/// The head that predicts masked tokens: `decoder(norm(activation(dense(x))))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskedLmConfig {
    /// Whether `dense` has a bias.
    pub dense_bias: bool,
    /// The activation.
    pub activation: Activation,
    /// Whether `decoder` has a bias.
    pub decoder_bias: bool,
    /// Whether `decoder` shares the embedding's weight.
    pub tied: bool,
}

/// A head that classifies: `out_proj(dropout(norm(activation(dense(dropout(x))))))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassifierConfig {
    /// What of the input's positions it looks at; of no meaning for a head of each token.
    pub pooling: Pooling,
    /// Whether `dense` has a bias; `None` for a head without it.
    pub dense: Option<bool>,
    /// Whether `dense` and the norm belong to the head that predicts masked tokens, as in
    /// ModernBERT.
    pub shares_dense: bool,
    /// The activation behind `dense`; `None` for tanh.
    pub activation: Option<Activation>,
    /// Whether a norm follows the activation.
    pub norm: bool,
    /// Dropout before `dense`.
    pub input_dropout: f64,
    /// Dropout before `out_proj`.
    pub dropout: f64,
}

/// What of a sequence a classification looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The first position.
    First,
    /// The mean of all positions but padding.
    Mean,
}

impl EncoderConfig {
    pub(crate) fn init(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_range }
    }

    /// The attention of a layer, without its rotary embedding.
    pub(crate) fn attention(&self, layer: EncoderLayerConfig) -> AttentionConfig {
        AttentionConfig {
            causal: false,
            qkv_bias: self.qkv_bias,
            output_bias: self.output_bias,
            window: layer.window,
            init: Some(self.init()),
            ..AttentionConfig::new(self.hidden_size, self.num_heads)
        }
    }
}
