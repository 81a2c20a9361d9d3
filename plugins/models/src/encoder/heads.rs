//! What stands on an encoder.

use candle_core::{DType, Tensor};
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_engine::parameter::{Init, Parameter};
use fulgurite_error::Result;
use fulgurite_nn::{Activation, Dropout, Linear, Loss, functional, linear_cross_entropy};

use super::config::{ClassifierConfig, EncoderConfig, MaskedLmConfig, Pooling};
use crate::layers::Norm;

fn dense(b: &ModuleBuilder, config: &EncoderConfig, outputs: usize, bias: bool) -> Result<Linear> {
    let linear = Linear::with_init(b, config.hidden_size, outputs, config.init())?;
    if bias { linear.add_bias(b, Init::ZEROS) } else { Ok(linear) }
}

fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    match activation {
        Activation::Silu => functional::silu(x),
        Activation::Gelu => functional::gelu(x),
        Activation::GeluTanh => functional::gelu_tanh(x),
        Activation::Relu => functional::relu(x),
    }
}

/// The head that predicts masked tokens, `lm_head`.
#[derive(Debug)]
pub struct MaskedLmHead {
    dense: Linear,
    activation: Activation,
    norm: Norm,
    decoder: Linear,
}

impl MaskedLmHead {
    /// Describes the head. `tokens` is the weight of the token embedding, `[vocab_size, hidden]`.
    ///
    /// # Errors
    /// If the builder's path has layers of these names.
    pub fn new(
        b: &ModuleBuilder,
        config: &EncoderConfig,
        head: MaskedLmConfig,
        tokens: &Parameter,
    ) -> Result<Self> {
        let b = b.pp("lm_head");
        let (width, rows) = (config.hidden_size, tokens.global_shape()[0]);
        let at = b.pp("decoder");
        let decoder = match head.tied {
            true => Linear::tied(&at, tokens)?,
            false => Linear::with_init(&at, width, rows, config.init())?,
        };
        let decoder = match head.decoder_bias {
            true => decoder.add_bias(&at, Init::ZEROS)?,
            false => decoder,
        };
        Ok(Self {
            dense: dense(&b.pp("dense"), config, width, head.dense_bias)?,
            activation: head.activation,
            norm: Norm::new(&b.pp("norm"), config.norm, width, config.norm_eps)?,
            decoder,
        })
    }

    fn transformed(&self, hidden: &Tensor) -> Result<Tensor> {
        self.norm.forward(&activate(&self.dense.forward(hidden)?, self.activation)?)
    }

    /// Returns the logits of each position.
    ///
    /// # Errors
    /// If the hidden states have another width.
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        self.decoder.forward(&self.transformed(hidden)?)
    }

    /// Returns the cross entropy of `targets`; those below 0 are ignored.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn loss(&self, hidden: &Tensor, targets: &Tensor) -> Result<Loss> {
        linear_cross_entropy(&self.decoder, &self.transformed(hidden)?, targets)
    }
}

/// A head that classifies, `classifier`.
#[derive(Debug)]
pub struct Classifier {
    config: ClassifierConfig,
    dense: Option<(Linear, Option<Norm>)>,
    dropout: [Dropout; 2],
    out_proj: Linear,
}

impl Classifier {
    /// Describes a head of `classes` classes.
    ///
    /// # Errors
    /// If the builder's path has layers of these names, or there are no classes.
    pub fn new(
        b: &ModuleBuilder,
        encoder: &EncoderConfig,
        config: ClassifierConfig,
        classes: usize,
    ) -> Result<Self> {
        let width = encoder.hidden_size;
        let at = b.pp(if config.shares_dense { "lm_head" } else { "classifier" });
        let norm = || Norm::new(&at.pp("norm"), encoder.norm, width, encoder.norm_eps);
        let b = b.pp("classifier");
        let first = match config.dense {
            None => None,
            Some(bias) => Some((
                dense(&at.pp("dense"), encoder, width, bias)?,
                config.norm.then(norm).transpose()?,
            )),
        };
        Ok(Self {
            config,
            dense: first,
            dropout: [
                Dropout::new(&b.pp("input_dropout"), config.input_dropout)?,
                Dropout::new(&b.pp("dropout"), config.dropout)?,
            ],
            out_proj: dense(&b.pp("out_proj"), encoder, classes, true)?,
        })
    }

    /// Returns the logits of whole inputs, `[batch, classes]`, from the hidden states of their
    /// positions. `mask` is 0 at padding.
    ///
    /// # Errors
    /// If the hidden states have another width.
    pub fn classify(&self, hidden: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        self.forward(&pool(hidden, mask, self.config.pooling)?)
    }

    /// Returns the logits of each row of `x` (`[.., hidden]`).
    ///
    /// # Errors
    /// As [`classify`](Self::classify).
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.dropout[0].forward(x)?;
        if let Some((dense, norm)) = &self.dense {
            x = dense.forward(&x)?;
            x = match self.config.activation {
                None => x.tanh()?,
                Some(activation) => activate(&x, activation)?,
            };
            if let Some(norm) = norm {
                x = norm.forward(&x)?;
            }
        }
        self.out_proj.forward(&self.dropout[1].forward(&x)?)
    }
}

/// Returns one vector of a sequence's hidden states, `[batch, hidden]`.
///
/// # Errors
/// If the mask has another shape than the positions.
pub(crate) fn pool(hidden: &Tensor, mask: Option<&Tensor>, pooling: Pooling) -> Result<Tensor> {
    match (pooling, mask) {
        (Pooling::First, _) => Ok(hidden.narrow(1, 0, 1)?.squeeze(1)?),
        (Pooling::Mean, None) => Ok(hidden.mean(1)?),
        (Pooling::Mean, Some(mask)) => {
            let mask = mask.to_dtype(DType::F32)?;
            let weights = mask.broadcast_div(&mask.sum_keepdim(1)?)?.to_dtype(hidden.dtype())?;
            Ok(hidden.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?)
        }
    }
}
