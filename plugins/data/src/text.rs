//! Tokenized documents of one source.

use fulgurite_engine::data::SourceReport;
use fulgurite_error::{Error, Result};

use crate::TokenDtype;
use crate::files::{Documents, ReadTo};
use crate::source::Source;
use crate::token_cache::{CacheKey, Cached, TokenCache};
use crate::tokenizer::Tokenizer;
use crate::unknown::Unknown;

/// The share of unknown tokens above which the start of a run warns.
const MANY_UNKNOWN: f64 = 0.01;

/// Documents of one source with their tokenizer.
pub(crate) struct Text<'a> {
    pub(crate) documents: Documents<'a>,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) cache: Option<&'a TokenCache>,
}

/// The ids of a source.
pub(crate) struct Tokens {
    pub(crate) ids: Source,
    pub(crate) to: ReadTo,
    /// Bytes of memory for the ids of the whole source; an estimate after a partial read.
    pub(crate) memory: u64,
    /// Parts of the text unknown to the tokenizer.
    pub(crate) unknown: Unknown,
    /// The reason for not caching the ids.
    not_kept: Option<String>,
}

impl Tokens {
    /// Warnings for the user. `key` is the key of the source.
    pub(crate) fn warnings(&self, key: &str) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(why) = &self.not_kept {
            warnings.push(format!(
                "{key}: ids are not kept in a file, but in the memory of each rank: {why} (data.cache_dir)"
            ));
        }
        let Unknown { tokens, characters, first } = self.unknown;
        let all = self.ids.len();
        let share = tokens as f64 / all.max(1) as f64;
        if share > MANY_UNKNOWN {
            warnings.push(format!(
                "{key}: {tokens} of {all} tokens ({:.1} %) stand for something that the tokenizer does not \
                 know; is data.tokenizer for this text?",
                100.0 * share
            ));
        }
        if let Some(first) = first {
            warnings.push(format!(
                "{key}: the tokenizer has no token for {characters} characters, and leaves them out; the \
                 first is {first:?}; is data.tokenizer for this text?"
            ));
        }
        warnings
    }
}

impl Text<'_> {
    /// Reads and tokenizes the documents, or reads the ids of all documents from the cache.
    ///
    /// # Errors
    /// The errors of the documents and of the tokenizer.
    pub(crate) fn tokenize(mut self) -> Result<Tokens> {
        let identity = self.tokenizer.identity();
        let cache = self.cache.zip(identity.as_deref());
        if self.documents.enough < usize::MAX {
            let (ids, to, unknown) = in_memory(&mut self.documents, self.tokenizer)?;
            let Documents { file_bytes: all, seen_bytes: seen, .. } = self.documents;
            let memory = match to {
                _ if cache.is_some_and(|(cache, _)| cache.keeps(all) && cache.can_write()) => 0,
                ReadTo::End => ids.memory(),
                ReadTo::Enough => (ids.memory() as f64 * all as f64 / seen.max(1) as f64) as u64,
            };
            return Ok(Tokens { ids, to, memory, unknown, not_kept: None });
        }
        let Some((cache, identity)) = cache else {
            let (ids, to, unknown) = in_memory(&mut self.documents, self.tokenizer)?;
            return Ok(Tokens { memory: ids.memory(), ids, to, unknown, not_kept: None });
        };
        let not_kept = match self.read_cached(cache, identity)? {
            Some(Cached::Ids(ids, unknown)) => {
                let (ids, to) = (Source::Kept(ids), ReadTo::End);
                return Ok(Tokens { ids, to, memory: 0, unknown, not_kept: None });
            }
            Some(Cached::Not(why)) => Some(why),
            None => None,
        };
        // The report already counts these documents.
        let mut report = SourceReport::default();
        let mut documents = self.documents.again(&mut report);
        let (ids, to, unknown) = in_memory(&mut documents, self.tokenizer)?;
        Ok(Tokens { memory: ids.memory(), ids, to, unknown, not_kept })
    }

    /// Returns the cached ids, after writing them if needed; `None` for little text.
    fn read_cached(&mut self, cache: &TokenCache, identity: &str) -> Result<Option<Cached>> {
        let key = CacheKey::new(identity);
        let mut wanted = key.clone();
        self.documents.read(&mut |text| {
            wanted.add_document(&text);
            Ok(())
        })?;
        if !cache.keeps(wanted.bytes) {
            return Ok(None);
        }
        let cached = cache.get(&wanted, dtype(self.tokenizer), &mut |writer| {
            let (mut report, mut read) = (SourceReport::default(), key.clone());
            let mut documents = self.documents.again(&mut report);
            let give = |give: &mut dyn FnMut(String) -> Result<()>| {
                documents.read(&mut |text| {
                    read.add_document(&text);
                    give(text)
                })
            };
            let (_, unknown) =
                self.tokenizer.encode_documents(give, &mut |ids| writer.push(ids))?;
            writer.unknown = unknown;
            if read.finish() == wanted.finish() {
                return Ok(());
            }
            Err(Error::Data(format!(
                "the text of {} changed while it was read; files must not change while they are \
                 trained on",
                self.documents.key
            )))
        })?;
        Ok(Some(cached))
    }
}

fn in_memory(
    documents: &mut Documents,
    tokenizer: &Tokenizer,
) -> Result<(Source, ReadTo, Unknown)> {
    let mut encode = |push: &mut dyn FnMut(&[u32]) -> Result<()>| {
        tokenizer.encode_documents(|give| documents.read(give), push)
    };
    if dtype(tokenizer) == TokenDtype::U16 {
        let mut all: Vec<u16> = Vec::new();
        let (to, unknown) = encode(&mut |ids| {
            all.extend(ids.iter().map(|&id| id as u16));
            Ok(())
        })?;
        all.shrink_to_fit();
        Ok((Source::U16(all), to, unknown))
    } else {
        let mut all = Vec::new();
        let (to, unknown) = encode(&mut |ids| {
            all.extend_from_slice(ids);
            Ok(())
        })?;
        all.shrink_to_fit();
        Ok((Source::U32(all), to, unknown))
    }
}

/// The smallest type for all ids.
fn dtype(tokenizer: &Tokenizer) -> TokenDtype {
    if tokenizer.vocab_size() <= 1 << 16 { TokenDtype::U16 } else { TokenDtype::U32 }
}
