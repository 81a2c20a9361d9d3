//! Rewards of answers, which [`Grpo`](crate::Grpo) learns from.

mod answer;
mod pattern;
mod program;

use candle_core::Device;
use fulgurite_config::{PluginValue, plugin_kind};
use fulgurite_error::{Error, Result};
use serde_json::{Map, Value};

pub use answer::AnswerReward;
pub use pattern::PatternReward;
pub use program::ProgramReward;

/// The kind of these plugins in the registry.
const KIND: &str = "reward";
/// The key that selects them.
const KEY: &str = "model.grpo.rewards";

/// The configuration of a reward: an item of `model.grpo.rewards`.
///
/// A crate adds a reward of its own as a plugin of the kind `"reward"`:
///
/// ```
/// use fulgurite_models::{RewardConfig, RewardFunction, RewardedAnswer};
/// use serde::{Deserialize, Serialize};
///
/// /// Rewards short answers: `{ type = "brevity", characters = 80 }`.
/// #[derive(Debug, Serialize, Deserialize)]
/// #[serde(deny_unknown_fields)]
/// struct Brevity { characters: usize }
///
/// #[typetag::serde(name = "brevity")]
/// impl RewardConfig for Brevity {
///     fn build(&self) -> fulgurite::core::Result<Box<dyn RewardFunction>> {
///         Ok(Box::new(Shortest(self.characters)))
///     }
/// }
/// fulgurite::core::register_plugin!("reward", "brevity", "Rewards short answers", "");
///
/// struct Shortest(usize);
///
/// impl RewardFunction for Shortest {
///     fn score(&self, answers: &[RewardedAnswer]) -> fulgurite::core::Result<Vec<f64>> {
///         let is_short = |answer: &RewardedAnswer| answer.text.chars().count() <= self.0;
///         Ok(answers.iter().map(|answer| f64::from(u8::from(is_short(answer)))).collect())
///     }
/// }
/// ```
#[typetag::serde(tag = "type")]
pub trait RewardConfig: std::fmt::Debug + Send + Sync {
    /// Returns the reward.
    ///
    /// # Errors
    /// If an option is wrong.
    fn build(&self) -> Result<Box<dyn RewardFunction>>;
}

plugin_kind!(dyn RewardConfig, KIND, "model.grpo.rewards");

/// An answer to reward.
#[derive(Debug, Clone, Copy)]
pub struct RewardedAnswer<'a> {
    /// The columns of the prompt's row: `prompt` or `messages`, `answer` and others
    /// (`data.columns`).
    pub columns: &'a Map<String, Value>,
    /// The model's answer, up to a stop text, without special tokens.
    pub text: &'a str,
    /// Whether the answer ended by itself, not at `max_new_tokens`.
    pub is_complete: bool,
}

/// Scores answers.
///
/// Each data-parallel rank scores its own answers, so equal answers must get equal scores on any
/// rank and beside any others. Of the ranks that compute the same answers together (tensor
/// parallelism), the first one scores.
pub trait RewardFunction: Send + Sync {
    /// Returns the flaw of a row whose answers cannot be scored, as the end of a sentence. Called
    /// for each row before training.
    fn flaw(&self, columns: &Map<String, Value>) -> Option<String> {
        let _ = columns;
        None
    }

    /// Takes the device of the model that learns. Called once, before answers.
    fn set_device(&mut self, device: &Device) {
        let _ = device;
    }

    /// Returns the score of each answer, a finite number.
    ///
    /// # Errors
    /// If an answer cannot be scored, which ends the run.
    fn score(&self, answers: &[RewardedAnswer]) -> Result<Vec<f64>>;
}

/// The rewards of a run, whose weighted sum is learned from.
pub(crate) struct Rewards {
    functions: Vec<Box<dyn RewardFunction>>,
    /// The name of each in metrics.
    names: Vec<String>,
    weights: Vec<f64>,
}

impl std::fmt::Debug for Rewards {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.names).finish()
    }
}

impl Rewards {
    /// Builds the rewards of `model.grpo.rewards` and `model.grpo.reward_weights`.
    ///
    /// # Errors
    /// If the list is empty, a plugin or an option is wrong, or the weights do not fit.
    pub(crate) fn new(rewards: &[PluginValue], weights: &[f64]) -> Result<Self> {
        let wrong = |message: String| Err(Error::Config(message));
        if rewards.is_empty() {
            return wrong(format!(
                "`{KEY}`: there is none; name at least one, as [{{ type = \"answer\" }}]"
            ));
        }
        if !weights.is_empty() && weights.len() != rewards.len() {
            return wrong(format!(
                "`model.grpo.reward_weights`: expected one for each of the {} rewards, found {}",
                rewards.len(),
                weights.len()
            ));
        }
        if let Some(weight) = weights.iter().find(|weight| !weight.is_finite()) {
            return wrong(format!("`model.grpo.reward_weights`: expected numbers, found {weight}"));
        }
        let (mut functions, mut names) = (Vec::new(), Vec::<String>::new());
        for (i, reward) in rewards.iter().enumerate() {
            let key = format!("{KEY}[{i}]");
            let config: Box<dyn RewardConfig> = reward.build(KIND, &key)?;
            functions.push(config.build().map_err(|error| match error {
                Error::Config(message) => Error::Config(format!("`{key}`: {message}")),
                error => error,
            })?);
            let same = rewards[..i].iter().filter(|other| other.name == reward.name).count();
            names.push(match same {
                0 => format!("reward_{}", reward.name),
                n => format!("reward_{}_{}", reward.name, n + 1),
            });
        }
        let weights = match weights {
            [] => vec![1.0; functions.len()],
            given => given.to_vec(),
        };
        Ok(Self { functions, names, weights })
    }

