//! One layer of the encoder.

use candle_core::Tensor;
use fulgurite_engine::module::{Module, ModuleBuilder};
use fulgurite_error::Result;
use fulgurite_nn::functional::add;
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
        // Layers are declared in the order of their use.
        let before = !config.post_norm && layer.attention_norm;
        let first = before.then(|| norm("input_layernorm")).transpose()?;
        let self_attn = CausalSelfAttention::new(&b.pp("self_attn"), attention)?;
        let second = norm("post_attention_layernorm")?;
        let mlp =
            MlpBlock::new(&b.pp("mlp"), config.hidden_size, config.feed_forward, config.init())?;
        let norms = match config.post_norm {
            true => Norms::After([second, norm("post_feedforward_layernorm")?]),
            false => Norms::Before(first, second),
        };
        let dropout = [dropout("attn_dropout")?, dropout("mlp_dropout")?];
        Ok(Self { norms, self_attn, mlp, dropout })
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
                add(&x, &self.feed_forward(&y)?)
            }
            Norms::After([after_attention, after_mlp]) => {
                let (x, _) = after_attention.forward_residual(&self.attend(x)?, x)?;
                let (x, _) = after_mlp.forward_residual(&self.feed_forward(&x)?, &x)?;
                Ok(x)
            }
        }
    }
}
