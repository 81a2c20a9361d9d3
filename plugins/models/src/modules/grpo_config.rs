//! The configuration of [`Grpo`](super::Grpo).

use std::ops::RangeInclusive;

use fulgurite_config::{ConfigType, PluginValue, to_table};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{ModelConfig, Reader};
use crate::generation::{Generation, Sampling};

/// The table `[model.grpo]`: how a model answers prompts, and how it learns from the rewards.
/// Defaults are as in TRL's `GRPOConfig`.
///
/// ```toml
/// [model.grpo]
/// samples = 8
/// max_new_tokens = 128
/// rewards = [{ type = "answer", match = "numeric" }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct GrpoConfig {
    /// The rewards of an answer, whose weighted sum counts: `"answer"`, `"pattern"`, `"program"` or
    /// `"model"` with their options, or a plugin of another crate.
    pub rewards: Vec<PluginValue>,
    /// The weight of each reward; by default 1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reward_weights: Vec<f64>,
    /// Answers to each prompt, which are compared with each other; at least 2.
    #[default(8)]
    pub samples: usize,
    /// The most tokens of an answer.
    #[default(512)]
    pub max_new_tokens: usize,
    /// Divisor of the logits, above 0. Probabilities in the loss follow it too.
    #[default(1.0)]
    pub temperature: f64,
    /// Samples from this many of the most likely tokens; 0 for all. Probabilities in the loss are
    /// of all tokens.
    pub top_k: usize,
    /// Samples from the fewest likely tokens whose probabilities add up to this; 1 for all.
    #[default(1.0)]
    pub top_p: f64,
    /// Texts that end an answer, whose text ends before them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// The loss. `"dapo"` weights each token alike, `"grpo"` each answer alike, and `"dr_grpo"`
    /// each token alike, divided by `max_new_tokens` instead of the tokens there are. `"cispo"`
    /// weights tokens as `"dapo"`, and the gradient of each token's log-probability by its ratio,
    /// up to `epsilon_high`.
    #[default(GrpoLoss::Dapo)]
    pub loss: GrpoLoss,
    /// The divisor of an advantage: the standard deviation of its group's rewards (`"group"`), of
    /// the rewards of all ranks (`"batch"`; needs `trainer.accumulate_grad_batches = 1`), or none
    /// (`"none"`).
    #[default(ScaleRewards::Group)]
    pub scale_rewards: ScaleRewards,
    /// The ratio of new and old probability: of each token (`"token"`), or of each answer
    /// (`"sequence"`), as in GSPO. An answer's ratio is the geometric mean of its tokens'.
    #[default(SamplingLevel::Token)]
    pub importance_sampling_level: SamplingLevel,
    /// How far the ratio of new and old probability counts below 1.
    #[default(0.2)]
    pub epsilon: f64,
    /// How far it counts above 1; by default `epsilon`. With `loss = "cispo"` the largest ratio
    /// itself, which must be set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epsilon_high: Option<f64>,
    /// The largest ratio that counts also where the advantage is negative; by default there is no
    /// such bound. Above `1 + epsilon_high`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<f64>,
    /// The weight of the divergence from the reference model; 0 does without such a model.
    pub beta: f64,
    /// Updates of the model with the same answers. Above 1, `trainer.accumulate_grad_batches` must
    /// be 1.
    #[default(1)]
    pub updates: usize,
    /// Whether answers that end at `max_new_tokens` are not learned from.
    pub mask_truncated: bool,
    /// Whether the model samples with the bits of the probabilities that it learns from, so that
    /// their ratio is exactly 1 before the first update. By default on the CPU; other devices
    /// cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_invariant: Option<bool>,
}

/// The weighting of tokens: `loss`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrpoLoss {
    /// Each token alike.
    Dapo,
    /// Each answer alike.
    Grpo,
    /// Each token alike, divided by the most tokens.
    DrGrpo,
    /// Each token alike, with the gradient of its log-probability times its ratio.
    Cispo,
}

