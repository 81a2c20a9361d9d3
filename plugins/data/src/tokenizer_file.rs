//! Reads a `tokenizer.json`: its limits, and the ignored settings.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use fulgurite_error::files::{foreign_content, read_regular};
use fulgurite_error::{Error, Result};
use fulgurite_hub::{Cache, Repository};
use fulgurite_launch::catch_panic;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use twox_hash::XxHash3_128;

use crate::pattern;

/// Maximum length of a `tokenizer.json`; the largest published ones have a tenth of it.
const MAX_FILE: u64 = 256 << 20;
/// Maximum factor by which normalization may lengthen a text.
const MAX_GROWTH: f64 = 64.0;
/// Files of other tokenizers that transformers can convert to a `tokenizer.json`.
const OTHER_FILES: [&str; 7] = [
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tekken.json",
];

/// A tokenizer, and the parts of its file that Fulgurite reads itself.
#[derive(Debug)]
pub(crate) struct TokenizerFile {
    pub path: PathBuf,
    pub tokenizer: tokenizers::Tokenizer,
    pub parts: Parts,
    pub growth: Growth,
    /// Whether the file asks for random ids, which is ignored.
    pub dropout: bool,
    /// A hash of the file.
    pub hash: u128,
}

/// Parts of a `tokenizer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parts {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub post_processor: Value,
    decoder: Value,
    pub model: ModelPart,
    added_tokens: Vec<AddedToken>,
}

/// A model's token for unknown text, if the model has one.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ModelPart {
    pub unk_token: Option<String>,
    pub unk_id: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct AddedToken {
    content: String,
}

/// The file or folder of a tokenizer: this path, or the snapshot of the repository that it names in
/// the local Hub cache, as in `model.from_pretrained`.
pub(crate) fn located(path: &Path) -> PathBuf {
    let name = path.to_str().filter(|_| !path.exists());
    let repository = name.and_then(|name| name.parse::<Repository>().ok());
    let cached = repository.and_then(|it| Cache::from_environment().find(&it, "main"));
    cached.unwrap_or_else(|| path.to_owned())
}

impl TokenizerFile {
    /// Reads a `tokenizer.json`, or the one in a folder or a cached repository. Ignores truncation,
    /// padding and the post-processor, which prepare a model's input, and dropout, which differs by
    /// rank.
    ///
    /// # Errors
    /// If the file is missing, cannot be parsed, or makes texts far longer.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let mut path = located(path);
        if path.is_dir() {
            let has = |name: &&str| path.join(name).exists();
            let others: Vec<&str> = OTHER_FILES.into_iter().filter(has).collect();
            if !path.join("tokenizer.json").exists() && !others.is_empty() {
                return Err(Error::Data(format!(
                    "the folder {folder} (data.tokenizer) has {} and no tokenizer.json; write one with \
                     transformers: AutoTokenizer.from_pretrained({folder:?}).save_pretrained({folder:?})",
                    others.join(", "),
                    folder = path.display().to_string(),
                )));
            }
            path.push("tokenizer.json");
        }
        if !path.exists() {
            return Err(Error::Data(format!(
                "there is no file {} (data.tokenizer); name a Hugging Face tokenizer.json, a repository in the \
                 local Hub cache, or \"bytes\" for the built-in byte-level tokenizer",
                path.display()
            )));
        }
        let bytes = read_regular(&path, MAX_FILE)
            .map_err(|error| Error::Data(format!("{error} (data.tokenizer)")))?;
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let no_tokenizer = |error: String| {
            Error::Data(format!(
                "{} (data.tokenizer) is not a Hugging Face tokenizer.json: {error}",
                path.display()
            ))
        };
        let parts: Parts = serde_json::from_slice(bytes).map_err(|error| {
            no_tokenizer(foreign_content(bytes).map_or_else(|| error.to_string(), str::to_owned))
        })?;
        let refused =
            |what: String| Error::Data(format!("{} (data.tokenizer): {what}", path.display()));
        let growth = Growth::of(&parts.normalizer).map_err(refused)?;
        for token in &parts.added_tokens {
            growth.check(&token.content).map_err(refused)?;
        }
        Growth::of(&parts.decoder).and_then(|growth| growth.refuse("decoder")).map_err(refused)?;
        let mut tokenizer = catch_panic(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|panic| no_tokenizer(format!("the library that reads it panicked: {panic}")))?
            .map_err(|error| no_tokenizer(error.to_string()))?;
        tokenizer
            .with_padding(None)
            .with_post_processor(None::<tokenizers::PostProcessorWrapper>)
            .with_truncation(None)
            .map_err(|error| refused(error.to_string()))?;
        let dropout = clear_dropout(&mut tokenizer);
        let hash = XxHash3_128::oneshot(bytes);
        Ok(Self { path, tokenizer, parts, growth, dropout, hash })
    }
}

