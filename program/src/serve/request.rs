//! Requests for texts.

use fulgurite_models::Sampling;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::{Fields, wrong};

/// The most answers to a prompt.
const MAX_N: usize = 16;

/// The most answers of a request.
const MAX_ANSWERS: usize = 128;

/// The most texts that end an answer.
const MAX_STOP: usize = 16;

/// The most tokens whose log-probabilities are named at a place.
const MAX_TOP: usize = 20;

/// New tokens of a completion that names no number, as in OpenAI's API.
const COMPLETION_TOKENS: usize = 16;

/// The API of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// Texts to continue.
#[derive(Debug, PartialEq)]
pub(super) enum Given {
    Texts(Vec<String>),
    Ids(Vec<Vec<u32>>),
    Messages(Value),
}

/// A request for texts.
#[derive(Debug)]
pub(super) struct TextRequest {
    pub(super) given: Given,
    /// `None` for as many as fit.
    pub(super) max_tokens: Option<usize>,
    pub(super) sampling: Sampling,
    /// Answers to each prompt.
    pub(super) samples: usize,
    pub(super) seed: Option<u64>,
    pub(super) stop: Vec<String>,
    pub(super) ignores_end: bool,
    /// Whether an answer begins with its prompt.
    pub(super) echo: bool,
    /// The number of the most likely tokens to name beside each token's log-probability.
    pub(super) logprobs: Option<usize>,
    /// Whether answers have their tokens.
    pub(super) token_ids: bool,
    pub(super) stream: bool,
    /// Whether the last event of a stream has the numbers of tokens.
    pub(super) stream_usage: bool,
}

impl TextRequest {
    /// Parses the body of a request to the model `name`, whose answers have at most `most` tokens.
    pub(super) fn parse(api: Api, body: &[u8], name: &str, most: usize) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        match fields.take("model") {
            None => {}
            Some(Value::String(model)) if model == name => {}
            Some(model) => {
                let what = format!("there is no model {model} here; it is \"{name}\"");
                return Err(ApiError::request(404, "model_not_found", what).of_field("model"));
            }
        }
        let given = match api {
            Api::Completions => prompts(fields.take("prompt"))?,
            Api::Chat => messages(fields.take("messages"))?,
        };
        let samples = fields.count("n", 1..=MAX_N)?.unwrap_or(1);
        let count = match &given {
            Given::Texts(texts) => texts.len(),
            Given::Ids(lists) => lists.len(),
            Given::Messages(_) => 1,
        };
        if count * samples > MAX_ANSWERS {
            return Err(ApiError::field(
                "prompt",
                format!(
                    "{count} prompts with {samples} answers each are more than {MAX_ANSWERS} answers; \
                     send several requests"
                ),
            ));
        }
        let mut max_tokens = fields.count("max_tokens", 0..=most)?;
        let echo = api == Api::Completions && fields.flag("echo")?;
        let logprobs = match api {
            Api::Completions => {
                max_tokens = max_tokens.or(Some(COMPLETION_TOKENS.min(most)));
                fields.unsupported("suffix", &json!(""))?;
                if let Some(best_of) = fields.count("best_of", 1..=MAX_N)?
                    && best_of != samples
                {
                    return Err(ApiError::field(
                        "best_of",
                        "`best_of` is not supported; leave it out, or set it to `n`",
                    ));
                }
                fields.count("logprobs", 0..=MAX_TOP)?
            }
            Api::Chat => {
                if let Some(new) = fields.count("max_completion_tokens", 1..=most)? {
                    if max_tokens.is_some() {
                        return Err(ApiError::field(
                            "max_completion_tokens",
                            "give one of `max_tokens` and `max_completion_tokens`",
                        ));
                    }
                    max_tokens = Some(new);
                }
                fields.unsupported("response_format", &json!({ "type": "text" }))?;
                fields.unsupported("tools", &json!([]))?;
                fields.unsupported("tool_choice", &json!("none"))?;
                let top = fields.count("top_logprobs", 0..=MAX_TOP)?;
                match (fields.flag("logprobs")?, top) {
                    (true, top) => Some(top.unwrap_or(0)),
                    (false, None | Some(0)) => None,
                    (false, Some(_)) => {
                        return Err(ApiError::field(
                            "top_logprobs",
                            "`top_logprobs` needs `logprobs` = true",
                        ));
                    }
                }
            }
        };
        if max_tokens == Some(0) && !echo {
            return Err(ApiError::field(
                "max_tokens",
                "`max_tokens`: 0 needs `echo`, for there is nothing else to answer",
            ));
        }
        for penalty in ["frequency_penalty", "presence_penalty"] {
            fields.unsupported(penalty, &json!(0))?;
        }
        fields.unsupported("logit_bias", &json!({}))?;
        let sampling = Sampling {
            temperature: fields.number("temperature")?.unwrap_or(1.0),
            top_k: fields.count("top_k", 0..=u32::MAX as usize)?.unwrap_or(0),
            top_p: fields.number("top_p")?.unwrap_or(1.0),
            min_p: fields.number("min_p")?.unwrap_or(0.0),
            repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
        };
        if let Err(error) = sampling.check() {
            let message = error.to_string();
            let name = message.split('`').nth(1).unwrap_or_default().to_owned();
            return Err(ApiError::field(&name, message));
        }
        let stop = fields.texts("stop", MAX_STOP)?;
        let seed = fields.seed("seed")?;
        let ignores_end = fields.flag("ignore_eos")?;
        let token_ids = fields.flag("return_token_ids")?;
        let stream = fields.flag("stream")?;
        let stream_usage = match fields.take("stream_options") {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::field("stream_options", "`stream_options` needs `stream`"));
            }
            Some(options) => stream_usage(&options)?,
        };
        fields.finish()?;
        Ok(Self {
            given,
            max_tokens,
            sampling,
            samples,
            seed,
            stop,
            ignores_end,
            echo,
            logprobs,
            token_ids,
            stream,
            stream_usage,
        })
    }
}

