//! Text unknown to a tokenizer.

use std::ops::AddAssign;

use tokenizers::models::ModelWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Encoding, Tokenizer};

use crate::tokenizer_file::TokenizerFile;

/// The amount of unknown text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Unknown {
    /// Unknown tokens.
    pub tokens: u64,
    /// Characters without a token.
    pub characters: u64,
    /// The first such character.
    pub first: Option<char>,
}

impl AddAssign for Unknown {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.characters += other.characters;
        self.first = self.first.or(other.first);
    }
}

/// The unknown token, and whether the tokenizer drops characters.
#[derive(Debug, Clone)]
pub(crate) struct Gaps {
    /// The token for unknown text.
    unknown: Option<u32>,
    /// Whether characters can vanish: a BPE model without an unknown token.
    pub leaves_out: bool,
}

impl Gaps {
    pub(crate) fn of(file: &TokenizerFile) -> Self {
        let (tokenizer, model) = (&file.tokenizer, &file.parts.model);
        let named = model.unk_token.as_deref().and_then(|token| tokenizer.token_to_id(token));
        let leaves_out = match tokenizer.get_model() {
            ModelWrapper::BPE(model) if model.unk_token.is_none() => {
                let has = |token: &str| tokenizer.token_to_id(token).is_some();
                let all_bytes =
                    model.byte_fallback && (0..=u8::MAX).all(|byte| has(&format!("<{byte:#04X}>")));
                let byte_level = file.parts.pre_tokenizer.to_string().contains("\"ByteLevel\"")
                    && ByteLevel::alphabet().iter().all(|byte| has(&byte.to_string()));
                !all_bytes && !byte_level
            }
            _ => false,
        };
        Self { unknown: named.or(model.unk_id), leaves_out }
    }

    /// Counts the unknown parts of a text.
    pub(crate) fn find(&self, tokenizer: &Tokenizer, text: &str, encoding: &Encoding) -> Unknown {
        let ids = encoding.get_ids().iter();
        let tokens = ids.filter(|&&id| Some(id) == self.unknown).count() as u64;
        let mut unknown = Unknown { tokens, ..Unknown::default() };
        if !self.leaves_out {
            return unknown;
        }
        let mut covered = vec![false; text.len()];
        for &(start, end) in encoding.get_offsets() {
            covered[start..end.min(text.len())].fill(true);
        }
        for (at, character) in text.char_indices() {
            // White space between words does not count.
            if !covered[at] && !character.is_whitespace() && is_kept(tokenizer, character) {
                unknown += Unknown { tokens: 0, characters: 1, first: Some(character) };
            }
        }
        unknown
    }
}

/// Whether any part of a character survives the normalizer.
fn is_kept(tokenizer: &Tokenizer, character: char) -> bool {
    use tokenizers::{NormalizedString, Normalizer as _};
    let mut text = NormalizedString::from(character.to_string());
    match tokenizer.get_normalizer() {
        Some(normalizer) => normalizer.normalize(&mut text).is_ok() && !text.is_empty(),
        None => true,
    }
}
