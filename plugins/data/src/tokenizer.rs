//! Conversion between text and token ids.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fulgurite_error::{Error, Result};
use fulgurite_launch::catch_panic;
use rayon::prelude::*;

use crate::config::AddBosToken;
use crate::cuts::Cuts;
use crate::special_tokens::{SpecialTokens, Wanted};
use crate::tokenizer_file::{Growth, TokenizerFile};
use crate::unknown::{Gaps, Unknown};

/// The version of the tokenizers library. Another version may give other ids.
const LIBRARY: &str = "0.23.2";
/// Raise this number whenever this crate gives other ids, for example by other cuts.
const ALGORITHM: u32 = 1;
/// Bytes of a piece of a text; a longer text is tokenized in pieces.
const PIECE: usize = 16 << 10;
/// Bytes of text tokenized at once. The library uses 160 bytes of memory for each.
const BATCH: usize = 512 << 10;
/// Minimum speed in bytes per second, and the time after which a slower tokenizer is an error.
const SLOWEST: (f64, Duration) = (512.0, Duration::from_secs(120));

/// Converts text to token ids and back.
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
    HuggingFace(Box<HuggingFace>),
}

#[derive(Debug, Clone)]
struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    file: PathBuf,
    vocab_size: usize,
    special: SpecialTokens,
    cuts: Cuts,
    growth: Growth,
    gaps: Gaps,
    /// Whether the file asks for random ids, which is ignored.
    dropout: bool,
    /// A hash of the file.
    hash: u128,
}

impl Tokenizer {
    const END_OF_BYTES: u32 = 256;

