//! [`Prompts`]: the data of a generation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use fulgurite_config::Documented;
use fulgurite_data::{ChatTemplate, TemplateOptions, Tokenizer};
use fulgurite_engine::data::{DataContext, DataModule, Split};
use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Generation, Prompt, Sampling};

/// The largest file of prompts, in bytes.
const MAX_FILE: u64 = 1 << 30;

/// The `[data]` table of a generation: prompts, and how they are continued.
///
/// ```toml
/// [data]
/// path = "prompts.jsonl"
/// tokenizer = "path/to/model/tokenizer.json"
/// max_new_tokens = 100
/// temperature = 0.8
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct PromptsConfig {
    /// A file with a prompt in each line. Lines of a file named `.jsonl` or `.ndjson` are JSON
    /// objects with `prompt`, a text, `ids`, a list of tokens, or `messages`, a conversation that
    /// the model answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Prompts, instead of a file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<String>,
    /// Prompts as tokens, instead of a file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompt_ids: Vec<Vec<u32>>,
    /// A Hugging Face `tokenizer.json`, a folder with one, a repository in the local Hub cache, or
    /// `"bytes"` for the built-in byte-level tokenizer. Needed for prompts that are texts. The
    /// start token that `transformers` puts before a text is before a prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Whether a prompt that is a text is a user's message, which the model answers.
    pub chat: bool,
    /// The system's message before a user's; with `chat`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// The chat template: a file, or `"chatml"`. By default that of the tokenizer, in
    /// `chat_template.jinja`, `tokenizer_config.json` or `chat_template.json` beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Variables of the template, such as `{ enable_thinking = false }`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub template_options: BTreeMap<String, Value>,
    /// The date that a template writes as that of today (`strftime_now`), such as `"2026-01-31"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_date: Option<String>,
    /// The most tokens of an answer.
    #[default(Generation::default().max_new_tokens)]
    pub max_new_tokens: usize,
    /// Divisor of the logits; 0 takes the most likely token (greedy).
    #[default(Sampling::default().temperature)]
    pub temperature: f64,
    /// Samples from this many of the most likely tokens; 0 for all.
    #[default(Sampling::default().top_k)]
    pub top_k: usize,
    /// Samples from the fewest likely tokens whose probabilities add up to this; 1 for all.
    #[default(Sampling::default().top_p)]
    pub top_p: f64,
    /// Samples from tokens with at least this fraction of the largest probability; 0 for all.
    #[default(Sampling::default().min_p)]
    pub min_p: f64,
    /// Divides the positive logits of tokens in the prompt and the answer so far, and multiplies
    /// their negative ones; 1 changes nothing.
    #[default(Sampling::default().repetition_penalty)]
    pub repetition_penalty: f64,
    /// Answers to each prompt.
    #[default(Generation::default().samples)]
    pub samples: usize,
    /// Texts that end an answer, which ends before them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
    /// Tokens that end an answer. By default `eos_token_id` of the model's `generation_config.json`
    /// or `config.json`; without a file, the tokenizer's end token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_tokens: Option<Vec<u32>>,
    /// Prompts that a rank continues at a time.
    #[default(8)]
    pub batch_size: usize,
}

impl PromptsConfig {
    /// A user's message, perhaps behind a system's.
    fn messages(&self, text: &str) -> Value {
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        system.into_iter().chain([json!({"role": "user", "content": text})]).collect()
    }

    /// Opens the chat template: `chat_template`, or the template beside the tokenizer.
    ///
    /// # Errors
    /// If the template is missing, unreadable or wrong.
    pub fn template(&self) -> Result<ChatTemplate> {
        let tokenizer = self.tokenizer.as_deref().filter(|name| *name != "bytes").map(Path::new);
        let options = TemplateOptions::new(&self.template_options, self.template_date.as_deref())?;
        ChatTemplate::open(tokenizer, self.chat_template.as_deref(), &options)
    }

    /// How prompts are continued.
    fn generation(&self, seed: u64) -> Generation {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *self;
        Generation {
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { temperature, top_k, top_p, min_p, repetition_penalty },
            samples: self.samples,
            seed,
            end_tokens: Vec::new(),
            stop: self.stop.clone(),
        }
    }
}

/// Prompts to continue: the data of [`TextGeneration`](crate::TextGeneration).
#[derive(Debug)]
pub struct Prompts {
    prompts: Vec<Prompt>,
    names: Vec<String>,
    settings: Arc<PromptSettings>,
}

