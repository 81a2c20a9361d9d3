//! Two small transformers.

use candle_core::Tensor;
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder, Unit};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Dropout, Embedding, GeluMlp, LayerNorm, Linear, RmsNorm,
    Rope, SwiGluMlp,
};
use fulgurite_core::parameter::{Init, Parameter};

pub(crate) const VOCABULARY: usize = 12;
const WIDTH: usize = 8;

pub(crate) fn attention(num_heads: usize, num_kv_heads: usize, qkv_bias: bool) -> AttentionConfig {
    AttentionConfig {
        num_kv_heads,
        head_dim: 2,
        qkv_bias,
        rope: Some(Rope::new(2, 1e4).unwrap()),
        ..AttentionConfig::new(WIDTH, num_heads)
    }
}

pub(crate) struct Layer {
    norms: [RmsNorm; 2],
    attention: CausalSelfAttention,
    mlp: SwiGluMlp,
    dropout: Dropout,
}

/// A decoder with the names of Llama's, grouped key and value heads, and biases.
pub(crate) struct Llama {
    embedding: Embedding,
    layers: Vec<Unit<Layer>>,
    norm: RmsNorm,
    head: Linear,
}

impl Llama {
    pub(crate) fn tied(b: &ModuleBuilder) -> Result<Self> {
        Self::new(b, true)
    }

    pub(crate) fn untied(b: &ModuleBuilder) -> Result<Self> {
        Self::new(b, false)
    }

    fn new(root: &ModuleBuilder, tied: bool) -> Result<Self> {
        let b = root.pp("model");
        let embedding = Embedding::new(&b.pp("embed_tokens"), VOCABULARY, WIDTH)?;
        let layer = |b: &ModuleBuilder| {
            Ok(Layer {
                norms: [
                    RmsNorm::new(&b.pp("input_layernorm"), WIDTH, 1e-5)?,
                    RmsNorm::new(&b.pp("post_attention_layernorm"), WIDTH, 1e-5)?,
                ],
                attention: CausalSelfAttention::new(&b.pp("self_attn"), &attention(4, 2, true))?,
                mlp: SwiGluMlp::new(&b.pp("mlp"), WIDTH, 10)?,
                dropout: Dropout::new(&b.pp("dropout"), 0.1)?,
            })
        };
        Ok(Self {
            layers: (0..2).map(|i| b.unit(&format!("layers.{i}"), layer)).collect::<Result<_>>()?,
            norm: RmsNorm::new(&b.pp("norm"), WIDTH, 1e-5)?,
            head: match tied {
                true => Linear::tied(&root.pp("lm_head"), embedding.weight())?,
                false => Linear::new(&root.pp("lm_head"), WIDTH, VOCABULARY)?,
            },
            embedding,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.attention.forward(&self.norms[0].forward(x)?)?;
        let x = (x + self.dropout.forward(&y)?)?;
        Ok((&x + self.mlp.forward(&self.norms[1].forward(&x)?)?)?)
    }
}

impl Module for Llama {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}

pub(crate) struct Block {
    norms: [LayerNorm; 2],
    attention: CausalSelfAttention,
    mlp: GeluMlp,
    /// A layer of candle_nn.
    adapter: candle_nn::Linear,
    /// A parameter outside of any layer.
    scale: Parameter,
}

/// A decoder with other names, and with parts that are not from `nn`.
pub(crate) struct Gpt {
    embedding: Embedding,
    blocks: Vec<Unit<Block>>,
    head: Linear,
}

impl Gpt {
    pub(crate) fn new(b: &ModuleBuilder) -> Result<Self> {
        let block = |b: &ModuleBuilder| {
            Ok(Block {
                norms: [
                    LayerNorm::new(&b.pp("ln_1"), WIDTH, 1e-5)?,
                    LayerNorm::new(&b.pp("ln_2"), WIDTH, 1e-5)?,
                ],
                attention: CausalSelfAttention::new(&b.pp("attn"), &attention(4, 4, false))?,
                mlp: GeluMlp::new(&b.pp("mlp"), WIDTH, 16)?,
                adapter: candle_nn::linear(WIDTH, WIDTH, b.var_builder().pp("adapter"))?,
                scale: b.parameter("scale", [WIDTH], Init::ONES)?,
            })
        };
        Ok(Self {
            embedding: Embedding::new(&b.pp("wte"), VOCABULARY, WIDTH)?,
            blocks: (0..2).map(|i| b.unit(&format!("h.{i}"), block)).collect::<Result<_>>()?,
            head: Linear::with_bias(&b.pp("head"), WIDTH, VOCABULARY)?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.norms[0].forward(x)?)?)?;
        let y = self.mlp.forward(&self.norms[1].forward(&x)?)?;
        let y = candle_core::Module::forward(&self.adapter, &y)?
            .broadcast_mul(&self.scale.tensor()?)?;
        Ok((&x + y)?)
    }
}

impl Module for Gpt {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&x)
    }
}