/// Removes settings that make ids random. Returns whether there were any.
fn clear_dropout(tokenizer: &mut tokenizers::Tokenizer) -> bool {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) if model.dropout.is_some_and(|share| share != 0.0) => {
            let mut model = model.clone();
            model.dropout = None;
            tokenizer.with_model(model);
            true
        }
        ModelWrapper::Unigram(model) if model.alpha.is_some() || model.nbest_size.is_some() => {
            let mut model = model.clone();
            (model.alpha, model.nbest_size) = (None, None);
            tokenizer.with_model(model);
            true
        }
        _ => false,
    }
}

/// The growth of a text by a chain of replacements.
#[derive(Debug, Clone)]
pub(crate) struct Growth {
    /// Upper bound of the factor.
    at_most: f64,
    /// The replacements in order; `None` if a regular expression makes texts longer.
    replacements: Option<Vec<(String, String)>>,
}

impl Growth {
    /// The growth by a normalizer or decoder.
    ///
    /// # Errors
    /// If the growth cannot be bounded.
    fn of(chain: &Value) -> Result<Self, String> {
        let mut growth = Self { at_most: 1.0, replacements: Some(Vec::new()) };
        growth.add(chain);
        if growth.at_most > MAX_GROWTH && growth.replacements.is_none() {
            growth.refuse("normalizer")?;
        }
        Ok(growth)
    }

    fn add(&mut self, part: &Value) {
        let nested = part.get("normalizers").or_else(|| part.get("decoders"));
        for part in nested.and_then(Value::as_array).into_iter().flatten() {
            self.add(part);
        }
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let prepended = text(part.get("prepend"));
        if let Some(prepended) = prepended {
            self.at_most *= 1.0 + prepended.len() as f64;
        }
        let (Some(pattern), Some(content)) = (part.get("pattern"), text(part.get("content")))
        else {
            return;
        };
        let string = text(pattern.get("String")).filter(|string| !string.is_empty());
        let shortest = match &string {
            Some(string) => string.len(),
            None => text(pattern.get("Regex")).map_or(0, |regex| pattern::shortest_match(&regex)),
        };
        let factor = match shortest {
            0 => 1.0 + content.len() as f64,
            shortest => content.len() as f64 / shortest as f64,
        };
        self.at_most *= factor.max(1.0);
        match (string, &mut self.replacements) {
            (Some(string), Some(replacements)) => replacements.push((string, content)),
            (None, replacements) if factor > 1.0 => *replacements = None,
            _ => {}
        }
    }

    /// Checks before normalization that a text stays short enough.
    ///
    /// # Errors
    /// If the text would become too long.
    pub(crate) fn check(&self, text: &str) -> Result<(), String> {
        let Some(replacements) = self.replacements.as_ref().filter(|_| self.at_most > MAX_GROWTH)
        else {
            return Ok(());
        };
        let most = (text.len() as f64 * MAX_GROWTH) as usize;
        let mut text = Cow::Borrowed(text);
        for (string, content) in replacements {
            let matches = text.matches(string.as_str()).count();
            if text.len() + matches * content.len().saturating_sub(string.len()) > most {
                return Err(format!(
                    "its normalizer makes a text more than {MAX_GROWTH} times as long"
                ));
            }
            text = Cow::Owned(text.replace(string.as_str(), content));
        }
        Ok(())
    }

    fn refuse(&self, what: &str) -> Result<(), String> {
        if self.at_most <= MAX_GROWTH {
            return Ok(());
        }
        Err(format!(
            "its {what} can make a text {:.0} times as long; at most {MAX_GROWTH} times is allowed",
            self.at_most
        ))
    }
}
