//! A Llama decoder with Hugging Face's parameter names.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::prelude::*;

/// The shape of a Llama, with the names of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
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

/// Larger sizes are refused as mistakes. Smaller ones may still not fit into memory.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 14;
const MAX_HEADS: usize = 1 << 14;
const MAX_POSITIONS: usize = 1 << 27;

impl LlamaConfig {
    /// Checks the keys, also against data with sequences of `seq_len` ids below `ids`.
    pub fn check(&self, seq_len: usize, ids: usize) -> Result<()> {
        self.check_sizes()?;
        self.check_numbers()?;
        let positions = self.max_position_embeddings;
        if seq_len > positions {
            let message = format!("must be at least data.seq_len = {seq_len}, found {positions}");
            return wrong("max_position_embeddings", message);
        }
        match self.vocab_size.filter(|&vocab_size| vocab_size < ids) {
            Some(vocab_size) => {
                let message = format!(
                    "must be above the data's ids, which go up to {}, found {vocab_size}; or are data.path, \
                     data.token_dtype or data.tokenizer other than meant?",
                    ids - 1
                );
                wrong("vocab_size", message)
            }
            None => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        for (key, value, most) in [
            ("vocab_size", self.vocab_size.unwrap_or(1), MAX_POSITIONS),
            ("hidden_size", self.hidden_size, MAX_WIDTH),
            ("intermediate_size", self.intermediate_size, MAX_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", heads, MAX_HEADS),
            ("num_key_value_heads", kv_heads.unwrap_or(1), MAX_HEADS),
            ("head_dim", self.head_dim.unwrap_or(1), MAX_WIDTH),
            ("max_position_embeddings", self.max_position_embeddings, MAX_POSITIONS),
        ] {
            if !(1..=most).contains(&value) {
                return wrong(key, format!("must be from 1 to {most}, found {value}"));
            }
        }
        if let Some(kv_heads) = kv_heads.filter(|&n| !heads.is_multiple_of(n)) {
            let message =
                format!("must divide model.num_attention_heads = {heads}, found {kv_heads}");
            return wrong("num_key_value_heads", message);
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(heads) {
            let message = format!(
                "{} is not divisible by model.num_attention_heads = {heads}; change one of them, or \
                 set model.head_dim",
                self.hidden_size
            );
            return wrong("hidden_size", message);
        }
        if !self.head_dim().is_multiple_of(2) {
            let message = format!(
                "must be even for rotary embeddings, found {} (by default model.hidden_size / \
                 model.num_attention_heads)",
                self.head_dim()
            );
            return wrong("head_dim", message);
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        for (key, value, most) in [
            ("rms_norm_eps", self.rms_norm_eps, 1.0),
            ("rope_theta", self.rope_theta, 1e30),
            ("initializer_range", self.initializer_range, 1e3),
        ] {
            if !(0.0..=most).contains(&value) {
                return wrong(key, format!("must be a number from 0 to {most:?}, found {value:?}"));
            }
        }
        if self.rope_theta <= 0.0 {
            return wrong("rope_theta", format!("must be above 0, found {:?}", self.rope_theta));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let message = format!("must be at least 0 and below 1, found {:?}", self.dropout);
            return wrong("dropout", message);
        }
        Ok(())
    }

    fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    fn attention(&self) -> Result<AttentionConfig> {
        let num_heads = self.num_attention_heads;
        let head_dim = self.head_dim();
        Ok(AttentionConfig {
            hidden_size: self.hidden_size,
            num_heads,
            num_kv_heads: self.num_key_value_heads.unwrap_or(num_heads),
            head_dim,
            qkv_bias: false,
            rope: Some(Rope::new(head_dim, self.rope_theta)?),
            init: Some(self.init()),
            window: None,
        })
    }

    fn init(&self) -> Init {
        Init::Normal { mean: 0.0, std: self.initializer_range }
    }
}

fn wrong<T>(key: &str, message: String) -> Result<T> {
    Err(Error::Config(format!("`model.{key}`: {message}")))
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
        let y = self.dropout[0].forward(&y)?;
        let (normalized, x) = self.post_attention_layernorm.forward_residual(&y, x)?;
        let y = self.mlp.forward(&normalized)?;
        Ok((x + self.dropout[1].forward(&y)?)?)
    }
}

/// Declares which outputs each module gets, so that a tensor-parallel plan that does not fit is
/// refused before ranks start.
fn declare_edges(b: &ModuleBuilder, layers: usize) {
    // The modules whose outputs were last added to the residual stream.
    let mut stream = vec!["model.embed_tokens".to_owned()];
    for i in 0..layers {
        let within = |name: &str| format!("model.layers.{i}.{name}");
        let edge = |from: &str, to: &str| b.edge(&[within(from)], &within(to));
        b.edge(&stream, &within("input_layernorm"));
        edge("input_layernorm", "self_attn");
        edge("self_attn", "attn_dropout");
        stream.push(within("attn_dropout"));
        b.edge(&stream, &within("post_attention_layernorm"));
        edge("post_attention_layernorm", "mlp");
        edge("mlp", "mlp_dropout");
        stream = vec![within("attn_dropout"), within("mlp_dropout")];
    }
    b.edge(&stream, "model.norm");
    b.edge(&["model.norm"], "lm_head");
    b.edge_to_loss(&["lm_head"]);
}

/// A Llama decoder from token ids to logits.
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
        declare_edges(b, cfg.num_hidden_layers);
        let max_position_embeddings = cfg.max_position_embeddings;
        Ok(Self { embed_tokens, layers, norm, lm_head, max_position_embeddings })
    }

    /// Returns the logits (`[batch, time, vocab_size]`) of the token after each of `ids`
    /// (`[batch, time]`).
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(ids)?)
    }

    /// Returns the cross entropy of `targets`, the tokens after `ids`.
    pub fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Loss> {
        linear_cross_entropy(&self.lm_head, &self.hidden(ids)?, targets)
    }

    /// Returns the [`loss`](Self::loss), and the most likely token after each of `ids`.
    pub fn evaluate(&self, ids: &Tensor, targets: &Tensor) -> Result<(Loss, Tensor)> {
        let hidden = self.hidden(ids)?;
        let loss = linear_cross_entropy(&self.lm_head, &hidden, targets)?;
        Ok((loss, linear_predicted_classes(&self.lm_head, &hidden)?))
    }

    /// Returns the normalised output of the last layer.
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