/// Options of a generation, and the tokenizer.
#[derive(Debug)]
pub struct PromptSettings {
    /// The options; without end tokens, which depend on the model.
    pub generation: Generation,
    /// The tokenizer, if there is one.
    pub tokenizer: Option<Tokenizer>,
    /// `data.end_tokens`.
    pub end_tokens: Option<Vec<u32>>,
}

impl PromptSettings {
    /// The options with end tokens: those of the configuration, else of the model's files, else of
    /// the tokenizer.
    pub fn with_end_tokens(&self, of_model: Option<&[u32]>) -> Generation {
        let of_tokenizer = || self.tokenizer.as_ref().and_then(Tokenizer::end_of_text);
        let end_tokens = match (&self.end_tokens, of_model) {
            (Some(own), _) => own.clone(),
            (None, Some(of_model)) => of_model.to_vec(),
            (None, None) => of_tokenizer().into_iter().collect(),
        };
        Generation { end_tokens, ..self.generation.clone() }
    }
}

/// Some prompts, with the options of the generation.
#[derive(Debug)]
pub struct PromptBatch {
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// The options and the tokenizer.
    pub settings: Arc<PromptSettings>,
}

impl Prompts {
    /// All prompts.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// The options and the tokenizer.
    pub fn settings(&self) -> &Arc<PromptSettings> {
        &self.settings
    }

    /// Returns the place of a prompt: `prompts.txt, line 3`.
    ///
    /// # Panics
    /// If the prompt does not exist.
    pub fn name(&self, index: u64) -> &str {
        &self.names[index as usize]
    }
}

/// A prompt before it is tokenized.
enum Given {
    Text(String),
    Ids(Vec<u32>),
    Messages(Value),
}

impl DataModule for Prompts {
    type Config = PromptsConfig;
    type Batch = PromptBatch;

    fn exclusive_keys() -> &'static [&'static [&'static str]] {
        &[&["path", "prompts", "prompt_ids"]]
    }

    fn setup(config: &PromptsConfig, context: &DataContext) -> Result<Self> {
        let generation = config.generation(context.seed);
        generation.check().map_err(|error| match error {
            Error::Config(message) => Error::Config(message.replacen('`', "`data.", 1)),
            error => error,
        })?;
        if config.batch_size == 0 {
            return Err(Error::Config("`data.batch_size`: must be at least 1, found 0".to_owned()));
        }
        let tokenizer = match config.tokenizer.as_deref() {
            None => None,
            Some("bytes") => Some(Tokenizer::bytes()),
            Some(path) => Some(Tokenizer::from_file_with_start(path)?),
        };
        if tokenizer.is_none() && !config.stop.is_empty() {
            return Err(Error::Config(
                "`data.stop`: texts that end an answer need `data.tokenizer`".to_owned(),
            ));
        }
        if config.system.is_some() && !config.chat {
            return Err(Error::Config(
                "`data.system`: a system's message needs `data.chat = true`".to_owned(),
            ));
        }
        let given = given(config)?;
        let answers =
            config.chat || given.iter().any(|(_, given)| matches!(given, Given::Messages(_)));
        let template = if answers { Some(config.template()?) } else { None };
        let (mut prompts, mut names) = (Vec::new(), Vec::new());
        for (index, (name, given)) in (0..).zip(given) {
            let given = match given {
                Given::Text(text) if config.chat => Given::Messages(config.messages(&text)),
                given => given,
            };
            let ids = match (given, &tokenizer) {
                (Given::Ids(ids), _) => ids,
                (Given::Messages(messages), Some(tokenizer)) => {
                    let template = template.as_ref().ok_or_else(|| Error::other("no template"))?;
                    tokenizer.encode(&template.prompt(&name, &messages)?)?
                }
                (Given::Text(text), Some(tokenizer)) => {
                    let start = tokenizer.start_of_text().into_iter();
                    start.chain(tokenizer.encode(&text)?).collect()
                }
                (Given::Text(_) | Given::Messages(_), None) => {
                    return Err(Error::Config(format!(
                        "{name} is a text, and no tokenizer is known; name one with `data.tokenizer` \
                         (`--tokenizer` of `fulgurite generate`), or give the \
                         prompt as tokens"
                    )));
                }
            };
            prompts.push(Prompt { index, ids });
            names.push(name);
        }
        let end_tokens = config.end_tokens.clone();
        let settings = Arc::new(PromptSettings { generation, tokenizer, end_tokens });
        Ok(Self { prompts, names, settings })
    }