    /// Every byte of the UTF-8 text is a token; id 256 ends a text.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// Reads a Hugging Face tokenizer: a `tokenizer.json`, a folder with one, or the name of a
    /// repository in the local Hub cache. Truncation,
    /// padding and dropout are ignored: they are settings of the last call before the file was
    /// saved. The files beside it name the end token: `tokenizer_config.json`,
    /// `special_tokens_map.json`, `generation_config.json` or `config.json`.
    ///
    /// # Errors
    /// If the file is missing or cannot be parsed. Also if `tokenizer_config.json` or
    /// `special_tokens_map.json` cannot be parsed, or names an end token that the tokenizer lacks.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path.as_ref(), Wanted::default())
    }

    /// Like [`from_file`](Self::from_file), with the start token that transformers puts before a
    /// text as [`start_of_text`](Self::start_of_text), if it puts one.
    ///
    /// # Errors
    /// As [`from_file`](Self::from_file).
    pub fn from_file_with_start(path: impl AsRef<Path>) -> Result<Self> {
        let wanted = Wanted { add_bos_token: AddBosToken::Auto, ..Wanted::default() };
        Self::open(path.as_ref(), wanted)
    }

    /// [`from_file`](Self::from_file), with the configured special tokens.
    pub(crate) fn open(path: &Path, wanted: Wanted<'_>) -> Result<Self> {
        let file = TokenizerFile::read(path)?;
        // The largest id, since ids may have gaps.
        let last = file.tokenizer.get_vocab(true).into_values().max();
        let vocab_size = last.map_or(0, |id| id as usize + 1);
        let special =
            SpecialTokens::find(&file.tokenizer, &file.path, &file.parts.post_processor, wanted)?;
        Ok(Self(Kind::HuggingFace(Box::new(HuggingFace {
            file: file.path.clone(),
            vocab_size,
            special,
            cuts: Cuts::of(&file),
            gaps: Gaps::of(&file),
            dropout: file.dropout,
            growth: file.growth,
            hash: file.hash,
            tokenizer: file.tokenizer,
        }))))
    }

    /// Returns the ids of a text, without the tokens around it. Names of special tokens in the text
    /// become these tokens, as in transformers.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::HuggingFace(tokenizer) => {
                let mut ids = Vec::new();
                let mut push = |more: &[u32]| {
                    ids.extend_from_slice(more);
                    Ok(())
                };
                let mut encoder = Encoder::new(tokenizer, None, None, &mut push);
                encoder.push(text)?;
                encoder.finish()?;
                Ok(ids)
            }
        }
    }

    /// Returns the ids of a text, as [`encode`](Self::encode), with the bytes that each stands for.
    ///
    /// # Errors
    /// If the tokenizer cannot encode the text.
    pub(crate) fn encode_with_bytes(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        match &self.0 {
            Kind::Bytes => {
                Ok(text.bytes().enumerate().map(|(i, byte)| (byte.into(), i..i + 1)).collect())
            }
            Kind::HuggingFace(tokenizer) => {
                let encoding = tokenizer.run(text, true)?;
                let bytes = encoding.get_offsets().iter().map(|&(start, end)| start..end);
                Ok(encoding.get_ids().iter().copied().zip(bytes).collect())
            }
        }
    }

    /// Returns the text of these ids. Special tokens and bytes that are not UTF-8 are left out or
    /// replaced.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::HuggingFace(tokenizer) => tokenizer.decode(ids, true),
        }
    }

    /// Returns the text of some of these ids, with special tokens by name, for people.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the ids.
    pub fn show(&self, ids: &[u32], part: Range<usize>) -> Result<String> {
        match &self.0 {
            Kind::Bytes => {
                let texts = ids[part].split_inclusive(|id| *id >= Self::END_OF_BYTES);
                let text = |ids: &[u32]| -> Result<String> {
                    let ends = ids.last().is_some_and(|id| *id >= Self::END_OF_BYTES);
                    Ok(self.decode(ids)? + if ends { "<end>" } else { "" })
                };
                texts.map(text).collect()
            }
            Kind::HuggingFace(tokenizer) => {
                // The tokens before them decide about spaces.
                let whole = tokenizer.decode(&ids[..part.end], false)?;
                let before = tokenizer.decode(&ids[..part.start], false)?;
                match whole.strip_prefix(&before) {
                    Some(text) => Ok(text.to_owned()),
                    None => tokenizer.decode(&ids[part], false),
                }
            }
        }
    }

    /// Exclusive upper bound of all ids.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => Self::END_OF_BYTES as usize + 1,
            Kind::HuggingFace(tokenizer) => tokenizer.vocab_size,
        }
    }

    /// The id that ends a text, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => Some(Self::END_OF_BYTES),
            Kind::HuggingFace(tokenizer) => tokenizer.special.end,
        }
    }

    /// The id that the tokenizer itself puts behind a text that an encoder reads, as T5's does;
    /// `None` if it puts none there.
    pub fn added_end(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.special.behind,
        }
    }

    /// The id that stands for a hidden token, if the tokenizer has one.
    pub fn mask_token(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.special.mask,
        }
    }

    /// The ids of all special tokens, in ascending order.
    pub fn special_tokens(&self) -> Vec<u32> {
        let tokenizer = match &self.0 {
            Kind::Bytes => return vec![Self::END_OF_BYTES],
            Kind::HuggingFace(tokenizer) => &tokenizer.tokenizer,
        };
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special);
        let mut ids: Vec<u32> = special.map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    }

    /// The id before each document; `None` unless `data.add_bos_token` or
    /// [`from_file_with_start`](Self::from_file_with_start) asks for it.
    pub fn start_of_text(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => tokenizer.special.start,
        }
    }

    /// The `tokenizer.json`; `None` for bytes.
    pub(crate) fn file(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::HuggingFace(tokenizer) => Some(&tokenizer.file),
        }
    }

    /// A name that changes whenever ids of documents change; `None` for bytes, which are not
    /// cached.
    pub(crate) fn identity(&self) -> Option<String> {
        let Kind::HuggingFace(tokenizer) = &self.0 else { return None };
        let HuggingFace { hash, special, .. } = &**tokenizer;
        let SpecialTokens { start, end, .. } = special;
        Some(format!("{LIBRARY} {ALGORITHM} {hash:032x} {start:?} {end:?}"))
    }

    /// Warnings for the user: an unknown end token, random ids.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let Kind::HuggingFace(tokenizer) = &self.0 else { return Vec::new() };
        let mut warnings: Vec<String> = tokenizer.special.warning.iter().cloned().collect();
        if tokenizer.dropout {
            warnings.push(format!(
                "{} (data.tokenizer) asks for random ids (dropout, alpha or nbest_size); these settings do not \
                 count, for the ids of a text must be the same on all ranks",
                tokenizer.file.display()
            ));
        }
        warnings
    }

    /// Calls `push` with the ids of `read`'s documents, in order, each between the start and end
    /// ids. Returns the result of `read`, and the unknown parts of the text.
    ///
    /// # Errors
    /// If the tokenizer cannot encode a text, or `read` or `push` fails.
    pub(crate) fn encode_documents<R>(
        &self,
        read: impl FnOnce(&mut dyn FnMut(String) -> Result<()>) -> Result<R>,
        push: &mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Result<(R, Unknown)> {
        match &self.0 {
            Kind::Bytes => {
                let result = read(&mut |text| {
                    push(&self.encode(&text)?)?;
                    push(&[Self::END_OF_BYTES])
                })?;
                Ok((result, Unknown::default()))
            }
            Kind::HuggingFace(tokenizer) => {
                let SpecialTokens { start, end, .. } = tokenizer.special;
                let mut encoder = Encoder::new(tokenizer, start, end, push);
                let result = read(&mut |text| encoder.push(&text))?;
                Ok((result, encoder.finish()?))
            }
        }
    }
}

