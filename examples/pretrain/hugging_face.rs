//! Reads the configuration of a Llama from a Hugging Face directory.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::llama::LlamaConfig;
use super::prelude::*;

/// The largest `config.json` that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// The weights of head and embedding, which may be shared.
const SHARED: [&str; 2] = ["lm_head.weight", "model.embed_tokens.weight"];

/// A table of `config.json`, read as in `transformers`: missing keys have defaults, and only some
/// keys may be `null`.
struct Table<'a> {
    values: &'a serde_json::Map<String, serde_json::Value>,
    file: &'a Path,
    /// The table's key and a dot, for messages.
    prefix: &'static str,
}

impl<'a> Table<'a> {
    fn wrong<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        Err(Error::Config(format!("{}: {message}", self.file.display())))
    }

    /// Returns the value of a key; `None` if it is missing.
    fn get<T: DeserializeOwned>(&self, key: &str, expected: &str) -> Result<Option<T>> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match serde_json::from_value(value.clone()) {
            Ok(value) => Ok(Some(value)),
            Err(_) => {
                let prefix = self.prefix;
                self.wrong(format!("`{prefix}{key}`: expected {expected}, found {value}"))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize> {
        match self.get(key, "a number of one or more")? {
            Some(size) => Ok(size),
            None => {
                self.wrong(format!("there is no `{key}`, which the model's shape follows from"))
            }
        }
    }

    /// Returns a size with a default; `None` if it is missing or `null`.
    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        Ok(self.get::<Option<usize>>(key, "a number or null")?.flatten())
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "a number; leave the key out for its default")
    }

    fn flag(&self, key: &str) -> Result<bool> {
        let expected = "true or false; leave the key out for its default, which is false";
        Ok(self.get(key, expected)?.unwrap_or(false))
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        self.get(key, "a text")
    }

    /// Returns a table; `None` if it is missing or `null`.
    fn table(&self, key: &str, prefix: &'static str) -> Result<Option<Table<'a>>> {
        match self.values.get(key) {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(serde_json::Value::Object(values)) => {
                Ok(Some(Table { values, file: self.file, prefix }))
            }
            Some(other) => self.wrong(format!("`{key}`: expected a table, found {other}")),
        }
    }

    /// Returns the base of the rotary embedding. Scaling is an error.
    fn rope_theta(&self) -> Result<f64> {
        // The key of transformers 4 overrides the one of transformers 5, as in transformers.
        let scaling =
            self.table("rope_scaling", "rope_scaling.")?.filter(|table| !table.values.is_empty());
        let rope = match scaling {
            Some(scaling) => Some(scaling),
            None => self.table("rope_parameters", "rope_parameters.")?,
        };
        let Some(rope) = rope else { return Ok(self.number("rope_theta")?.unwrap_or(10_000.0)) };
        for key in ["rope_type", "type"] {
            match rope.text(key)?.as_deref() {
                None => {}
                Some("default") => break,
                Some(kind) => {
                    let prefix = rope.prefix;
                    return self.unsupported(&format!("{prefix}{key} = \"{kind}\""));
                }
            }
        }
        let theta = rope.number("rope_theta")?;
        Ok(theta
            .map_or_else(|| self.number("rope_theta"), |theta| Ok(Some(theta)))?
            .unwrap_or(10_000.0))
    }

    fn unsupported<T>(&self, what: &str) -> Result<T> {
        self.wrong(format!("{what} is not supported; the model is a plain Llama"))
    }

    /// Refuses keys for features that the model lacks.
    fn check(&self) -> Result<()> {
        match self.text("model_type")?.as_deref() {
            Some("llama") => {}
            Some(other) => return self.unsupported(&format!("model_type = \"{other}\"")),
            None => return self.wrong("there is no `model_type`; expected \"llama\""),
        }
        if let Some(other) = self.text("hidden_act")?.filter(|name| name != "silu") {
            return self.unsupported(&format!("hidden_act = \"{other}\""));
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? {
                return self.unsupported(&format!("{key} = true"));
            }
        }
        if self.table("quantization_config", "quantization_config.")?.is_some() {
            return self.unsupported("quantization_config");
        }
        if let Some(dropout) = self.number("attention_dropout")?.filter(|dropout| *dropout != 0.0) {
            tracing::warn!(
                "{}: attention_dropout = {dropout} is not applied; `model.dropout` drops outputs of attention and MLP",
                self.file.display()
            );
        }
        Ok(())
    }
}

/// Returns whether head and embedding share a weight, if the configuration ties them. As in
/// transformers 5, they do not if the directory has two different weights.
fn is_tied(directory: &Path) -> Result<bool> {
    let source = checkpoint::open(directory)?;
    let [head, embedding] = SHARED;
    let has_both = SHARED.iter().all(|name| source.info(name).is_some());
    if !has_both || checkpoint::same_values(&*source, head, embedding)? {
        return Ok(true);
    }
    tracing::warn!(
        "{}: config.json says `tie_word_embeddings`, and `{head}` and `{embedding}` differ: they are not tied. Set it \
         to false",
        directory.display()
    );
    Ok(false)
}

/// Reads the model's shape from `directory/config.json`.
///
/// # Errors
/// If the file is missing or malformed, or needs a feature that this example's model lacks.
pub fn read_config(config: &mut LlamaConfig, directory: &Path) -> Result<()> {
    let file = directory.join("config.json");
    let found: serde_json::Value =
        checkpoint::read_json(&file, MAX_CONFIG).map_err(|e| match e {
            Error::Io { source, .. } => Error::Config(format!(
                "{}: {source}; `model.from_pretrained` is to name a folder with it",
                file.display()
            )),
            e => Error::Config(format!("`model.from_pretrained`: {e}")),
        })?;
    let wrong = |what: String| Error::Config(format!("{}: {what}", file.display()));
    let values = found.as_object().ok_or_else(|| wrong("expected a table".to_owned()))?;
    let hf = Table { values, file: &file, prefix: "" };
    hf.check()?;
    let read = LlamaConfig {
        vocab_size: Some(hf.size("vocab_size")?),
        hidden_size: hf.size("hidden_size")?,
        intermediate_size: hf.size("intermediate_size")?,
        num_hidden_layers: hf.size("num_hidden_layers")?,
        num_attention_heads: hf.size("num_attention_heads")?,
        num_key_value_heads: hf.optional_size("num_key_value_heads")?,
        head_dim: hf.optional_size("head_dim")?,
        max_position_embeddings: hf
            .get("max_position_embeddings", "a number of one or more")?
            .unwrap_or(2048),
        rms_norm_eps: hf.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: hf.rope_theta()?,
        tie_word_embeddings: hf.flag("tie_word_embeddings")? && is_tied(directory)?,
        ..config.clone()
    };
    // Unused here, but checked as in transformers, which also refuses NaN.
    hf.number("initializer_range")?;
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
