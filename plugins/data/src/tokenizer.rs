//! Text to token ids and back.

use std::path::Path;

use fulgurite_core::files::read_regular;
use fulgurite_core::{Error, Result};

/// The longest `tokenizer.json` that is read; the largest published ones have a tenth of it.
const MAX_FILE: u64 = 256 << 20;

/// Texts that are tokenized in parallel; limits memory.
const TEXTS_PER_BATCH: usize = 64;
/// The end-of-text tokens of published tokenizers.
const END_OF_TEXT_TOKENS: [&str; 5] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofsequence|>"];

/// Turns text into token ids and back.
///
/// ```
/// use fulgurite_data::Tokenizer;
///
/// let bytes = Tokenizer::bytes();
/// assert_eq!(bytes.encode("añ")?, [97, 195, 177]);
/// assert_eq!(bytes.decode(&[97, 195, 177, 256])?, "añ"); // 256 ends a text and shows as nothing
/// assert_eq!((bytes.vocab_size(), bytes.end_of_text()), (257, Some(256)));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tokenizer(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Bytes,
    HuggingFace { tokenizer: Box<tokenizers::Tokenizer>, vocab_size: usize, end: Option<u32> },
}

impl Tokenizer {
    const END_OF_BYTES: u32 = 256;

    /// Every byte of the UTF-8 text is a token; id 256 ends a text.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// A Hugging Face tokenizer: a `tokenizer.json`, or a folder with one.
    ///
    /// # Errors
    /// If there is none, or it cannot be parsed.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let mut path = path.as_ref().to_owned();
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        if !path.exists() {
            return Err(Error::Data(format!(
                "there is no file {} (data.tokenizer); name a Hugging Face tokenizer.json, or \
                 \"bytes\" for the built-in byte-level tokenizer",
                path.display()
            )));
        }
        let bytes = read_regular(&path, MAX_FILE)
            .map_err(|error| Error::Data(format!("{error} (data.tokenizer)")))?;
        let tokenizer = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| {
            Error::Data(format!(
                "{} (data.tokenizer) is not a Hugging Face tokenizer.json: {e}",
                path.display()
            ))
        })?;
        // The largest id, since ids may have gaps.
        let last = tokenizer.get_vocab(true).into_values().max();
        let vocab_size = last.map_or(0, |id| id as usize + 1);
        let end = END_OF_TEXT_TOKENS.iter().find_map(|name| tokenizer.token_to_id(name));
        Ok(Self(Kind::HuggingFace { tokenizer: Box::new(tokenizer), vocab_size, end }))
    }

    /// The ids of a text, without special tokens.
    ///
    /// # Errors
    /// If the tokenizer has no ids for it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace { tokenizer, .. } => {
                let encoding = tokenizer.encode_fast(text, false).map_err(failed)?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of these ids. Special tokens, and bytes that are not UTF-8, are left out or
    /// replaced.
    ///
    /// # Errors
    /// If the tokenizer has no text for them.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace { tokenizer, .. } => tokenizer.decode(ids, true).map_err(failed),
        }
    }

    /// All ids are less than this.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => Self::END_OF_BYTES as usize + 1,
            Kind::HuggingFace { vocab_size, .. } => *vocab_size,
        }
    }

    /// The id that ends a text, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => Some(Self::END_OF_BYTES),
            Kind::HuggingFace { end, .. } => *end,
        }
    }

    /// Calls `push` with the ids of each text in order, followed by the end-of-text id.
    pub(crate) fn encode_all(&self, texts: &[String], mut push: impl FnMut(&[u32])) -> Result<()> {
        let end = self.end_of_text();
        let mut text = |ids: &[u32]| {
            push(ids);
            push(end.as_slice());
        };
        match &self.0 {
            Kind::Bytes => {
                for x in texts {
                    text(&self.encode(x)?);
                }
            }
            Kind::HuggingFace { tokenizer, .. } => {
                for texts in texts.chunks(TEXTS_PER_BATCH) {
                    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                    for encoding in tokenizer.encode_batch_fast(texts, false).map_err(failed)? {
                        text(encoding.get_ids());
                    }
                }
            }
        }
        Ok(())
    }
}

fn failed(error: tokenizers::Error) -> Error {
    Error::Data(format!("the tokenizer failed: {error}"))
}