impl HuggingFace {
    /// The ids and unknown parts of each piece, computed on all threads.
    fn encode(&self, pieces: &[Piece]) -> Result<Vec<(Vec<u32>, Unknown)>> {
        let encode = |piece: &Piece| {
            let text = piece.text.as_str();
            let encoding = self.run(text, self.gaps.leaves_out)?;
            let unknown = self.gaps.find(&self.tokenizer, text, &encoding);
            Ok((encoding.get_ids().to_vec(), unknown))
        };
        pieces.par_iter().map(encode).collect()
    }

    /// Encodes a text without the tokens around it. It is faster without the tokens' bytes.
    fn run(&self, text: &str, with_bytes: bool) -> Result<tokenizers::Encoding> {
        self.growth.check(text).map_err(|what| self.failed(&what))?;
        let encoded = catch_panic(|| match with_bytes {
            true => self.tokenizer.encode(text, false),
            false => self.tokenizer.encode_fast(text, false),
        });
        encoded
            .map_err(|panic| self.failed(&format!("the tokenizer panicked: {panic}")))?
            .map_err(|error| self.failed(&format!("the tokenizer failed: {error}")))
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        catch_panic(|| self.tokenizer.decode(ids, skip_special))
            .map_err(|panic| self.failed(&format!("the tokenizer panicked: {panic}")))?
            .map_err(|error| self.failed(&format!("the tokenizer failed: {error}")))
    }

    fn failed(&self, what: &str) -> Error {
        Error::Data(format!("{} (data.tokenizer): {what}", self.file.display()))
    }
}

/// Tokenizes texts in pieces, many at a time.
struct Encoder<'a> {
    tokenizer: &'a HuggingFace,
    start: Option<u32>,
    end: Option<u32>,
    push: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    pieces: Vec<Piece>,
    /// Bytes of `pieces`.
    waiting: usize,
    /// Bytes tokenized so far, and the time spent on them.
    done: usize,
    busy: Duration,
    unknown: Unknown,
}

struct Piece {
    text: String,
    begins: bool,
    ends: bool,
}

impl<'a> Encoder<'a> {
    fn new(
        tokenizer: &'a HuggingFace,
        start: Option<u32>,
        end: Option<u32>,
        push: &'a mut dyn FnMut(&[u32]) -> Result<()>,
    ) -> Self {
        let (pieces, busy, unknown) = (Vec::new(), Duration::ZERO, Unknown::default());
        Self { tokenizer, start, end, push, pieces, waiting: 0, done: 0, busy, unknown }
    }

    fn push(&mut self, text: &str) -> Result<()> {
        let HuggingFace { cuts, tokenizer, .. } = self.tokenizer;
        let mut pieces = cuts.pieces(tokenizer, text, PIECE).peekable();
        let mut begins = true;
        while let Some(piece) = pieces.next() {
            self.waiting += piece.len();
            let ends = pieces.peek().is_none();
            self.pieces.push(Piece { text: piece.to_owned(), begins, ends });
            begins = false;
            // Empty texts have up to two ids as well.
            if self.waiting >= BATCH || self.pieces.len() >= BATCH / 16 {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Unknown> {
        self.flush()?;
        Ok(self.unknown)
    }

    fn flush(&mut self) -> Result<()> {
        let started = Instant::now();
        let encoded = self.tokenizer.encode(&self.pieces)?;
        for (piece, (ids, unknown)) in self.pieces.drain(..).zip(encoded) {
            self.unknown += unknown;
            if piece.begins {
                (self.push)(self.start.as_slice())?;
            }
            (self.push)(&ids)?;
            if piece.ends {
                (self.push)(self.end.as_slice())?;
            }
        }
        self.done += std::mem::take(&mut self.waiting);
        self.busy += started.elapsed();
        let (slowest, patience) = SLOWEST;
        if self.busy > patience && (self.done as f64) < slowest * self.busy.as_secs_f64() {
            return Err(self.tokenizer.failed(&format!(
                "the tokenizer took {} s for {} bytes of text, and is given up",
                self.busy.as_secs(),
                self.done
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::LIBRARY;

    #[test]
    fn library_version_matches_the_lock_file() {
        let lock = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock"));
        let (_, rest) = lock.split_once("name = \"tokenizers\"\nversion = \"").unwrap();
        assert_eq!(rest.split('"').next(), Some(LIBRARY));
    }
}