/// The divisor of advantages: `scale_rewards`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// The standard deviation of the group's rewards.
    Group,
    /// The standard deviation of the rewards of all ranks.
    Batch,
    /// None.
    None,
}

/// The ratio of new and old probability: `importance_sampling_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplingLevel {
    /// Of each token.
    Token,
    /// Of each answer.
    Sequence,
}

impl ConfigType for GrpoLoss {
    fn describe() -> String {
        "`\"dapo\"`, `\"grpo\"`, `\"dr_grpo\"` or `\"cispo\"`".to_owned()
    }
}

impl ConfigType for ScaleRewards {
    fn describe() -> String {
        "`\"group\"`, `\"batch\"` or `\"none\"`".to_owned()
    }
}

impl ConfigType for SamplingLevel {
    fn describe() -> String {
        "`\"token\"` or `\"sequence\"`".to_owned()
    }
}

impl GrpoConfig {
    /// Reads the table of a model's configuration.
    ///
    /// # Errors
    /// If a key is unknown, or a value out of its range.
    pub(super) fn of(config: &ModelConfig) -> Result<Self> {
        let table = Reader::new(config).table("grpo")?.cloned().unwrap_or_default();
        let own: Self = fulgurite_config::parse_at("model.grpo", to_table(&table)?)?;
        own.check()?;
        Ok(own)
    }

    fn check(&self) -> Result<()> {
        let wrong = |key: &str, message: String| {
            Err(Error::Config(format!("`model.grpo.{key}`: {message}")))
        };
        if self.samples < 2 {
            let message = "must be at least 2: answers are compared with each other".to_owned();
            return wrong("samples", format!("{message}, found {}", self.samples));
        }
        if let Err(Error::Config(message)) = self.generation().check() {
            return Err(Error::Config(message.replacen('`', "`model.grpo.", 1)));
        }
        if self.temperature == 0.0 {
            return wrong("temperature", "must be above 0: answers must differ".to_owned());
        }
        if self.updates == 0 {
            return wrong("updates", "must be at least 1, found 0".to_owned());
        }
        if !(self.epsilon >= 0.0 && self.epsilon < 1.0) {
            return wrong("epsilon", format!("must be from 0 and below 1, found {}", self.epsilon));
        }
        for (key, value) in [("epsilon_high", self.epsilon_high()), ("beta", self.beta)] {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(key, format!("must be at least 0, found {value}"));
            }
        }
        if self.loss == GrpoLoss::Cispo && self.epsilon_high.is_none() {
            let message = "the loss \"cispo\" needs it: the largest ratio that counts, such as 5";
            return wrong("epsilon_high", message.to_owned());
        }
        if let Some(delta) = self.delta {
            let least = 1.0 + self.epsilon_high();
            if self.loss == GrpoLoss::Cispo {
                return wrong(
                    "delta",
                    "has no effect on the loss \"cispo\"; leave it out".to_owned(),
                );
            }
            if !(delta > least && delta.is_finite()) {
                return wrong(
                    "delta",
                    format!("must be above 1 + epsilon_high = {least}, found {delta}"),
                );
            }
        }
        Ok(())
    }

    /// The ratios that are not clipped.
    pub(super) fn ratios(&self) -> RangeInclusive<f64> {
        match self.loss {
            GrpoLoss::Cispo => 0.0..=self.epsilon_high(),
            _ => 1.0 - self.epsilon..=1.0 + self.epsilon_high(),
        }
    }

    fn epsilon_high(&self) -> f64 {
        self.epsilon_high.unwrap_or(self.epsilon)
    }

    /// How prompts are answered; without a seed and end tokens.
    pub(super) fn generation(&self) -> Generation {
        let Self { temperature, top_k, top_p, .. } = *self;
        Generation {
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { temperature, top_k, top_p, ..Sampling::default() },
            samples: self.samples,
            stop: self.stop.clone(),
            ..Generation::default()
        }
    }
}
