//! The start and end tokens of a text, as the files beside a `tokenizer.json` name them.

use std::path::Path;

use fulgurite_error::files::read_regular;
use fulgurite_error::{Error, Result};
use serde_json::{Map, Value};

use crate::config::AddBosToken;

/// Maximum length of `tokenizer_config.json` and similar files.
const MAX_FILE: u64 = 64 << 20;
/// End-of-text tokens of published tokenizers, for a `tokenizer.json` without other files.
const END_OF_TEXT_TOKENS: [&str; 5] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofsequence|>"];

/// Mask tokens of published tokenizers, for a `tokenizer.json` without other files.
const MASK_TOKENS: [&str; 2] = ["[MASK]", "<mask>"];

/// The tokens around a text, as the configuration names them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted<'a> {
    /// `data.bos_token`.
    pub bos_token: Option<&'a str>,
    /// `data.eos_token`.
    pub eos_token: Option<&'a str>,
    /// `data.add_bos_token`.
    pub add_bos_token: AddBosToken,
}

/// The ids around a text.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpecialTokens {
    /// Precedes each text.
    pub start: Option<u32>,
    /// Follows each text.
    pub end: Option<u32>,
    /// Follows each text that the post-processor completes.
    pub behind: Option<u32>,
    /// Stands for a hidden token.
    pub mask: Option<u32>,
    /// A warning: the end token is unknown, or a guess.
    pub warning: Option<String>,
}

/// The special tokens that a post-processor puts before and behind one text.
#[derive(Debug, Default)]
struct Template {
    before: Option<String>,
    behind: Option<String>,
}

impl SpecialTokens {
    /// Finds the special tokens of `tokenizer`, which was read from `file`. The first of these that
    /// names an end token counts: the configuration, `tokenizer_config.json`,
    /// `special_tokens_map.json`, `generation_config.json`, `config.json`, the post-processor, a
    /// list of five well-known names.
    ///
    /// # Errors
    /// If one of these files cannot be read, or names a token that the tokenizer lacks.
    pub(crate) fn find(
        tokenizer: &tokenizers::Tokenizer,
        file: &Path,
        post_processor: &Value,
        wanted: Wanted<'_>,
    ) -> Result<Self> {
        let folder = file.parent().unwrap_or(Path::new("."));
        let files = Siblings::read(folder)?;
        let template = Template::of(post_processor);
        let known = |key: &str, name: &str| {
            tokenizer.token_to_id(name).ok_or_else(|| {
                Error::Config(format!(
                    "{key} = {name:?} is not one token of {}; name one that it has",
                    file.display()
                ))
            })
        };
        let named = |key: &str, wanted: Option<&str>, in_template: &Option<String>| {
            if let Some(name) = wanted {
                return known(&format!("data.{key}"), name).map(Some);
            }
            if let Some((file, name)) = files.token(key) {
                let name_in_file = format!("{}: {key}", folder.join(file).display());
                return known(&name_in_file, &name)
                    .map(Some)
                    .map_err(|error| Error::Config(format!("{error}, or set `data.{key}`")));
            }
            let id = files.ids(key).find(|&id| tokenizer.id_to_token(id).is_some());
            let of_template =
                || in_template.as_deref().and_then(|name| tokenizer.token_to_id(name));
            Ok(id.or_else(of_template))
        };
        let mut end = named("eos_token", wanted.eos_token, &template.behind)?;
        let mut warning = None;
        if end.is_none() {
            let found =
                END_OF_TEXT_TOKENS.iter().filter(|name| tokenizer.token_to_id(name).is_some());
            let found: Vec<&str> = found.copied().collect();
            end = found.first().and_then(|name| tokenizer.token_to_id(name));
            let file = file.display();
            warning = match &*found {
                [] => Some(format!(
                    "no file says which token of {file} ends a text, so nothing separates documents; \
                     set `data.eos_token`"
                )),
                [_] => None,
                [first, ..] => Some(format!(
                    "no file says which token of {file} ends a text; {first} is taken of {}; set \
                     `data.eos_token`",
                    found.join(", ")
                )),
            };
        }
        let start = match wanted.add_bos_token {
            AddBosToken::Never => false,
            AddBosToken::Always => true,
            // transformers 5 only asks the post-processor. Version 4 falls back to the
            // configuration.
            AddBosToken::Auto if template.before.is_some() || template.behind.is_some() => {
                template.before.is_some()
            }
            AddBosToken::Auto => files.adds_bos_token(),
        };
        let start = match start {
            true => named("bos_token", wanted.bos_token, &template.before)?,
            false => None,
        };
        if start.is_none() && wanted.add_bos_token == AddBosToken::Always {
            return Err(Error::Config(format!(
                "data.add_bos_token: no file says which token of {} begins a text; set \
                 `data.bos_token`",
                file.display()
            )));
        }
        let mask = match named_token(file, "mask_token")? {
            Some((_, name)) => tokenizer.token_to_id(&name),
            None => MASK_TOKENS.iter().find_map(|name| tokenizer.token_to_id(name)),
        };
        let behind = template.behind.and_then(|name| tokenizer.token_to_id(&name));
        Ok(Self { start, end, behind, mask, warning })
    }
}

