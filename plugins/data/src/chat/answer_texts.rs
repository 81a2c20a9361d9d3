//! [`AnswerTexts`].

use candle_core::Device;
use fulgurite_error::{Error, Result};
use serde_json::{Map, Value};

use super::config::ChatDataConfig;
use super::conversation;
use super::encode::ChatEncoder;
use super::prompts::prompt_messages;
use super::rewards::{padded, padding_of};
use crate::labelled::PaddedTexts;
use crate::rows::Place;
use crate::tokenizer::Tokenizer;

/// Makes texts of prompts and answers for a model that scores texts, with the tokens that
/// [`RewardData`](super::RewardData) makes of a row that has both.
#[derive(Debug)]
pub struct AnswerTexts {
    encoder: ChatEncoder,
    pad_id: u32,
}

impl AnswerTexts {
    /// Opens a tokenizer and its chat template, as `data.tokenizer` and `data.chat_template` name
    /// them.
    ///
    /// # Errors
    /// If a file is missing or damaged.
    pub fn open(tokenizer: &str, chat_template: Option<&str>) -> Result<Self> {
        let encoder = ChatEncoder::open(&ChatDataConfig {
            tokenizer: Some(tokenizer.to_owned()),
            chat_template: chat_template.map(str::to_owned),
            ..ChatDataConfig::default()
        })?;
        let pad_id = padding_of(&encoder.tokenizer)?;
        Ok(Self { encoder, pad_id })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.encoder.tokenizer
    }

    /// The id of padding.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// Tokenizes a prompt with an answer. `prompt` has the columns of a row: a text as `prompt`, or
    /// messages as `prompt` or `messages`, with `system` and `tools`. Texts stand between the
    /// tokenizer's start and end tokens.
    ///
    /// # Errors
    /// If the columns are not a prompt's, or the template refuses them.
    pub fn encode(&self, prompt: &Map<String, Value>, answer: &str) -> Result<Vec<u32>> {
        let ChatEncoder { tokenizer, template, .. } = &self.encoder;
        let place = Place::named("the prompt");
        if let Some(prompt) = prompt.get("prompt").and_then(Value::as_str) {
            let start = tokenizer.start_of_text().into_iter();
            let end = tokenizer.end_of_text();
            let ids = tokenizer.encode(&format!("{prompt}{answer}"))?;
            return Ok(start.chain(ids).chain(end).collect());
        }
        let list = prompt.get("prompt").or_else(|| prompt.get("messages"));
        let list = list.cloned().ok_or_else(|| place.wrong("has no `prompt` and no `messages`"))?;
        let template = template.as_ref().map_err(|why| Error::Config(why.clone()))?;
        let (mut messages, tools) =
            prompt_messages(&place, list, prompt.get("system"), prompt.get("tools"))?;
        messages.push(conversation::message("assistant", answer.into()));
        let rendered = template.render(&messages, &tools, false);
        let rendered =
            rendered.map_err(|error| place.wrong(format!("cannot be rendered: {error}")))?;
        tokenizer.encode(&rendered.text)
    }

    /// Pads texts to one length, on a device.
    ///
    /// # Errors
    /// If the device lacks the memory.
    pub fn padded(&self, texts: &[Vec<u32>], device: &Device) -> Result<PaddedTexts> {
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        padded(&texts, 1, self.pad_id, device)
    }
}