/// Parses `prompt`.
fn prompts(value: Option<Value>) -> Result<Given, ApiError> {
    let value = value.ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
    let given = match &value {
        Value::String(text) => Some(Given::Texts(vec![text.clone()])),
        Value::Array(list) => match list.first() {
            None => None,
            Some(Value::String(_)) => serde_json::from_value(value.clone()).ok().map(Given::Texts),
            Some(Value::Number(_)) => {
                let ids = serde_json::from_value(value.clone()).ok();
                ids.map(|ids| Given::Ids(vec![ids]))
            }
            Some(_) => serde_json::from_value(value.clone()).ok().map(Given::Ids),
        },
        _ => None,
    };
    let expected = "a text, a list of texts, a list of tokens, or a list of lists of tokens";
    given.ok_or_else(|| wrong("prompt", expected, &value))
}

/// Parses `messages`. Parts of a content that are texts become one text.
fn messages(value: Option<Value>) -> Result<Given, ApiError> {
    let mut value = value.ok_or_else(|| ApiError::field("messages", "`messages` is missing"))?;
    match &mut value {
        Value::Array(list) if !list.is_empty() => {
            for (i, message) in list.iter_mut().enumerate() {
                let Some(Value::Array(parts)) = message.get("content") else {
                    continue;
                };
                let text = |part: &Value| {
                    let is_text = part.get("type").is_some_and(|kind| kind == "text");
                    part.get("text").filter(|_| is_text)?.as_str().map(str::to_owned)
                };
                let Some(text) = parts.iter().map(text).collect::<Option<String>>() else {
                    return Err(ApiError::field(
                        "messages",
                        format!(
                            "`messages[{i}].content`: only parts of type \"text\" are supported"
                        ),
                    ));
                };
                message["content"] = text.into();
            }
            Ok(Given::Messages(value))
        }
        _ => Err(wrong("messages", "a list of messages", &value)),
    }
}

