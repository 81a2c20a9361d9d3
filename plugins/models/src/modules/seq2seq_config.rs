//! The table `[model.generation]` of `seq2seq_lm`.

use fulgurite_config::to_table;
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{ModelConfig, Reader};
use crate::generation::{BeamSearch, Generation, Sampling};

/// The table `[model.generation]`: how `seq2seq_lm` writes texts in `predict`.
///
/// ```toml
/// [model.generation]
/// max_new_tokens = 128
/// repetition_penalty = 1.2
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct WritingConfig {
    /// The most tokens of a text.
    #[default(Generation::default().max_new_tokens)]
    pub max_new_tokens: usize,
    /// Divides the positive logits of tokens in the text so far, and multiplies their negative
    /// ones; 1 changes nothing.
    #[default(Sampling::default().repetition_penalty)]
    pub repetition_penalty: f64,
    /// Number of texts that are continued at a time, of which the most likely one is written: beam
    /// search, with `early_stopping=False` of `transformers`. 1 takes the most likely token.
    #[default(BeamSearch::default().num_beams)]
    pub num_beams: usize,
    /// The exponent of a text's length, by which its log-probability is divided in a beam search.
    /// Above 0 longer texts gain.
    #[default(BeamSearch::default().length_penalty)]
    pub length_penalty: f64,
}

impl WritingConfig {
    /// Reads the table of a model's configuration.
    ///
    /// # Errors
    /// If a key is unknown, or a value out of its range.
    pub(super) fn of(config: &ModelConfig) -> Result<Self> {
        let table = Reader::new(config).table("generation")?.cloned().unwrap_or_default();
        let own: Self = fulgurite_config::parse_at("model.generation", to_table(&table)?)?;
        for (key, value, most) in
            [("max_new_tokens", own.max_new_tokens, 1 << 20), ("num_beams", own.num_beams, 1 << 10)]
        {
            if value > most {
                let message = format!("must be at most {most}, found {value}");
                return Err(Error::Config(format!("`model.generation.{key}`: {message}")));
            }
        }
        match own.generation().check().and_then(|()| own.search().check()) {
            Err(Error::Config(message)) => {
                Err(Error::Config(message.replacen('`', "`model.generation.", 1)))
            }
            checked => checked.map(|()| own),
        }
    }

    /// The beam search.
    pub(super) fn search(&self) -> BeamSearch {
        BeamSearch { num_beams: self.num_beams, length_penalty: self.length_penalty }
    }

    /// How texts are written, each token the most likely one; without end tokens.
    pub(super) fn generation(&self) -> Generation {
        let repetition_penalty = self.repetition_penalty;
        Generation {
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { repetition_penalty, ..Sampling::default() },
            ..Generation::default()
        }
    }
}
