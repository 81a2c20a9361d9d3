//! [`Form`].

use fulgurite::data::Tokenizer;
use fulgurite_error::Result;
use serde_json::{Map, Value, json};

use super::logprobs::{ScoredToken, of_chat, of_completion};
use super::request::Api;

/// The form of the answers to a request.
#[derive(Debug, Clone)]
pub(super) struct Form {
    pub(super) api: Api,
    /// The identifier of the answer.
    pub(super) id: String,
    /// The model's name.
    pub(super) model: String,
    /// Seconds since 1970.
    pub(super) created: u64,
}

impl Form {
    /// The field of a request that has the prompt.
    pub(super) fn prompt_field(&self) -> &'static str {
        match self.api {
            Api::Completions => "prompt",
            Api::Chat => "messages",
        }
    }

    fn object(&self, kind: &str) -> Map<String, Value> {
        Map::from_iter([
            ("id".to_owned(), json!(self.id)),
            ("object".to_owned(), json!(kind)),
            ("created".to_owned(), json!(self.created)),
            ("model".to_owned(), json!(self.model)),
        ])
    }

    /// An answer that is not a stream.
    pub(super) fn whole(&self, choices: Vec<Value>, usage: Value) -> Value {
        let mut object = self.object(match self.api {
            Api::Completions => "text_completion",
            Api::Chat => "chat.completion",
        });
        object.insert("choices".to_owned(), choices.into());
        object.insert("usage".to_owned(), usage);
        object.into()
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        let mut object = self.object(match self.api {
            Api::Completions => "text_completion",
            Api::Chat => "chat.completion.chunk",
        });
        object.insert("choices".to_owned(), choices);
        object
    }

    /// The object `logprobs` of a choice, if it is wanted.
    pub(super) fn logprobs(
        &self,
        wanted: Option<usize>,
        tokens: &[ScoredToken],
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Value> {
        match (wanted, self.api) {
            (None, _) => Ok(Value::Null),
            (Some(_), Api::Completions) => of_completion(tokens, tokenizer),
            (Some(_), Api::Chat) => of_chat(tokens, tokenizer),
        }
    }

    /// A choice of a whole answer.
    pub(super) fn choice(
        &self,
        index: usize,
        text: &str,
        logprobs: Value,
        ids: Option<&Vec<u32>>,
        finish: &str,
    ) -> Value {
        let content = match self.api {
            Api::Completions => ("text", json!(text)),
            Api::Chat => ("message", json!({ "role": "assistant", "content": text })),
        };
        choice(index, content, logprobs, ids, Some(finish))
    }

    /// The first event of a choice, in a chat.
    pub(super) fn first_piece(&self, index: usize) -> Option<Value> {
        let delta = ("delta", json!({ "role": "assistant", "content": "" }));
        let choice = || choice(index, delta, Value::Null, None, None);
        (self.api == Api::Chat).then(|| self.chunk(json!([choice()])).into())
    }

    /// An event of a stream.
    pub(super) fn piece(
        &self,
        index: usize,
        text: &str,
        logprobs: Value,
        ids: Option<&Vec<u32>>,
        finish: Option<&str>,
    ) -> Value {
        let content = match (self.api, text) {
            (Api::Completions, text) => ("text", json!(text)),
            (Api::Chat, "") => ("delta", json!({})),
            (Api::Chat, text) => ("delta", json!({ "content": text })),
        };
        self.chunk(json!([choice(index, content, logprobs, ids, finish)])).into()
    }

    /// The event with the numbers of tokens.
    pub(super) fn last_piece(&self, usage: Value) -> Value {
        let mut object = self.chunk(json!([]));
        object.insert("usage".to_owned(), usage);
        object.into()
    }
}

fn choice(
    index: usize,
    (name, content): (&str, Value),
    logprobs: Value,
    ids: Option<&Vec<u32>>,
    finish: Option<&str>,
) -> Value {
    let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": finish });
    choice[name] = content;
    if let Some(ids) = ids {
        choice["token_ids"] = json!(ids);
    }
    choice
}
