//! A Llama decoder with Hugging Face's parameter names.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::prelude::*;

/// The shape of a Llama; the names are those of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LlamaConfig {
    /// Number of tokens; by default that of the tokenizer, rounded up to a multiple of 8.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLPs.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; by default that of query heads.
    pub num_key_value_heads: Option<usize>,
    /// Width of one head; by default `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// The longest sequence.
    pub max_position_embeddings: usize,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary position embedding.
    pub rope_theta: f64,
    /// Whether the output head shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Dropout after attention and MLP; 0 for none.
    pub dropout: f64,
    /// A directory in Hugging Face's format with configuration and weights. The keys above are then
    /// taken from it.
    pub from_pretrained: Option<PathBuf>,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            vocab_size: None,
            hidden_size: 128,
            intermediate_size: 352,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            head_dim: None,
            max_position_embeddings: 1024,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            dropout: 0.0,
            from_pretrained: None,
        }
    }
}

impl LlamaConfig {
    fn attention(&self) -> Result<AttentionConfig> {
        let num_heads = self.num_attention_heads;
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / num_heads.max(1));
        Ok(AttentionConfig {
            hidden_size: self.hidden_size,
            num_heads,
            num_kv_heads: self.num_key_value_heads.unwrap_or(num_heads),
            head_dim,
            qkv_bias: false,
            rope: Some(Rope::new(head_dim, self.rope_theta)?),
            init: Some(self.init()),
        })
    }

    fn init(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_range }
    }
}

struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: CausalSelfAttention,
    post_attention_layernorm: RmsNorm,
    mlp: SwiGluMlp,
    dropout: [Dropout; 2],
}

impl DecoderLayer {
    fn new(b: &ModuleBuilder, cfg: &LlamaConfig, attention: &AttentionConfig) -> Result<Self> {
        let norm = |name| RmsNorm::new(&b.pp(name), cfg.hidden_size, cfg.rms_norm_eps);
        let dropout = |name| Dropout::new(&b.pp(name), cfg.dropout);
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: CausalSelfAttention::new(&b.pp("self_attn"), attention)?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: SwiGluMlp::with_init(
                &b.pp("mlp"),
                cfg.hidden_size,
                cfg.intermediate_size,
                cfg.init(),
            )?,
            dropout: [dropout("attn_dropout")?, dropout("mlp_dropout")?],
        })
    }
}

impl Module for DecoderLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = self.self_attn.forward(&self.input_layernorm.forward(x)?)?;
        let x = (x + self.dropout[0].forward(&y)?)?;
        let y = self.mlp.forward(&self.post_attention_layernorm.forward(&x)?)?;
        Ok((x + self.dropout[1].forward(&y)?)?)
    }
}

/// The model: token ids in, logits out.
pub struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Unit<DecoderLayer>>,
    norm: RmsNorm,
    lm_head: Linear,
    max_position_embeddings: usize,
}

impl Llama {
    /// Describes the model; allocates nothing.
    pub fn new(cfg: &LlamaConfig, b: &ModuleBuilder) -> Result<Self> {
        let (model, attention) = (b.pp("model"), cfg.attention()?);
        let vocab_size = cfg.vocab_size.ok_or_else(|| {
            Error::Config("`model.vocab_size`: the data does not say; set it".to_owned())
        })?;
        let embed_tokens = Embedding::with_init(
            &model.pp("embed_tokens"),
            vocab_size,
            cfg.hidden_size,
            cfg.init(),
        )?;
        let layers = (0..cfg.num_hidden_layers)
            .map(|i| model.unit(&format!("layers.{i}"), |b| DecoderLayer::new(b, cfg, &attention)))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::new(&model.pp("norm"), cfg.hidden_size, cfg.rms_norm_eps)?;
        let head = b.pp("lm_head");
        let lm_head = if cfg.tie_word_embeddings {
            Linear::tied(&head, embed_tokens.weight())?
        } else {
            Linear::with_init(&head, cfg.hidden_size, vocab_size, cfg.init())?
        };
        let max_position_embeddings = cfg.max_position_embeddings;
        Ok(Self { embed_tokens, layers, norm, lm_head, max_position_embeddings })
    }

    /// The logits (`[batch, time, vocab_size]`) of the token that follows each of `ids`
    /// (`[batch, time]`).
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(ids)?)
    }

    /// The cross entropy of `targets`, the tokens that follow `ids`.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Loss> {
        linear_cross_entropy(&self.lm_head, &self.hidden(ids)?, targets)
    }

    /// The [`loss`](Self::loss), and the most likely token after each of `ids`.
    pub fn evaluate(&self, ids: &Tensor, targets: &Tensor) -> Result<(Loss, Tensor)> {
        let hidden = self.hidden(ids)?;
        let loss = linear_cross_entropy(&self.lm_head, &hidden, targets)?;
        Ok((loss, linear_predicted_classes(&self.lm_head, &hidden)?))
    }

    /// The last layer's output, normalised.
    fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        let (_, time) = ids.dims2()?;
        if time > self.max_position_embeddings {
            return Err(Error::other(format!(
                "a sequence of {time} tokens is longer than model.max_position_embeddings ({})",
                self.max_position_embeddings
            )));
        }
        let mut x = self.embed_tokens.forward(ids)?;
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        self.norm.forward(&x)
    }
}
