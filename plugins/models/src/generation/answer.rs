//! [`Answer`].

use serde::{Deserialize, Serialize};

/// A generated continuation of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The prompt, by its [index](super::Prompt::index).
    pub prompt: u64,
    /// Which of the answers to this prompt.
    pub sample: usize,
    /// The new tokens, with the one that ended it.
    pub ids: Vec<u32>,
    /// The text of the new tokens, up to a stop text; `None` without a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub end: End,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Its last token is an end token.
    EndToken,
    /// Its text came to a stop text.
    Stop,
    /// It has the most tokens.
    Length,
}
