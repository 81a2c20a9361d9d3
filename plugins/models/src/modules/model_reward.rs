//! The reward that a reward model gives.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use candle_core::Device;
use fulgurite_data::AnswerTexts;
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::frozen_reward::FrozenReward;
use crate::config::resolve;
use crate::rewards::{RewardConfig, RewardFunction, RewardedAnswer};

/// Rewards an answer with the score of a reward model: `{ type = "model", path = "my-reward" }`.
///
/// The model has a head of one number, as [`Reward`](crate::Reward) trains it, and need not be of
/// the kind that learns. Each data-parallel rank has all of it, in f32, on the device of the model
/// that learns. It scores the prompt with the answer, tokenized by its own tokenizer and, if the
/// prompt has messages, written by its own chat template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(deny_unknown_fields)]
pub struct ModelReward {
    /// A Hugging Face directory of a model with its tokenizer, or a repository in the local Hub
    /// cache.
    pub path: PathBuf,
    /// The tokenizer, as `data.tokenizer` names one. By default that of `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// The chat template: a file, or `"chatml"`. By default that of the tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Answers that are scored at a time.
    #[serde(default = "default_batch_size")]
    pub batch_size: usize,
}

fn default_batch_size() -> usize {
    8
}

#[typetag::serde(name = "model")]
impl RewardConfig for ModelReward {
    fn build(&self) -> Result<Box<dyn RewardFunction>> {
        if self.batch_size == 0 {
            return Err(Error::Config("`batch_size`: must be at least 1, found 0".to_owned()));
        }
        let directory = resolve(&self.path)?;
        let own = directory.display().to_string();
        let tokenizer = self.tokenizer.as_deref().unwrap_or(&own);
        let texts = AnswerTexts::open(tokenizer, self.chat_template.as_deref())?;
        let model = FrozenReward::open(&directory, texts.tokenizer().vocab_size())?;
        let model = Mutex::new(model);
        Ok(Box::new(Scorer {
            texts,
            model,
            device: Device::Cpu,
            batch_size: self.batch_size,
            has_warned: AtomicBool::new(false),
        }))
    }
}

fulgurite_config::register_plugin!(
    "reward",
    "model",
    "Rewards answers with the score of a reward model",
    "{ type = \"model\", path = \"my-reward\" }",
    ModelReward
);

struct Scorer {
    texts: AnswerTexts,
    model: Mutex<FrozenReward>,
    device: Device,
    batch_size: usize,
    /// Whether it was said that a text was cut.
    has_warned: AtomicBool,
}

impl RewardFunction for Scorer {
    fn set_device(&mut self, device: &Device) {
        self.device = device.clone();
    }

    fn score(&self, answers: &[RewardedAnswer]) -> Result<Vec<f64>> {
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        let text = |answer: &RewardedAnswer| self.texts.encode(answer.columns, answer.text);
        let mut texts = answers.iter().map(text).collect::<Result<Vec<_>>>()?;
        let positions = model.positions().unwrap_or(usize::MAX);
        if let Some(longest) = texts.iter().map(Vec::len).max().filter(|len| *len > positions) {
            if !self.has_warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "a prompt and its answer have {longest} tokens, and the reward model {positions} positions: it \
                     scores the first {positions}"
                );
            }
            texts.iter_mut().for_each(|text| text.truncate(positions));
        }
        let mut scores = Vec::with_capacity(answers.len());
        for texts in texts.chunks(self.batch_size) {
            let found = model.score(&self.texts.padded(texts, &self.device)?, &self.device)?;
            scores.extend(found.into_iter().map(f64::from));
        }
        Ok(scores)
    }
}
