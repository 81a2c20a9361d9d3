//! Layers that decoders and encoders choose by their configuration.

use candle_core::Tensor;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parameter::Init;
use fulgurite_error::{Error, Result};
use fulgurite_nn::{Activation, GatedMlp, LayerNorm, Mlp, MlpConfig, RmsNorm};

/// A kind of norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// A root mean square norm.
    Rms,
    /// A root mean square norm whose weight is one more than its parameter, as in Gemma.
    RmsUnitOffset,
    /// A layer norm with a bias.
    Layer,
    /// A layer norm without a bias.
    LayerWithoutBias,
}

/// A norm of a configured kind.
#[derive(Debug)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    pub(crate) fn new(b: &ModuleBuilder, kind: NormKind, width: usize, eps: f64) -> Result<Self> {
        Ok(match kind {
            NormKind::Rms => Self::Rms(RmsNorm::new(b, width, eps)?),
            NormKind::RmsUnitOffset => Self::Rms(RmsNorm::with_unit_offset(b, width, eps)?),
            NormKind::Layer => Self::Layer(LayerNorm::new(b, width, eps)?),
            NormKind::LayerWithoutBias => Self::Layer(LayerNorm::without_bias(b, width, eps)?),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) => norm.forward(x),
            Self::Layer(norm) => norm.forward(x),
        }
    }

    /// Returns the norm of `x + residual`, and that sum.
    pub(crate) fn forward_residual(
        &self,
        x: &Tensor,
        residual: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        match self {
            Self::Rms(norm) => norm.forward_residual(x, residual),
            Self::Layer(norm) => norm.forward_residual(x, residual),
        }
    }
}

/// The shape of a layer's feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FeedForward {
    /// Width inside the block.
    pub intermediate_size: usize,
    /// Whether the block is `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
    pub gated: bool,
    /// The activation.
    pub activation: Activation,
    /// Whether its projections have biases.
    pub bias: bool,
}

/// A feed-forward block of a configured kind.
#[derive(Debug)]
pub(crate) enum MlpBlock {
    Gated(GatedMlp),
    Plain(Mlp),
}

impl MlpBlock {
    pub(crate) fn new(
        b: &ModuleBuilder,
        hidden_size: usize,
        config: FeedForward,
        init: Init,
    ) -> Result<Self> {
        let FeedForward { intermediate_size, gated, activation, bias } = config;
        let config =
            MlpConfig { hidden_size, intermediate_size, activation, bias, init: Some(init) };
        Ok(match gated {
            true => Self::Gated(GatedMlp::with_config(b, &config)?),
            false => Self::Plain(Mlp::with_config(b, &config)?),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Gated(mlp) => mlp.forward(x),
            Self::Plain(mlp) => mlp.forward(x),
        }
    }
}

/// Returns the activation that `transformers` calls by this name.
pub(crate) fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "silu" | "swish" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_python_tanh" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        _ => return None,
    })
}

/// Refuses sequences that are longer than a model's positions.
pub(crate) fn check_length(time: usize, positions: usize) -> Result<()> {
    match time > positions {
        false => Ok(()),
        true => Err(Error::other(format!(
            "a sequence of {time} tokens is longer than the model's {positions} positions \
             (`max_position_embeddings`)"
        ))),
    }
}
