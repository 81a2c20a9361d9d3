//! The decoder of the benchmarks: a Llama whose sizes are options.

use clap::{Args, ValueEnum};
use fulgurite_core::module::stage;
use fulgurite_core::nn::{
    AttentionConfig, CausalSelfAttention, Embedding, Linear, RmsNorm, Rope, SwiGluMlp,
};
use fulgurite_core::parameter::Init;
use serde::{Deserialize, Serialize};

use super::ranks::at_least_one;
use fulgurite::prelude::*;

/// A named size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Workload {
    /// 0.98 M parameters, 4 layers of 128, 4 sequences of 64 tokens: measures overhead
    Tiny,
    /// 29.9 M parameters, 8 layers of 512, 4 sequences of 256 tokens
    #[value(name = "30m")]
    M30,
    /// 93 M parameters, 12 layers of 768, 1 sequence of 16 tokens: weights and AdamW's state are
    /// 1.04 GiB
    Ckpt,
    /// 1.24 billion parameters, 16 layers of 2048, 8 sequences of 2048 tokens: the layers of Llama
    /// 3.2 1B. The vocabulary is 65536, because the head has its own weights. For GPUs
    #[value(name = "llama1b")]
    Llama1b,
}

/// Options for the size of a decoder.
#[derive(Debug, Clone, Args)]
pub(crate) struct SizeOptions {
    /// The sizes to start from; if not given, 30m to train and ckpt for checkpoints
    #[arg(long, value_enum)]
    workload: Option<Workload>,
    /// Number of tokens there are; this and the sizes below are the workload's unless given
    #[arg(long, value_parser = at_least_one)]
    vocab: Option<usize>,
    /// Width of the residual stream
    #[arg(long, value_parser = at_least_one)]
    dim: Option<usize>,
    /// Number of layers
    #[arg(long, value_parser = at_least_one)]
    layers: Option<usize>,
    /// Number of query heads
    #[arg(long, value_parser = at_least_one)]
    heads: Option<usize>,
    /// Number of key and value heads; if only the number of query heads is given, as many
    #[arg(long, value_parser = at_least_one)]
    kv_heads: Option<usize>,
    /// Width inside the MLPs
    #[arg(long, value_parser = at_least_one)]
    ffn: Option<usize>,
}

/// The sizes of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs)] // the options' names
pub(crate) struct DecoderSize {
    pub vocab: usize,
    pub dim: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub ffn: usize,
}

impl SizeOptions {
    /// The workload, or the default.
    pub(crate) fn workload(&self, default: Workload) -> Workload {
        self.workload.unwrap_or(default)
    }

    /// The given sizes, completed from the workload.
    ///
    /// # Errors
    /// If the heads do not divide the width.
    pub(crate) fn decoder(&self, default: Workload) -> Result<DecoderSize> {
        let [vocab, dim, layers, heads, kv_heads, ffn] = match self.workload(default) {
            Workload::Tiny => [512, 128, 4, 4, 4, 384],
            Workload::M30 => [4096, 512, 8, 8, 8, 1408],
            Workload::Ckpt => [4096, 768, 12, 12, 12, 2112],
            Workload::Llama1b => [65536, 2048, 16, 32, 8, 8192],
        };
        let kv_heads = self.heads.unwrap_or(kv_heads);
        let heads = self.heads.unwrap_or(heads);
        let size = DecoderSize {
            vocab: self.vocab.unwrap_or(vocab),
            dim: self.dim.unwrap_or(dim),
            layers: self.layers.unwrap_or(layers),
            heads,
            kv_heads: self.kv_heads.unwrap_or(kv_heads),
            ffn: self.ffn.unwrap_or(ffn),
        };
        if !size.dim.is_multiple_of(2 * heads) {
            return Err(Error::Config(format!(
                "--dim {} does not divide into --heads {heads} of an even width",
                size.dim
            )));
        }
        Ok(size)
    }
}

struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: CausalSelfAttention,
    post_attention_layernorm: RmsNorm,
    mlp: SwiGluMlp,
}

impl Module for DecoderLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = residual(x, &self.input_layernorm, &self.self_attn)?;
        residual(&x, &self.post_attention_layernorm, &self.mlp)
    }
}

/// The model.
pub(crate) struct Decoder {
    embed_tokens: Embedding,
    layers: Vec<Unit<DecoderLayer>>,
    norm: RmsNorm,
    lm_head: Linear,
}

impl Decoder {
    /// Describes the model; allocates nothing.
    ///
    /// # Errors
    /// If the sizes contradict each other.
    pub(crate) fn new(b: &ModuleBuilder, size: &DecoderSize) -> Result<Self> {
        let DecoderSize { vocab, dim, layers, heads, kv_heads, ffn } = *size;
        let init = Init::Normal { mean: 0.0, std: 0.02 };
        let attention = AttentionConfig {
            num_kv_heads: kv_heads,
            head_dim: dim / heads,
            rope: Some(Rope::new(dim / heads, 10_000.0)?),
            init: Some(init),
            ..AttentionConfig::new(dim, heads)
        };
        let layer = |b: &ModuleBuilder| -> Result<DecoderLayer> {
            Ok(DecoderLayer {
                input_layernorm: RmsNorm::new(&b.pp("input_layernorm"), dim, 1e-5)?,
                self_attn: CausalSelfAttention::new(&b.pp("self_attn"), &attention)?,
                post_attention_layernorm: RmsNorm::new(
                    &b.pp("post_attention_layernorm"),
                    dim,
                    1e-5,
                )?,
                mlp: SwiGluMlp::with_init(&b.pp("mlp"), dim, ffn, init)?,
            })
        };
        let model = b.pp("model");
        let embed_tokens = Embedding::with_init(&model.pp("embed_tokens"), vocab, dim, init)?;
        let layers: Vec<_> = (0..layers)
            .map(|i| model.unit(&format!("layers.{i}"), layer))
            .collect::<Result<_>>()?;
        model.stages(&["embed_tokens"], &layers);
        Ok(Self {
            embed_tokens,
            layers,
            norm: RmsNorm::new(&model.pp("norm"), dim, 1e-5)?,
            lm_head: Linear::with_init(&b.pp("lm_head"), dim, vocab, init)?,
        })
    }
}

impl Decoder {
    /// The cross entropy of the targets that follow the token ids.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    pub(crate) fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Loss> {
        let embed = || self.embed_tokens.forward(ids);
        let x = stage::through(&self.layers, embed, |layer, x| layer.forward(x))?;
        linear_cross_entropy(&self.lm_head, &self.norm.forward(&x)?, targets)
    }
}