    fn batch_size(config: &PromptsConfig) -> usize {
        config.batch_size
    }

    fn items(_: &PromptsConfig) -> &'static str {
        "prompts"
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Predict { self.prompts.len() as u64 } else { 0 }
    }

    fn batch(&self, _: Split, indices: &[u64], _: &Device) -> Result<PromptBatch> {
        let prompts = indices.iter().map(|&i| self.prompts[i as usize].clone()).collect();
        Ok(PromptBatch { prompts, settings: self.settings.clone() })
    }

    fn sample_name(&self, _: Split, index: u64) -> Option<String> {
        Some(self.name(index).to_owned())
    }

    fn host_keys() -> &'static [&'static str] {
        &["chat_template", "path", "tokenizer"]
    }

    fn evaluation_fingerprint(&self) -> Result<Option<String>> {
        let bytes = self.prompts.iter().flat_map(|prompt| {
            let length = prompt.ids.len() as u32;
            std::iter::once(length).chain(prompt.ids.iter().copied()).flat_map(u32::to_le_bytes)
        });
        let bytes: Vec<u8> = bytes.collect();
        Ok(Some(format!("{:016x}", twox_hash::XxHash3_64::oneshot(&bytes))))
    }
}

/// The prompts of a configuration, with their names.
fn given(config: &PromptsConfig) -> Result<Vec<(String, Given)>> {
    let sources =
        [config.path.is_some(), !config.prompts.is_empty(), !config.prompt_ids.is_empty()];
    match sources.iter().filter(|given| **given).count() {
        0 => {
            return Err(Error::Config(
                "there are no prompts; give `data.path`, `data.prompts` or `data.prompt_ids`"
                    .to_owned(),
            ));
        }
        1 => {}
        _ => {
            return Err(Error::Config(
                "give one of `data.path`, `data.prompts` and `data.prompt_ids`, not several"
                    .to_owned(),
            ));
        }
    }
    if let Some(path) = &config.path {
        return read(path);
    }
    let name = |i: usize| format!("prompt {i}");
    let texts = config.prompts.iter().cloned().map(Given::Text);
    let all = texts.chain(config.prompt_ids.iter().cloned().map(Given::Ids));
    Ok(all.enumerate().map(|(i, given)| (name(i), given)).collect())
}

/// Reads a file of prompts.
fn read(path: &Path) -> Result<Vec<(String, Given)>> {
    let bytes = read_regular(path, MAX_FILE)
        .map_err(|error| Error::Data(format!("{error} (data.path)")))?;
    let wrong = |place: &str, what: &str| Err(Error::Data(format!("{place} (data.path) {what}")));
    let Ok(text) = String::from_utf8(bytes) else {
        return wrong(&path.display().to_string(), "is not UTF-8 text");
    };
    let extension = path.extension().and_then(|extension| extension.to_str());
    let is_json = matches!(extension, Some("jsonl" | "ndjson"));
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let place = format!("{}, line {number}", path.display());
        if line.trim().is_empty() {
            return wrong(&place, "is empty; each line is a prompt");
        }
        let given = match is_json {
            false => Given::Text(line.to_owned()),
            true => match serde_json::from_str(line).map(prompt_of) {
                Ok(Some(given)) => given,
                Ok(None) => {
                    return wrong(
                        &place,
                        "needs one of `prompt`, a text, `ids`, a list of tokens, and `messages`, a conversation",
                    );
                }
                Err(error) => return wrong(&place, &format!("is not an object of JSON: {error}")),
            },
        };
        found.push((place, given));
    }
    match found.is_empty() {
        true => wrong(&path.display().to_string(), "has no prompts"),
        false => Ok(found),
    }
}

/// The prompt of a JSON object.
fn prompt_of(value: Value) -> Option<Given> {
    match (value.get("prompt"), value.get("ids"), value.get("messages")) {
        (Some(Value::String(text)), None, None) => Some(Given::Text(text.clone())),
        (None, Some(ids), None) => serde_json::from_value(ids.clone()).ok().map(Given::Ids),
        (None, None, Some(messages)) => Some(Given::Messages(messages.clone())),
        _ => None,
    }
}
