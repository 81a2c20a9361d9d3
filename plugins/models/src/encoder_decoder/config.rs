//! The options of an encoder-decoder.

use fulgurite_engine::parameter::Init;
use fulgurite_nn::{MultiHeadAttentionConfig, RelativePositionBiasConfig};

use crate::layers::FeedForward;

/// The shape of an [`EncoderDecoder`](super::EncoderDecoder).
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderDecoderConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of heads.
    pub num_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
    /// Number of the encoder's layers.
    pub encoder_layers: usize,
    /// Number of the decoder's layers.
    pub decoder_layers: usize,
    /// Number of buckets of distances.
    pub num_buckets: usize,
    /// The distance from which on all are in the last bucket.
    pub max_distance: usize,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Dropout of embeddings, of what attention and MLP give, inside MLPs and behind the last norm.
    pub dropout: f64,
    /// Whether the output head shares the embedding's weight.
    pub tied: bool,
    /// Whether the last hidden states are divided by the root of their width before the head.
    pub scale_outputs: bool,
    /// The token that the decoder begins with.
    pub start_token: u32,
    /// Factor of the standard deviations of initial weights.
    pub initializer_factor: f64,
}

impl EncoderDecoderConfig {
    /// Initial values of a projection of `inputs` inputs.
    pub(super) fn init(&self, inputs: usize) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_factor / (inputs as f64).sqrt() }
    }

    /// Initial values of embedding and head.
    pub(super) fn embedding_init(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_factor }
    }

    /// Any of the attentions. Scores are not divided by the root of the heads' width; queries start
    /// smaller instead.
    pub(super) fn attention(&self) -> MultiHeadAttentionConfig {
        let Self { hidden_size, num_heads, head_dim, .. } = *self;
        MultiHeadAttentionConfig {
            head_dim: Some(head_dim),
            scale: Some(1.0),
            bias: false,
            init: Some(self.init(hidden_size)),
            query_init: Some(self.init(hidden_size * head_dim)),
            output_init: Some(self.init(num_heads * head_dim)),
            ..MultiHeadAttentionConfig::new(hidden_size, num_heads)
        }
    }

    /// The terms of scores of the encoder, which looks to both sides, or of the decoder.
    pub(super) fn position_bias(&self, both_sides: bool) -> RelativePositionBiasConfig {
        RelativePositionBiasConfig {
            num_heads: self.num_heads,
            num_buckets: self.num_buckets,
            max_distance: self.max_distance,
            both_sides,
            init: self.init(self.hidden_size),
        }
    }
}
