//! One layer of the decoder.

use candle_core::Tensor;
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_error::Result;
use fulgurite_nn::functional::add;
use fulgurite_nn::{
    AttentionConfig, CausalSelfAttention, Dropout, ExpertLoad, LatentAttention, MixtureOfExperts,
};

use super::config::{DecoderConfig, LayerConfig, NormPlacement};
use crate::layers::{MlpBlock, Norm};

/// Attention and MLP, with norms where the family has them. The names come from Llama, or
/// from Gemma 2 where there are more norms.
#[derive(Debug)]
pub(crate) struct DecoderLayer {
    index: usize,
    norms: Norms,
    self_attn: Attention,
    mlp: FeedForwardBlock,
    dropout: [Dropout; 2],
    /// Whether the router's logits are wanted.
    gives_logits: bool,
}

/// The attention of a layer.
#[derive(Debug)]
enum Attention {
    Grouped(Box<CausalSelfAttention>),
    Latent(Box<LatentAttention>),
}

impl Attention {
    fn new(
        b: &ModuleBuilder,
        config: &DecoderConfig,
        layer: LayerConfig,
        attention: &AttentionConfig,
    ) -> Result<Self> {
        Ok(match config.latent_attention(layer, attention.rope.as_ref())? {
            Some(latent) => Self::Latent(Box::new(LatentAttention::new(b, &latent)?)),
            None => Self::Grouped(Box::new(CausalSelfAttention::new(b, attention)?)),
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Grouped(attention) => attention.forward(x),
            Self::Latent(attention) => attention.forward(x),
        }
    }
}

/// The feed-forward block.
#[derive(Debug)]
enum FeedForwardBlock {
    Dense(MlpBlock),
    Experts(Box<MixtureOfExperts>),
}

impl FeedForwardBlock {
    fn new(b: &ModuleBuilder, config: &DecoderConfig, layer: LayerConfig) -> Result<Self> {
        Ok(match config.mixture(layer) {
            Some(mixture) => Self::Experts(Box::new(MixtureOfExperts::new(b, &mixture)?)),
            None => {
                let (width, init) = (config.hidden_size, config.init());
                Self::Dense(MlpBlock::new(b, width, config.feed_forward, init)?)
            }
        })
    }
}

/// The output of a layer, and the logits of its router, `[tokens, experts]`, if they are wanted.
pub(crate) type LayerOutput = (Tensor, Option<Tensor>);

/// The norms of a layer, in order of their use.
#[derive(Debug)]
enum Norms {
    Before([Norm; 2]),
    After([Norm; 2]),
    Around([Norm; 4]),
    Parallel([Norm; 2]),
}

impl DecoderLayer {
    pub(crate) fn new(
        b: &ModuleBuilder,
        config: &DecoderConfig,
        index: usize,
        attention: &AttentionConfig,
    ) -> Result<Self> {
        let layer = config.layers[index];
        let norm = |name| Norm::new(&b.pp(name), config.norm, config.hidden_size, config.norm_eps);
        let dropout = |name| Dropout::new(&b.pp(name), config.residual_dropout);
        // Layers are declared in the order of their use.
        let placement = config.norms;
        let first = match placement {
            NormPlacement::After => None,
            _ => Some(norm("input_layernorm")?),
        };
        let self_attn = Attention::new(&b.pp("self_attn"), config, layer, attention)?;
        let second = norm("post_attention_layernorm")?;
        let third = match placement {
            NormPlacement::Around => Some(norm("pre_feedforward_layernorm")?),
            _ => None,
        };
        let mlp = FeedForwardBlock::new(&b.pp("mlp"), config, layer)?;
        let last = || norm("post_feedforward_layernorm");
        let norms = match (placement, first, third) {
            (NormPlacement::Parallel, Some(first), _) => Norms::Parallel([first, second]),
            (NormPlacement::Around, Some(first), Some(third)) => {
                Norms::Around([first, second, third, last()?])
            }
            (_, Some(first), _) => Norms::Before([first, second]),
            (_, None, _) => Norms::After([second, last()?]),
        };
        let dropout = [dropout("attn_dropout")?, dropout("mlp_dropout")?];
        let gives_logits = config.balance().is_some();
        Ok(Self { index, norms, self_attn, mlp, dropout, gives_logits })
    }

    /// Its place among the layers.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    /// The loads of the layer's experts, if it has any.
    pub(crate) fn load(&self) -> Option<&ExpertLoad> {
        match &self.mlp {
            FeedForwardBlock::Dense(_) => None,
            FeedForwardBlock::Experts(mlp) => Some(mlp.load()),
        }
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout[0].forward(&self.self_attn.forward(x)?)
    }

    fn feed_forward(&self, x: &Tensor) -> Result<LayerOutput> {
        let (y, logits) = match &self.mlp {
            FeedForwardBlock::Dense(mlp) => (mlp.forward(x)?, None),
            FeedForwardBlock::Experts(mlp) if self.gives_logits => {
                let (y, logits) = mlp.forward_with_logits(x)?;
                (y, Some(logits))
            }
            FeedForwardBlock::Experts(mlp) => (mlp.forward(x)?, None),
        };
        Ok((self.dropout[1].forward(&y)?, logits))
    }

    /// Computes the output for `x`, `[batch, time, hidden_size]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<LayerOutput> {
        match &self.norms {
            Norms::Before([before_attention, before_mlp]) => {
                let y = self.attend(&before_attention.forward(x)?)?;
                let (y, x) = before_mlp.forward_residual(&y, x)?;
                let (y, logits) = self.feed_forward(&y)?;
                Ok((add(&x, &y)?, logits))
            }
            Norms::After([after_attention, after_mlp]) => {
                let x = add(x, &after_attention.forward(&self.attend(x)?)?)?;
                let (y, logits) = self.feed_forward(&x)?;
                Ok((add(&x, &after_mlp.forward(&y)?)?, logits))
            }
            Norms::Around([before_attention, after_attention, before_mlp, after_mlp]) => {
                let y = self.attend(&before_attention.forward(x)?)?;
                let (y, x) = before_mlp.forward_residual(&after_attention.forward(&y)?, x)?;
                let (y, logits) = self.feed_forward(&y)?;
                Ok((add(&x, &after_mlp.forward(&y)?)?, logits))
            }
            Norms::Parallel([before_attention, before_mlp]) => {
                let attended = self.attend(&before_attention.forward(x)?)?;
                let (y, logits) = self.feed_forward(&before_mlp.forward(x)?)?;
                Ok((add(&add(&y, &attended)?, x)?, logits))
            }
        }
    }
}
