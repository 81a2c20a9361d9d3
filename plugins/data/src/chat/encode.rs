//! Conversations as token ids, with the tokens to learn.

use std::hash::Hasher;
use std::ops::Range;
use std::path::Path;

use fulgurite_error::{Error, Result};
use minijinja::Value;
use twox_hash::XxHash3_64;

use super::config::{ChatDataConfig, TrainOn};
use super::conversation::{Conversation, is_answer};
use super::template::ChatTemplate;
use crate::config::AddBosToken;
use crate::rows::Place;
use crate::special_tokens::Wanted;
use crate::tokenizer::Tokenizer;

/// A tokenized conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) ids: Box<[u32]>,
    /// Whether the model learns to write each token.
    pub(super) learned: Box<[bool]>,
}

impl Encoded {
    /// Leaves out the end, from `len` tokens on.
    pub(super) fn cut(&mut self, len: usize) {
        self.ids = self.ids[..len.min(self.ids.len())].into();
        self.learned = self.learned[..len.min(self.learned.len())].into();
    }

    /// The number of tokens to learn: the first token follows nothing.
    pub(super) fn learned_tokens(&self) -> usize {
        self.learned.iter().skip(1).filter(|learned| **learned).count()
    }

    /// The tokens before the answer.
    pub(super) fn prompt(&self) -> &[u32] {
        let begin = self.learned.iter().position(|learned| *learned);
        &self.ids[..begin.unwrap_or(self.ids.len())]
    }

    /// This prompt with the answer of `other`, up to `len` tokens.
    pub(super) fn with_answer_of(&self, other: &Self, len: usize) -> Self {
        let (own, begin) = (self.prompt(), other.prompt().len());
        let ids = own.iter().chain(&other.ids[begin..]).copied().take(len).collect();
        let before = std::iter::repeat_n(false, own.len());
        let learned = before.chain(other.learned[begin..].iter().copied()).take(len).collect();
        Self { ids, learned }
    }

    /// Hashes the ids and which of them are learned.
    pub(super) fn hash_into(&self, hasher: &mut impl Hasher) {
        hasher.write_u64(self.ids.len() as u64);
        self.ids.iter().for_each(|id| hasher.write_u32(*id));
        self.learned.iter().for_each(|learned| hasher.write_u8(u8::from(*learned)));
    }

    /// The key of the sequence in a file of log-probabilities.
    pub(super) fn key(&self) -> u64 {
        let mut hasher = XxHash3_64::default();
        self.hash_into(&mut hasher);
        hasher.finish()
    }

    /// Whether anything is learned from it: the first token follows nothing.
    pub(super) fn teaches(&self) -> bool {
        self.learned.iter().skip(1).any(|learned| *learned)
    }
}

/// The text of a conversation, and the bytes to learn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) text: String,
    pub(super) learned: Vec<Range<usize>>,
    /// Whether the text stands between the tokenizer's start and end tokens. The end token is
    /// learned.
    pub(super) is_plain: bool,
}

/// Renders and tokenizes conversations.
#[derive(Debug)]
pub(super) struct ChatEncoder {
    pub(super) tokenizer: Tokenizer,
    /// The template, or why there is none. Rows of prompts and completions do without.
    pub(super) template: Result<ChatTemplate, String>,
    train_on: TrainOn,
}

impl ChatEncoder {
    pub(super) fn open(config: &ChatDataConfig) -> Result<Self> {
        let path = config.tokenizer.as_deref().unwrap_or_default();
        let wanted = Wanted {
            eos_token: config.eos_token.as_deref(),
            add_bos_token: AddBosToken::Auto,
            ..Wanted::default()
        };
        let (tokenizer, file) = match path {
            "bytes" => (Tokenizer::bytes(), None),
            path => (Tokenizer::open(Path::new(path), wanted)?, Some(Path::new(path))),
        };
        let opened = ChatTemplate::open(file, config.chat_template.as_deref(), &config.template()?);
        let template = match opened {
            Err(Error::Config(why)) if config.chat_template.is_none() => Err(why),
            opened => Ok(opened?),
        };
        Ok(Self { tokenizer, template, train_on: config.train_on })
    }

    /// The template, if there is one.
    pub(super) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref().ok()
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// If it is without an answer, or the template refuses it.
    pub(super) fn render(&self, place: &Place, conversation: Conversation) -> Result<Text> {
        self.render_for(self.train_on, place, conversation)
    }