/// Parses `stream_options`.
fn stream_usage(options: &Value) -> Result<bool, ApiError> {
    let Value::Object(options) = options else {
        return Err(wrong("stream_options", "an object", options));
    };
    let mut usage = false;
    for (name, value) in options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(wanted)) => usage = *wanted,
            _ => {
                return Err(ApiError::field(
                    "stream_options",
                    format!(
                        "`stream_options.{name}` is not supported; `include_usage` is true or false"
                    ),
                ));
            }
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(api: Api, body: &Value) -> Result<TextRequest, ApiError> {
        TextRequest::parse(api, body.to_string().as_bytes(), "tiny", 100)
    }

    #[test]
    fn prompts_have_four_forms() {
        let given =
            |prompt: Value| parse(Api::Completions, &json!({"prompt": prompt})).unwrap().given;
        assert_eq!(given(json!("a")), Given::Texts(vec!["a".into()]));
        assert_eq!(given(json!(["a", "b"])), Given::Texts(vec!["a".into(), "b".into()]));
        assert_eq!(given(json!([1, 2])), Given::Ids(vec![vec![1, 2]]));
        assert_eq!(given(json!([[1], [2, 3]])), Given::Ids(vec![vec![1], vec![2, 3]]));
        for wrong in [json!([]), json!({}), json!(["a", 1]), json!([1, -1]), json!([1.5]), json!(7)]
        {
            let error = parse(Api::Completions, &json!({"prompt": wrong})).unwrap_err();
            assert_eq!(error.body()["error"]["param"], "prompt", "{wrong}");
        }
    }

    #[test]
    fn parts_of_text_become_one() {
        let part = |text: &str| json!({"type": "text", "text": text});
        let body = |parts: Value| json!({"messages": [{"role": "user", "content": parts}]});
        let found = parse(Api::Chat, &body(json!([part("a "), part("b")]))).unwrap().given;
        assert_eq!(found, Given::Messages(json!([{"role": "user", "content": "a b"}])));
        let picture = json!([{"type": "image_url", "image_url": {"url": "data:"}}]);
        let error = parse(Api::Chat, &body(picture)).unwrap_err().body();
        assert_eq!(
            error["error"]["message"],
            "`messages[0].content`: only parts of type \"text\" are supported"
        );
    }

    #[test]
    fn unknown_fields_are_errors() {
        let with = |name: &str, value: Value| {
            let mut body = json!({"prompt": "a"});
            body[name] = value;
            parse(Api::Completions, &body)
        };
        for (name, value) in [
            ("user", json!("me")),
            ("logit_bias", json!({})),
            ("logit_bias", Value::Null),
            ("presence_penalty", json!(0.0)),
            ("best_of", json!(1)),
            ("model", json!("tiny")),
            ("made_up", Value::Null),
        ] {
            assert!(with(name, value).is_ok(), "{name}");
        }
        for (name, value) in [
            ("made_up", json!(1)),
            ("logit_bias", json!({"5": 1})),
            ("presence_penalty", json!(0.5)),
            ("best_of", json!(2)),
            ("n", json!(0)),
            ("n", json!(17)),
            ("max_tokens", json!(101)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!("7")),
            ("temperature", json!(-1)),
            ("top_p", json!(0)),
            ("seed", json!(-1)),
            ("stop", json!([""])),
            ("stop", json!(7)),
            ("logprobs", json!(21)),
            ("logprobs", json!(true)),
            ("echo", json!("yes")),
            ("stream_options", json!({})),
            ("messages", json!([])),
            ("model", json!("other")),
        ] {
            let error = with(name, value.clone()).unwrap_err();
            assert_eq!(error.status, if name == "model" { 404 } else { 400 }, "{name}");
            assert_eq!(error.body()["error"]["param"], name, "{value}");
        }
    }
}
