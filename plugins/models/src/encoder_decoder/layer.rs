//! One layer of the encoder or the decoder.

use candle_core::Tensor;
use fulgurite_engine::module::{Module as _, ModuleBuilder};
use fulgurite_error::{Error, Result};
use fulgurite_nn::functional::{self, add};
use fulgurite_nn::{Activation, Dropout, KeysValues, Linear, MultiHeadAttention};

use super::config::EncoderDecoderConfig;
use crate::layers::{Norm, NormKind};

/// Attention to the own sequence, in the decoder also to the encoder's, and the MLP, with a norm
/// before each.
#[derive(Debug)]
pub(super) struct Layer {
    input_layernorm: Norm,
    self_attn: MultiHeadAttention,
    self_dropout: Dropout,
    cross: Option<CrossAttention>,
    post_attention_layernorm: Norm,
    mlp: DroppedMlp,
    mlp_dropout: Dropout,
}

/// Attention to the encoder.
#[derive(Debug)]
struct CrossAttention {
    norm: Norm,
    attention: MultiHeadAttention,
    dropout: Dropout,
}

/// Keys and values that attention takes, and the mask of these keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context<'a> {
    pub(super) keys: &'a KeysValues,
    pub(super) mask: Option<&'a Tensor>,
}

impl Layer {
    /// A layer; `attends` says whether it attends to an encoder.
    pub(super) fn new(
        b: &ModuleBuilder,
        config: &EncoderDecoderConfig,
        attends: bool,
    ) -> Result<Self> {
        let norm =
            |name| Norm::new(&b.pp(name), NormKind::Rms, config.hidden_size, config.norm_eps);
        let dropout = |name| Dropout::new(&b.pp(name), config.dropout);
        let attention = |name| MultiHeadAttention::new(&b.pp(name), &config.attention());
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: attention("self_attn")?,
            self_dropout: dropout("self_dropout")?,
            cross: match attends {
                false => None,
                true => Some(CrossAttention {
                    norm: norm("cross_attention_layernorm")?,
                    attention: attention("cross_attn")?,
                    dropout: dropout("cross_dropout")?,
                }),
            },
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: DroppedMlp::new(&b.pp("mlp"), config)?,
            mlp_dropout: dropout("mlp_dropout")?,
        })
    }

    /// The keys and values of the encoder's output.
    pub(super) fn keys_of(&self, memory: &Tensor) -> Result<KeysValues> {
        let missing = || Error::other("a layer of an encoder attends to no other sequence");
        self.cross.as_ref().ok_or_else(missing)?.attention.keys_values(memory)
    }

    /// Computes the output for `x`, `[batch, time, hidden_size]`, and the keys and values of these
    /// positions behind `earlier` ones.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        bias: &Tensor,
        earlier: Option<&KeysValues>,
        mask: Option<&Tensor>,
        memory: Option<Context<'_>>,
    ) -> Result<(Tensor, KeysValues)> {
        let y = self.input_layernorm.forward(x)?;
        let own = self.self_attn.keys_values(&y)?;
        let keys = match earlier {
            None => own,
            Some(earlier) => earlier.followed_by(&own)?,
        };
        let attended = self.self_attn.attend_to(&y, &keys, Some(bias), mask)?;
        let mut attended = self.self_dropout.forward(&attended)?;
        let mut x = x.clone();
        if let (Some(cross), Some(Context { keys, mask })) = (&self.cross, memory) {
            let (y, sum) = cross.norm.forward_residual(&attended, &x)?;
            attended = cross.dropout.forward(&cross.attention.attend_to(&y, keys, None, mask)?)?;
            x = sum;
        }
        let (y, x) = self.post_attention_layernorm.forward_residual(&attended, &x)?;
        let y = self.mlp_dropout.forward(&self.mlp.forward(&y)?)?;
        Ok((add(&x, &y)?, keys))
    }
}

/// A feed-forward block with dropout before its last projection.
#[derive(Debug)]
struct DroppedMlp {
    gate_proj: Option<Linear>,
    up_proj: Linear,
    dropout: Dropout,
    down_proj: Linear,
    activation: Activation,
}

impl DroppedMlp {
    fn new(b: &ModuleBuilder, config: &EncoderDecoderConfig) -> Result<Self> {
        let (width, inside) = (config.hidden_size, config.feed_forward.intermediate_size);
        let inner = |name| Linear::with_init(&b.pp(name), width, inside, config.init(width));
        Ok(Self {
            gate_proj: config.feed_forward.gated.then(|| inner("gate_proj")).transpose()?,
            up_proj: inner("up_proj")?,
            dropout: Dropout::new(&b.pp("dropout"), config.dropout)?,
            down_proj: Linear::with_init(&b.pp("down_proj"), inside, width, config.init(inside))?,
            activation: config.feed_forward.activation,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let activate = match self.activation {
            Activation::Silu => functional::silu,
            Activation::Gelu => functional::gelu,
            Activation::GeluTanh => functional::gelu_tanh,
            Activation::Relu => functional::relu,
        };
        let up = self.up_proj.forward(x)?;
        let y = match &self.gate_proj {
            None => activate(&up)?,
            Some(gate) => (activate(&gate.forward(x)?)? * up)?,
        };
        self.down_proj.forward(&self.dropout.forward(&y)?)
    }
}