/// Returns the name of the token under `key`, such as `mask_token`, in the files beside a
/// `tokenizer.json`, and the place that names it.
///
/// # Errors
/// If one of the files cannot be read.
pub(crate) fn named_token(tokenizer: &Path, key: &str) -> Result<Option<(String, String)>> {
    let folder = tokenizer.parent().unwrap_or(Path::new("."));
    let token = Siblings::read(folder)?.token(key);
    Ok(token.map(|(file, name)| (format!("{}: {key}", folder.join(file).display()), name)))
}

/// Files beside a `tokenizer.json` by name; a missing file is empty.
struct Siblings(Vec<(&'static str, Map<String, Value>)>);

impl Siblings {
    const TOKENS: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
    const IDS: [&str; 2] = ["generation_config.json", "config.json"];

    fn read(folder: &Path) -> Result<Self> {
        let mut files = Vec::new();
        for name in Self::TOKENS.into_iter().chain(Self::IDS) {
            let path = folder.join(name);
            if !path.exists() {
                continue;
            }
            let bytes = read_regular(&path, MAX_FILE)?;
            // Other tools write a byte order mark.
            let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
            let values = match serde_json::from_slice(bytes) {
                Ok(values) => values,
                // Many programs have a file of this name.
                Err(_) if Self::IDS.contains(&name) => continue,
                Err(error) => {
                    return Err(Error::Data(format!(
                        "{} (beside data.tokenizer) is not an object of JSON: {error}",
                        path.display()
                    )));
                }
            };
            files.push((name, values));
        }
        Ok(Self(files))
    }

    /// A token by its key: a text, or an `AddedToken` with its `content`. `null` means that it is
    /// not set.
    fn token(&self, key: &str) -> Option<(&'static str, String)> {
        let files = self.0.iter().filter(|(name, _)| Self::TOKENS.contains(name));
        files.filter_map(|(name, values)| Some((*name, content(values.get(key)?)?))).next()
    }

    /// One or several ids under `eos_token_id` or `bos_token_id`.
    fn ids(&self, key: &str) -> impl Iterator<Item = u32> {
        let key = format!("{key}_id");
        let files = self.0.iter().filter(|(name, _)| Self::IDS.contains(name));
        let ids = files.flat_map(move |(_, values)| match values.get(&key) {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
            None => Vec::new(),
        });
        ids.filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
    }

    fn adds_bos_token(&self) -> bool {
        let says = |(_, values): &(_, Map<String, Value>)| values.get("add_bos_token")?.as_bool();
        self.0.iter().find_map(says).unwrap_or(false)
    }
}

fn content(token: &Value) -> Option<String> {
    let content = token.get("content").unwrap_or(token);
    content.as_str().filter(|content| !content.is_empty()).map(str::to_owned)
}

impl Template {
    fn of(post_processor: &Value) -> Self {
        let special =
            |step: Option<&Value>| Some(step?.get("SpecialToken")?.get("id")?.as_str()?.to_owned());
        let pair = |key: &str| Some(post_processor.get(key)?.get(0)?.as_str()?.to_owned());
        match post_processor.get("type").and_then(Value::as_str) {
            Some("TemplateProcessing") => {
                let steps = post_processor.get("single").and_then(Value::as_array);
                let steps = steps.map_or(&[][..], Vec::as_slice);
                Self { before: special(steps.first()), behind: special(steps.last()) }
            }
            Some("BertProcessing" | "RobertaProcessing") => {
                Self { before: pair("cls"), behind: pair("sep") }
            }
            Some("Sequence") => {
                let processors = post_processor.get("processors").and_then(Value::as_array);
                let mut templates = processors.into_iter().flatten().map(Self::of);
                let found = templates.find(|t| t.before.is_some() || t.behind.is_some());
                found.unwrap_or_default()
            }
            _ => Self::default(),
        }
    }
}
