//! Texts, pairs and lists of words as token ids, with a tokenizer's own special tokens.

use std::path::{Path, PathBuf};

use fulgurite_error::{Error, Result};
use fulgurite_launch::catch_panic;
use serde_json::Value;
use tokenizers::{
    EncodeInput, Encoding, PostProcessor as _, PostProcessorWrapper, TruncationDirection,
    TruncationParams, TruncationStrategy,
};

use super::config::{LabelledTextsConfig, RowKind};
use crate::special_tokens::named_token;
use crate::tokenizer_file::{Growth, TokenizerFile};

/// A tokenized text, pair or list of words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) ids: Box<[u32]>,
    /// The segment of each token.
    pub(super) segments: Box<[u8]>,
    /// For a list of words, the index of the word that begins with each token.
    pub(super) words: Box<[Option<u32>]>,
}

/// A text to encode.
#[derive(Debug)]
pub(super) enum Text {
    One(String),
    Pair(String, String),
    Words(Vec<String>),
}

/// Encodes texts for a model.
#[derive(Debug)]
pub(super) struct TextEncoder {
    tokenizer: tokenizers::Tokenizer,
    growth: Growth,
    file: PathBuf,
    /// The file, for messages.
    name: String,
    /// Whether each word of a list gets a space in front.
    space_before_words: bool,
    pub(super) pad_id: u32,
    pub(super) vocab_size: usize,
    /// A hash of the file.
    pub(super) hash: u128,
}

impl TextEncoder {
    pub(super) fn open(config: &LabelledTextsConfig) -> Result<Self> {
        let path = config.tokenizer.as_deref().unwrap_or_default();
        let TokenizerFile { path: file, mut tokenizer, parts, growth, hash, .. } =
            TokenizerFile::read(Path::new(path))?;
        let name = file.display().to_string();
        let wrong = |what: String| Error::Data(format!("{name} (data.tokenizer): {what}"));
        let mut added = 0;
        if !parts.post_processor.is_null() {
            let processor: PostProcessorWrapper = serde_json::from_value(parts.post_processor)
                .map_err(|error| wrong(format!("its post-processor cannot be read: {error}")))?;
            added = processor.added_tokens(config.text_pair_key.is_some());
            tokenizer.with_post_processor(Some(processor));
        }
        if config.seq_len <= added {
            return Err(Error::Config(format!(
                "data.seq_len = {} leaves no place for a text: {name} (data.tokenizer) puts {added} tokens around it",
                config.seq_len
            )));
        }
        tokenizer
            .with_truncation(Some(TruncationParams {
                direction: TruncationDirection::Right,
                max_length: config.seq_len,
                strategy: TruncationStrategy::LongestFirst,
                stride: 0,
            }))
            .map_err(|error| wrong(error.to_string()))?;
        let pad = match &config.pad_token {
            Some(token) => Some(("data.pad_token".to_owned(), token.clone())),
            None => named_token(&file, "pad_token")?,
        };
        let pad_id = match pad {
            None => 0,
            Some((place, token)) => tokenizer.token_to_id(&token).ok_or_else(|| {
                Error::Config(format!(
                    "{place} = {token:?} is not one token of {name}; name one that it has with data.pad_token"
                ))
            })?,
        };
        let last = tokenizer.get_vocab(true).into_values().max();
        let vocab_size = last.map_or(0, |id| id as usize + 1);
        let space_before_words =
            config.kind == RowKind::Words && lacks_prefix_space(&parts.pre_tokenizer);
        Ok(Self { tokenizer, growth, file, name, space_before_words, pad_id, vocab_size, hash })
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the tokens of a text, and whether it was cut.
    pub(super) fn encode(&self, text: &Text) -> Result<(Encoded, bool)> {
        let check = |text: &str| self.growth.check(text).map_err(|what| self.failed(&what));
        let encoding = match text {
            Text::One(text) => {
                check(text)?;
                self.run(text.as_str().into(), false)?
            }
            Text::Pair(first, second) => {
                check(first)?;
                check(second)?;
                self.run((first.as_str(), second.as_str()).into(), false)?
            }
            Text::Words(words) => {
                let spaced = |word: &String| match self.space_before_words {
                    true => format!(" {word}"),
                    false => word.clone(),
                };
                let words: Vec<String> = words.iter().map(spaced).collect();
                words.iter().try_for_each(|word| check(word))?;
                self.run(words.into(), true)?
            }
        };
        let words = match text {
            Text::Words(_) => beginnings(encoding.get_word_ids()),
            Text::One(_) | Text::Pair(..) => Box::default(),
        };
        let segments = encoding.get_type_ids().iter().map(|&segment| segment.min(255) as u8);
        let encoded =
            Encoded { ids: encoding.get_ids().into(), segments: segments.collect(), words };
        Ok((encoded, !encoding.get_overflowing().is_empty()))
    }

    /// Encodes an input. Only with `keep_words` the tokens know their words, which takes longer.
    fn run(&self, input: EncodeInput<'_>, keep_words: bool) -> Result<Encoding> {
        let encode = || match keep_words {
            true => self.tokenizer.encode(input, true),
            false => self.tokenizer.encode_fast(input, true),
        };
        catch_panic(encode)
            .map_err(|panic| self.failed(&format!("the tokenizer panicked: {panic}")))?
            .map_err(|error| self.failed(&format!("the tokenizer failed: {error}")))
    }

    fn failed(&self, what: &str) -> Error {
        Error::Data(format!("{} (data.tokenizer): {what}", self.name))
    }
}

/// The word that begins with each token.
fn beginnings(words: &[Option<u32>]) -> Box<[Option<u32>]> {
    let mut before = None;
    let begins = words.iter().map(|&word| {
        let begins = word.filter(|_| word != before);
        before = word;
        begins
    });
    begins.collect()
}

/// Whether a pre-tokenizer of bytes expects the space before a word in the text. Such a tokenizer
/// would read the words of a list as parts of one word.
fn lacks_prefix_space(pre_tokenizer: &Value) -> bool {
    let nested = pre_tokenizer.get("pretokenizers").and_then(Value::as_array);
    let is_bytes = pre_tokenizer.get("type").and_then(Value::as_str) == Some("ByteLevel");
    let adds = pre_tokenizer.get("add_prefix_space").and_then(Value::as_bool);
    (is_bytes && adds == Some(false)) || nested.into_iter().flatten().any(lacks_prefix_space)
}
