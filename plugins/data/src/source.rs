//! Sources of token ids, in memory or in a file.

use std::fs::File;
use std::hash::Hasher as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fulgurite_core::files::open_regular;
use fulgurite_core::{Error, Result};

use twox_hash::XxHash3_64;

use crate::TokenDtype;
use crate::files::has_changed;

/// Ids at a file's beginning that a preview looks at.
const FIRST_IDS: u64 = 1 << 16;

/// Of a file at most this many blocks are hashed, evenly apart, each of so many tokens.
const HASHED_BLOCKS: u64 = 64;
const HASHED_BLOCK: u64 = 2048;

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
    /// Tokenized text whose ids fit into u16.
    U16(Vec<u16>),
    /// Tokenized text with larger ids.
    U32(Vec<u32>),
    /// A token file.
    File(TokenFile),
}

impl Source {
    /// Number of tokens.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::U16(ids) => ids.len() as u64,
            Self::U32(ids) => ids.len() as u64,
            Self::File(file) => file.len,
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
            Self::File(file) => file.read(start, out),
        }
    }

    /// Hashes the tokens, of a long file some of them.
    pub(crate) fn hash(&self, hasher: &mut XxHash3_64) -> Result<()> {
        // Equal for equal tokens, in whichever type they are kept.
        match self {
            Self::U16(ids) => hash_ids(hasher, ids.iter().map(|&id| id.into())),
            Self::U32(ids) => hash_ids(hasher, ids.iter().copied()),
            Self::File(file) => {
                let block = HASHED_BLOCK.min(file.len);
                let blocks = file.len.div_ceil(HASHED_BLOCK).min(HASHED_BLOCKS);
                let mut ids = vec![0; block as usize];
                for i in 0..blocks {
                    // The first block begins with the file, and the last one ends with it.
                    let last = u128::from(file.len - block);
                    let start = last * u128::from(i) / u128::from(blocks.max(2) - 1);
                    file.read(start as u64, &mut ids)?;
                    hash_ids(hasher, ids.iter().copied());
                }
            }
        }
        Ok(())
    }

    /// What it is, for messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::U16(_) | Self::U32(_) => "the text".to_owned(),
            Self::File(file) => file.name(),
        }
    }
}

/// A flat file of little-endian ids, read by position through the operating system's page cache,
/// which ranks of one host share.
#[derive(Debug)]
pub(crate) struct TokenFile {
    path: PathBuf,
    file: File,
    dtype: TokenDtype,
    len: u64,
}

impl TokenFile {
    /// Opens a file. Without a `dtype` the type of ids follows from the extension.
    pub(crate) fn open(path: &Path, dtype: Option<TokenDtype>) -> Result<Self> {
        let extension = path.extension().and_then(|e| e.to_str());
        let dtype = match (dtype, extension) {
            (Some(dtype), _) => dtype,
            (None, Some("u16" | "bin")) => TokenDtype::U16,
            (None, Some("u32")) => TokenDtype::U32,
            _ => {
                return Err(Error::Config(format!(
                    "the name of {} does not say what it holds (.u16, .bin and .u32 would); set \
                     data.token_dtype to \"u16\" or \"u32\"",
                    path.display()
                )));
            }
        };
        let file = open_regular(path)?;
        let bytes = file.metadata().map_err(Error::io("reading", path))?.len();
        let size = dtype.size() as u64;
        if bytes % size != 0 {
            return Err(Error::Data(format!(
                "{} has {bytes} bytes, which is no whole number of ids of {size} bytes; is \
                 data.token_dtype right?",
                path.display()
            )));
        }
        Ok(Self { path: path.to_owned(), file, dtype, len: bytes / size })
    }

    /// What it is, for messages.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The largest of the first ids.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) fn largest_first_id(&self) -> Result<u32> {
        let mut ids = vec![0; self.len.min(FIRST_IDS) as usize];
        self.read(0, &mut ids)?;
        Ok(ids.into_iter().max().unwrap_or(0))
    }

    fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let size = self.dtype.size();
        let mut bytes = vec![0; out.len() * size];
        let read = self.file.read_exact_at(&mut bytes, start * size as u64);
        let had = self.len * size as u64;
        read.map_err(|error| has_changed(&self.path, &self.file, had, error))?;
        match self.dtype {
            TokenDtype::U16 => {
                let (ids, _) = bytes.as_chunks::<2>();
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = u16::from_le_bytes(id).into());
            }
            TokenDtype::U32 => {
                let (ids, _) = bytes.as_chunks::<4>();
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = u32::from_le_bytes(id));
            }
        }
        Ok(())
    }
}

impl TokenDtype {
    fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 => 4,
        }
    }
}