    /// Tells the rewards the device of the model that learns.
    pub(crate) fn set_device(&mut self, device: &Device) {
        self.functions.iter_mut().for_each(|function| function.set_device(device));
    }

    /// The name of each reward in metrics.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// The flaw of a row whose answers cannot be scored.
    pub(crate) fn flaw(&self, columns: &Map<String, Value>) -> Option<String> {
        self.functions.iter().find_map(|function| function.flaw(columns))
    }

    /// The scores of answers by each reward, `[rewards][answers]`.
    ///
    /// # Errors
    /// As [`RewardFunction::score`], and if there are too few scores or one is not finite.
    pub(crate) fn scores(&self, answers: &[RewardedAnswer]) -> Result<Vec<Vec<f64>>> {
        let all = self.functions.iter().zip(&self.names).map(|(function, name)| {
            let scores = function.score(answers)?;
            let flaw = match scores.iter().find(|score| !score.is_finite()) {
                _ if scores.len() != answers.len() => {
                    format!("{} for {} answers", scores.len(), answers.len())
                }
                Some(score) => format!("{score}, which is no finite number"),
                None => return Ok(scores),
            };
            Err(Error::other(format!("{name}: the reward returned the scores {flaw}")))
        });
        all.collect()
    }

    /// The weighted sums of scores, one for each answer.
    pub(crate) fn totals(&self, scores: &[Vec<f64>]) -> Vec<f64> {
        let answers = scores.first().map_or(0, Vec::len);
        let total = |i: usize| scores.iter().zip(&self.weights).map(|(of, w)| w * of[i]).sum();
        (0..answers).map(total).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(rewards: &[PluginValue], weights: &[f64]) -> String {
        Rewards::new(rewards, weights).unwrap_err().to_string()
    }

    #[test]
    fn wrong_rewards_are_named() {
        let answer = || PluginValue::new("answer");
        assert!(message(&[], &[]).starts_with("`model.grpo.rewards`: there is none"));
        assert!(message(&[PluginValue::new("anser")], &[]).contains("did you mean `answer`"));
        assert!(message(&[answer().with("mach", "exact")], &[]).contains("`match`"));
        assert!(message(&[answer()], &[1.0, 2.0]).contains("expected one for each of the 1"));
        assert!(message(&[answer()], &[f64::NAN]).contains("expected numbers"));
        let wrong = PluginValue::new("pattern").with("pattern", "(");
        assert!(message(&[answer(), wrong], &[]).starts_with("`model.grpo.rewards[1]`: `pattern`"));
    }

    #[test]
    fn examples_of_rewards_can_be_built() {
        let all = fulgurite_config::registry::plugins();
        let rewards: Vec<_> = all.iter().filter(|plugin| plugin.kind == KIND).collect();
        assert!(rewards.len() >= 3);
        for reward in rewards {
            let table: toml::Table =
                toml::from_str(&format!("reward = {}", reward.example)).unwrap();
            let value: PluginValue = table["reward"].clone().try_into().unwrap();
            assert_eq!(value.name, reward.name);
            match Rewards::new(&[value], &[]) {
                // The example names a model that is not there.
                Err(error) if reward.name == "model" => {
                    assert!(error.to_string().contains("there is no such folder"), "{error}");
                }
                found => drop(found.unwrap()),
            }
        }
    }

    #[test]
    fn totals_are_weighted_sums() {
        let pattern = |text: &str| PluginValue::new("pattern").with("pattern", text);
        let rewards = Rewards::new(&[pattern("a"), pattern("b")], &[1.0, -0.5]).unwrap();
        assert_eq!(rewards.names(), ["reward_pattern", "reward_pattern_2"]);
        let columns = Map::new();
        let answers = ["a", "ab", "c"].map(|text| RewardedAnswer {
            columns: &columns,
            text,
            is_complete: true,
        });
        let scores = rewards.scores(&answers).unwrap();
        assert_eq!(rewards.totals(&scores), [1.0, 0.5, 0.0]);
    }

    struct Fixed(Vec<f64>);

    impl RewardFunction for Fixed {
        fn score(&self, _: &[RewardedAnswer]) -> Result<Vec<f64>> {
            Ok(self.0.clone())
        }
    }

    #[test]
    fn scores_that_are_none_are_errors() {
        let columns = Map::new();
        let answers = [RewardedAnswer { columns: &columns, text: "", is_complete: true }];
        for (scores, text) in [(vec![], "0 for 1 answers"), (vec![f64::NAN], "no finite number")] {
            let functions: Vec<Box<dyn RewardFunction>> = vec![Box::new(Fixed(scores))];
            let names = vec!["reward_fixed".to_owned()];
            let rewards = Rewards { functions, names, weights: vec![1.0] };
            let error = rewards.scores(&answers).unwrap_err().to_string();
            assert!(error.starts_with("reward_fixed: ") && error.contains(text), "{error}");
        }
    }
}
