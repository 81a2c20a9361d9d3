//! The reward of answers of a form.

use fancy_regex::Regex;
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::{RewardConfig, RewardFunction, RewardedAnswer};

/// Rewards an answer with 1 if a regular expression is found in it, and with 0 otherwise:
/// `{ type = "pattern", pattern = "^<think>.*</think>" }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct PatternReward {
    /// The regular expression. `(?s)` at its beginning lets `.` match ends of lines.
    pub pattern: String,
}

#[typetag::serde(name = "pattern")]
impl RewardConfig for PatternReward {
    fn build(&self) -> Result<Box<dyn RewardFunction>> {
        let wrong = |error| Error::Config(format!("`pattern`: is no regular expression: {error}"));
        Ok(Box::new(Pattern(Regex::new(&self.pattern).map_err(wrong)?)))
    }
}

fulgurite_config::register_plugin!(
    "reward",
    "pattern",
    "Rewards answers in which a regular expression is found",
    "{ type = \"pattern\", pattern = \"^<think>\" }",
    PatternReward
);

struct Pattern(Regex);

impl RewardFunction for Pattern {
    fn score(&self, answers: &[RewardedAnswer]) -> Result<Vec<f64>> {
        // A pattern that takes too long finds nothing.
        let is_found = |text: &str| self.0.is_match(text).unwrap_or(false);
        Ok(answers.iter().map(|answer| f64::from(u8::from(is_found(answer.text)))).collect())
    }
}
