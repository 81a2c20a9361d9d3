//! One layer of the encoder.

use candle_core::Tensor;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_error::Result;
use fulgurite_nn::{AttentionConfig, CausalSelfAttention, Dropout};

use super::config::{EncoderConfig, EncoderLayerConfig};
use crate::layers::{MlpBlock, Norm};

/// Attention and MLP, with a norm before or after each.
#[derive(Debug)]
pub(crate) struct EncoderLayer {
    norms: Norms,
    self_attn: CausalSelfAttention,
    mlp: MlpBlock,
    dropout: [Dropout; 2],
}

#[derive(Debug)]
enum Norms {
    /// Before attention, if there is one, and before the MLP.
    Before(Option<Norm>, Norm),
    /// After each, of the sum with the residual stream.
    After([Norm; 2]),
}

impl EncoderLayer {
    pub(crate) fn new(
        b: &ModuleBuilder,
        config: &EncoderConfig,
        layer: EncoderLayerConfig,
        attention: &AttentionConfig,
    ) -> Result<Self> {
        let norm = |name| Norm::new(&b.pp(name), config.norm, config.hidden_size, config.norm_eps);
        let dropout = |name| Dropout::new(&b.pp(name), config.residual_dropout);
        let norms = match (config.post_norm, layer.attention_norm) {
            (true, _) => Norms::After([
                norm("post_attention_layernorm")?,
                norm("post_feedforward_layernorm")?,
            ]),
            (false, true) => {
                Norms::Before(Some(norm("input_layernorm")?), norm("post_attention_layernorm")?)
            }
            (false, false) => Norms::Before(None, norm("post_attention_layernorm")?),
        };
        Ok(Self {
            norms,
            self_attn: CausalSelfAttention::new(&b.pp("self_attn"), attention)?,
            mlp: MlpBlock::new(
                &b.pp("mlp"),
                config.hidden_size,
                config.feed_forward,
                config.init(),
            )?,
            dropout: [dropout("attn_dropout")?, dropout("mlp_dropout")?],
        })
    }

    fn attend(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout[0].forward(&self.self_attn.forward(x)?)
    }

    fn feed_forward(&self, x: &Tensor) -> Result<Tensor> {
        self.dropout[1].forward(&self.mlp.forward(x)?)
    }
}

impl Module for EncoderLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.norms {
            Norms::Before(before_attention, before_mlp) => {
                let normalized =
                    before_attention.as_ref().map(|norm| norm.forward(x)).transpose()?;
                let y = self.attend(normalized.as_ref().unwrap_or(x))?;
                let (y, x) = before_mlp.forward_residual(&y, x)?;
                Ok((x + self.feed_forward(&y)?)?)
            }
            Norms::After([after_attention, after_mlp]) => {
                let (x, _) = after_attention.forward_residual(&self.attend(x)?, x)?;
                let (x, _) = after_mlp.forward_residual(&self.feed_forward(&x)?, &x)?;
                Ok(x)
            }
        }
    }
}
