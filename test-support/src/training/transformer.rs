//! The model.

use candle_core::Tensor;
use fulgurite_core::Result;
use fulgurite_core::module::{Module, ModuleBuilder, Unit};
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Dropout, Embedding, LayerNorm, Linear, RmsNorm, Rope,
    SwiGluMlp,
};
use fulgurite_core::parameter::{Init, Parameter};

/// Number of token ids. Neither it nor the width is divisible by the numbers of ranks.
pub const VOCABULARY: usize = 10;
const WIDTH: usize = 7;

/// One block: a unit.
pub struct Block {
    norm: RmsNorm,
    attention: CausalSelfAttention,
    dropout: Dropout,
    post_norm: LayerNorm,
    mlp: SwiGluMlp,
    /// One element, so that all ranks except one hold none of it; used as a plain tensor.
    scale: Parameter,
}

impl Block {
    fn new(b: &ModuleBuilder, rope: Rope) -> Result<Self> {
        let attention = AttentionConfig {
            num_kv_heads: 1,
            head_dim: 4,
            qkv_bias: true,
            rope: Some(rope),
            ..AttentionConfig::new(WIDTH, 2)
        };
        Ok(Self {
            norm: RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?,
            attention: CausalSelfAttention::new(&b.pp("self_attn"), &attention)?,
            dropout: Dropout::new(&b.pp("dropout"), 0.1)?,
            post_norm: LayerNorm::new(&b.pp("post_norm"), WIDTH, 1e-5)?,
            mlp: SwiGluMlp::new(&b.pp("mlp"), WIDTH, 10)?,
            scale: b.parameter("scale", [1], Init::ONES)?,
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let attended = self.attention.forward(&self.norm.forward(x)?)?;
        let x = (x + self.dropout.forward(&attended)?)?;
        let hidden = self.mlp.forward(&self.post_norm.forward(&x)?)?;
        Ok((&x + hidden.broadcast_mul(&self.scale.tensor()?)?)?)
    }
}

/// Embedding, three blocks, norm, and a head that shares the embedding.
pub struct Transformer {
    embedding: Embedding,
    layers: Vec<Unit<Block>>,
    norm: RmsNorm,
    head: Linear,
}

impl Transformer {
    pub fn new(b: &ModuleBuilder) -> Result<Self> {
        let embedding = Embedding::new(&b.pp("embedding"), VOCABULARY, WIDTH)?;
        let rope = Rope::new(4, 1e4)?;
        let layers = (0..3)
            .map(|i| b.unit(&format!("layers.{i}"), |b| Block::new(b, rope.clone())))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::new(&b.pp("norm"), WIDTH, 1e-6)?;
        let head = Linear::tied(&b.pp("lm_head"), embedding.weight())?;
        Ok(Self { embedding, layers, norm, head })
    }
}

impl Module for Transformer {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }
}