    /// The text of a conversation. `train_on` says which parts are learned.
    ///
    /// # Errors
    /// If nothing is learned, or the template refuses it.
    pub(super) fn render_for(
        &self,
        train_on: TrainOn,
        place: &Place,
        conversation: Conversation,
    ) -> Result<Text> {
        let text = match conversation {
            Conversation::Plain { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                let learned = match train_on {
                    TrainOn::All => 0..text.len(),
                    TrainOn::Answers | TrainOn::Last => prompt.len()..text.len(),
                };
                Text { text, learned: vec![learned], is_plain: true }
            }
            Conversation::Messages { messages, from, tools } => {
                let template = self.template.as_ref().map_err(|why| Error::Config(why.clone()))?;
                let refused = |error: Error| place.wrong(format!("cannot be rendered: {error}"));
                let rendered = template.render(&messages, &tools, false).map_err(refused)?;
                let learned = match (train_on, rendered.answers) {
                    (TrainOn::All, _) => std::iter::once(0..rendered.text.len()).collect(),
                    // Marks do not say whose they are, so a prompt is rendered for itself.
                    (TrainOn::Answers, Some(answers)) if from == 0 => answers,
                    (TrainOn::Last, Some(mut answers)) if from == 0 => {
                        answers.drain(..answers.len().saturating_sub(1));
                        answers
                    }
                    (train_on, _) => {
                        let mut wanted: Vec<usize> =
                            (from..messages.len()).filter(|&i| is_answer(&messages[i])).collect();
                        if train_on == TrainOn::Last {
                            wanted.drain(..wanted.len().saturating_sub(1));
                        }
                        let conversation = (place, &*messages, &tools);
                        wanted
                            .into_iter()
                            .map(|i| answer(template, conversation, &rendered.text, i))
                            .collect::<Result<_>>()?
                    }
                };
                Text { text: rendered.text, learned, is_plain: false }
            }
        };
        match text.learned.iter().all(|range| range.is_empty()) {
            true => Err(place.wrong(
                "has no answer to learn: no message of the assistant, or an empty one (or a template whose \
                 {% generation %} marks none)",
            )),
            false => Ok(text),
        }
    }

    /// The tokens of a text. A token is learned if it has a byte of an answer, as `transformers`
    /// masks them.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub(super) fn encode(&self, text: &Text) -> Result<Encoded> {
        let tokens = self.tokenizer.encode_with_bytes(&text.text)?;
        let is_learned = |bytes: &Range<usize>| {
            text.learned
                .iter()
                .any(|learned| bytes.start < learned.end && bytes.end > learned.start)
        };
        let start = self.tokenizer.start_of_text().filter(|_| text.is_plain);
        let end = self.tokenizer.end_of_text().filter(|_| text.is_plain);
        let around = |id: Option<u32>, learned| id.map(|id| (id, learned));
        let all = around(start, false)
            .into_iter()
            .chain(tokens.iter().map(|(id, bytes)| (*id, is_learned(bytes))))
            .chain(around(end, true));
        let (ids, learned): (Vec<u32>, Vec<bool>) = all.unzip();
        Ok(Encoded { ids: ids.into(), learned: learned.into() })
    }
}

/// The bytes of message `i` in `whole`, which the template writes behind the message's prompt.
fn answer(
    template: &ChatTemplate,
    (place, messages, tools): (&Place, &[Value], &Value),
    whole: &str,
    i: usize,
) -> Result<Range<usize>> {
    let refused =
        |error: Error| place.wrong(format!("cannot be rendered up to message {i}: {error}"));
    let before = template.render(&messages[..i], tools, true).map_err(refused)?.text;
    let after = match i + 1 == messages.len() {
        true => whole.to_owned(),
        false => template.render(&messages[..=i], tools, false).map_err(refused)?.text,
    };
    if after.starts_with(&before) && whole.starts_with(&after) {
        return Ok(before.len()..after.len());
    }
    Err(place.wrong(format!(
        "has an answer, message {i}, that cannot be found in the text: {} writes the messages up to it differently if \
         others follow. Take a template that marks answers with {{% generation %}} (data.chat_template), or learn the \
         last answers only (data.train_on = \"last\")",
        template.name()
    )))
}
