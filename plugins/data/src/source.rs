//! Sources of token ids, in memory or in a file.

use std::hash::Hasher as _;

use fulgurite_error::Result;
use twox_hash::XxHash3_64;

use crate::token_files::TokenFile;

/// Of a file at most this many evenly spaced blocks are hashed, each with `HASHED_BLOCK` tokens.
const HASHED_BLOCKS: u64 = 64;
const HASHED_BLOCK: u64 = 2048;
/// Tokens of a cache file that are read at a time for hashing.
const READ_AT_ONCE: usize = 1 << 18;

fn hash_ids(hasher: &mut XxHash3_64, ids: impl Iterator<Item = u32>) {
    let mut bytes = Vec::with_capacity(16 << 10);
    for id in ids {
        bytes.extend_from_slice(&id.to_le_bytes());
        if bytes.len() == bytes.capacity() {
            hasher.write(&bytes);
            bytes.clear();
        }
    }
    hasher.write(&bytes);
}

/// A sequence of token ids with random access.
#[derive(Debug)]
pub(crate) enum Source {
    /// Tokenized text with ids that fit into u16.
    U16(Vec<u16>),
    /// Tokenized text with larger ids.
    U32(Vec<u32>),
    /// Tokenized text with ids in a cache file.
    Kept(TokenFile),
    /// A token file.
    File(TokenFile),
}

impl Source {
    /// Number of tokens.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::U16(ids) => ids.len() as u64,
            Self::U32(ids) => ids.len() as u64,
            Self::Kept(file) | Self::File(file) => file.len(),
        }
    }

    /// Fills `out` with the ids from `start` on, which must exist.
    pub(crate) fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let at = start as usize;
        match self {
            Self::U16(ids) => {
                let ids = &ids[at..at + out.len()];
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = id.into());
                Ok(())
            }
            Self::U32(ids) => {
                out.copy_from_slice(&ids[at..at + out.len()]);
                Ok(())
            }
            Self::Kept(file) | Self::File(file) => file.read(start, out),
        }
    }

    /// Bytes of memory for the ids.
    pub(crate) fn memory(&self) -> u64 {
        match self {
            Self::U16(ids) => 2 * ids.len() as u64,
            Self::U32(ids) => 4 * ids.len() as u64,
            Self::Kept(_) | Self::File(_) => 0,
        }
    }

    /// Hashes the tokens; of a long file only some.
    pub(crate) fn hash(&self, hasher: &mut XxHash3_64) -> Result<()> {
        // Equal tokens give equal hashes, independent of their type in memory.
        match self {
            Self::U16(ids) => hash_ids(hasher, ids.iter().map(|&id| id.into())),
            Self::U32(ids) => hash_ids(hasher, ids.iter().copied()),
            Self::Kept(file) => {
                let mut ids = vec![0; READ_AT_ONCE];
                for start in (0..file.len()).step_by(READ_AT_ONCE) {
                    ids.truncate((file.len() - start) as usize);
                    file.read(start, &mut ids)?;
                    hash_ids(hasher, ids.iter().copied());
                }
            }
            Self::File(file) => {
                let block = HASHED_BLOCK.min(file.len());
                let blocks = file.len().div_ceil(HASHED_BLOCK).min(HASHED_BLOCKS);
                let mut ids = vec![0; block as usize];
                for i in 0..blocks {
                    // The first block starts at the beginning, and the last one ends at the end.
                    let last = u128::from(file.len() - block);
                    let start = last * u128::from(i) / u128::from(blocks.max(2) - 1);
                    file.read(start as u64, &mut ids)?;
                    hash_ids(hasher, ids.iter().copied());
                }
            }
        }
        Ok(())
    }

    /// The name in messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::U16(_) | Self::U32(_) | Self::Kept(_) => "the text".to_owned(),
            Self::File(file) => file.name(),
        }
    }
}
