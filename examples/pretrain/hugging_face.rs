//! Reading the configuration of a Llama from a Hugging Face directory.

use std::path::Path;

use serde::Deserialize;

use super::llama::LlamaConfig;
use super::prelude::*;

/// The keys of `config.json` that the model depends on.
#[derive(Deserialize)]
struct HuggingFaceConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    /// The key of transformers 4.
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    /// The key of transformers 5.
    rope_parameters: Option<RopeParameters>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(default = "default_rope")]
    rope_type: String,
}

fn silu() -> String {
    "silu".to_owned()
}

fn default_rope() -> String {
    "default".to_owned()
}

/// Takes the model's shape from `directory/config.json`.
///
/// # Errors
/// If the file is missing or malformed, or asks for something this example's model does not have.
pub fn read_config(config: &mut LlamaConfig, directory: &Path) -> Result<()> {
    let path = directory.join("config.json");
    let wrong = |what: String| Error::Config(format!("{}: {what}", path.display()));
    let text = files::read_regular_text(&path, 16 << 20)
        .map_err(|e| match e {
            Error::Io { source, .. } => source.to_string(),
            e => e.to_string(),
        })
        .map_err(|e| wrong(format!("{e}; `model.from_pretrained` is to name a folder with it")))?;
    let hf: HuggingFaceConfig = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let (rope_theta, rope_type) = match hf.rope_parameters {
        Some(rope) => (rope.rope_theta, rope.rope_type),
        None => (None, default_rope()),
    };
    let unsupported = [
        (hf.model_type != "llama", format!("model_type = \"{}\"", hf.model_type)),
        (hf.hidden_act != "silu", format!("hidden_act = \"{}\"", hf.hidden_act)),
        (hf.attention_bias, "attention_bias = true".to_owned()),
        (hf.mlp_bias, "mlp_bias = true".to_owned()),
        (hf.rope_scaling.is_some_and(|v| !v.is_null()), "rope_scaling".to_owned()),
        (rope_type != "default", format!("rope_type = \"{rope_type}\"")),
    ];
    if let Some((_, what)) = unsupported.iter().find(|(present, _)| *present) {
        return Err(wrong(format!("{what} is not supported; the model is a plain Llama")));
    }
    let read = LlamaConfig {
        vocab_size: Some(hf.vocab_size),
        hidden_size: hf.hidden_size,
        intermediate_size: hf.intermediate_size,
        num_hidden_layers: hf.num_hidden_layers,
        num_attention_heads: hf.num_attention_heads,
        num_key_value_heads: hf.num_key_value_heads,
        head_dim: hf.head_dim,
        max_position_embeddings: hf.max_position_embeddings,
        rms_norm_eps: hf.rms_norm_eps,
        rope_theta: rope_theta.or(hf.rope_theta).unwrap_or(10_000.0),
        tie_word_embeddings: hf.tie_word_embeddings,
        ..config.clone()
    };
    // Otherwise a key with another value would be ignored silently.
    let table = |c: &LlamaConfig| serde_json::to_value(c).map_err(Error::other);
    let (set, defaults, found) = (table(config)?, table(&LlamaConfig::default())?, table(&read)?);
    for (key, value) in set.as_object().into_iter().flatten() {
        if value != &defaults[key] && value != &found[key] {
            return Err(wrong(format!(
                "`model.{key}` is {} there and {value} in the configuration; leave it out",
                found[key]
            )));
        }
    }
    *config = read;
    Ok(())
}
