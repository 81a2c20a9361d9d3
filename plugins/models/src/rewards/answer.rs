//! The reward of right answers.

use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{RewardConfig, RewardFunction, RewardedAnswer};
use crate::matching::{Match, Matcher, Take};

/// Rewards an answer with 1 if it equals the row's column `answer` (a text, a number or a list of
/// accepted answers), else with 0:
/// `{ type = "answer", match = "numeric", filter = "#### (\\d+)" }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct AnswerReward {
    /// When an answer is right: `"exact"`, `"contains"`, `"regex"` or `"numeric"`, as in the
    /// callback `answers`.
    #[default(Match::Exact)]
    pub r#match: Match,
    /// A regular expression that takes a part of the answer: its first group, or all that it
    /// matches. An answer without a match is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Which match of `filter` is taken: `"first"` or `"last"`.
    #[default(Take::First)]
    pub take: Take,
    /// Whether `"exact"`, `"contains"` and `"regex"` do not distinguish capital letters.
    pub ignore_case: bool,
}

#[typetag::serde(name = "answer")]
impl RewardConfig for AnswerReward {
    fn build(&self) -> Result<Box<dyn RewardFunction>> {
        let matcher =
            Matcher::new(self.r#match, self.filter.as_deref(), self.take, self.ignore_case);
        Ok(Box::new(Matching(matcher.map_err(Error::Config)?)))
    }
}

fulgurite_config::register_plugin!(
    "reward",
    "answer",
    "Rewards answers that are those of the data",
    "{ type = \"answer\", match = \"numeric\" }",
    AnswerReward
);

struct Matching(Matcher);

impl RewardFunction for Matching {
    fn flaw(&self, columns: &Map<String, Value>) -> Option<String> {
        match columns.get("answer") {
            None => Some("has no `answer`, which the reward \"answer\" compares with".to_owned()),
            Some(answer) => self.0.expected(answer).err(),
        }
    }

    fn score(&self, answers: &[RewardedAnswer]) -> Result<Vec<f64>> {
        let score = |answer: &RewardedAnswer| {
            let expected = answer.columns.get("answer").unwrap_or(&Value::Null);
            let expected = self.0.expected(expected);
            let expected = expected.map_err(|flaw| Error::Data(format!("a row {flaw}")))?;
            Ok(f64::from(u8::from(self.0.is_right(&expected, answer.text))))
        };
        answers.iter().map(score).collect()
    }
}
