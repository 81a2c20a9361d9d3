//! [`TokenFile`]: token ids in a file, and detection of their type.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fulgurite_error::files::open_regular;
use fulgurite_error::{Error, Result};

use crate::TokenDtype;
use crate::files::has_changed;
use crate::sniff::foreign;
use crate::walk::has_extension;

/// The extensions of token files.
pub(crate) const TOKEN_FILES: &[&str] = &["u16", "u32", "bin", "npy"];

/// Number of inspected ids at the beginning of a file.
const FIRST_IDS: u64 = 1 << 16;

/// Minimum number of ids inspected for the type.
const SAMPLE: usize = 64;

/// The first bytes of a NumPy array.
const NUMPY: &[u8] = b"\x93NUMPY";

/// The first bytes of a Megatron-LM index.
const MEGATRON: &[u8] = b"MMIDIDX\0\0";
/// Bytes of an index up to the type of ids.
const MEGATRON_HEAD: usize = 18;

/// A file of little-endian ids, read by position through the operating system's page cache, which
/// ranks of one host share.
#[derive(Debug)]
pub(crate) struct TokenFile {
    path: PathBuf,
    file: File,
    dtype: TokenDtype,
    /// The position of the first id.
    start: u64,
    len: u64,
}

impl TokenFile {
    /// Opens a file. Without a `dtype`, the type of ids follows from the header (NumPy or llm.c),
    /// the Megatron-LM index beside the file, or the extension.
    ///
    /// # Errors
    /// If the file cannot be read, or does not look like ids of the type.
    pub(crate) fn open(path: &Path, dtype: Option<TokenDtype>) -> Result<Self> {
        let mut file = open_regular(path)?;
        let failed = Error::io("reading", path);
        let mut head = Vec::new();
        let mut read = || {
            file.by_ref().take(FIRST_IDS * 2).read_to_end(&mut head)?;
            file.seek(SeekFrom::Start(0))?;
            Ok(file.metadata()?.len())
        };
        let bytes = read().map_err(failed)?;
        let wrong = |what: String| Error::Data(format!("{} {what}", path.display()));
        let header = match head.starts_with(NUMPY) {
            true => Some(Header::of_numpy(&head).map_err(wrong)?),
            false => Header::of_llm_c(&head),
        };
        let (said, start, len) = if let Some(array) = header {
            let size = array.dtype.size() as u64;
            if array.len.saturating_mul(size).saturating_add(array.start) > bytes {
                return Err(wrong(format!(
                    "is cut off: its header says {} ids, and it has {bytes} bytes",
                    array.len
                )));
            }
            (Some((array.dtype, "its header")), array.start, Some(array.len))
        } else if let Some(flaw) = foreign(&head).filter(|_| !head.starts_with(&[0xff; 4])) {
            return Err(wrong(flaw.message));
        } else {
            let index = megatron_dtype(path)?;
            (index.map(|dtype| (dtype, "the .idx file beside it")), 0, None)
        };
        let extension = || match () {
            () if has_extension(path, &["u16", "bin"]) => Some(TokenDtype::U16),
            () if has_extension(path, &["u32"]) => Some(TokenDtype::U32),
            () => None,
        };
        let kind = match (dtype, said) {
            (Some(dtype), Some((said, source))) if dtype != said => {
                return Err(wrong(format!(
                    "has ids of type {}, as {source} says, and data.token_dtype is \"{}\"; leave the key out",
                    said.name(),
                    dtype.name()
                )));
            }
            (None, Some((said, _))) => said,
            (Some(dtype), _) => dtype,
            (None, None) => {
                let Some(dtype) = extension() else {
                    return Err(Error::Config(format!(
                        "the name of {} does not say what it holds (.u16, .bin, .u32 and .npy would); set \
                         data.token_dtype to \"u16\", \"u32\", \"i32\" or \"i64\"",
                        path.display()
                    )));
                };
                if let Some(wider) = looks_wider(&head, dtype) {
                    let (wider, dtype) = (wider.name(), dtype.name());
                    return Err(wrong(format!(
                        "looks like {wider}: as {dtype}, which its name says, every second id would be 0; set \
                         data.token_dtype = \"{wider}\", or \"{dtype}\" if that is right"
                    )));
                }
                dtype
            }
        };
        let size = kind.size() as u64;
        if len.is_none() && bytes % size != 0 {
            return Err(wrong(format!(
                "has {bytes} bytes, which is no whole number of ids of {size} bytes; is \
                 data.token_dtype right?"
            )));
        }
        let len = len.unwrap_or(bytes / size);
        Ok(Self { path: path.to_owned(), file, dtype: kind, start, len })
    }

    /// A file with known type, offset and number of ids.
    pub(crate) fn of_ids(
        path: PathBuf,
        file: File,
        dtype: TokenDtype,
        start: u64,
        len: u64,
    ) -> Self {
        Self { path, file, dtype, start, len }
    }

    /// The type of its ids.
    pub(crate) fn dtype(&self) -> TokenDtype {
        self.dtype
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The name in messages.
    pub(crate) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The largest of the first ids.
    ///
    /// # Errors
    /// If the ids cannot be read.
    pub(crate) fn largest_first_id(&self) -> Result<u32> {
        let mut ids = vec![0; self.len.min(FIRST_IDS) as usize];
        self.read(0, &mut ids)?;
        Ok(ids.into_iter().max().unwrap_or(0))
    }

    /// Fills `out` with the ids from `start` on, which must exist.
    ///
    /// # Errors
    /// If the ids cannot be read, or one is negative or needs more than 32 bits.
    pub(crate) fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        let size = self.dtype.size();
        let mut bytes = vec![0; out.len() * size];
        let read = self.file.read_exact_at(&mut bytes, self.start + start * size as u64);
        let had = self.start + self.len * size as u64;
        read.map_err(|error| has_changed(&self.path, &self.file, had, error))?;
        let mut wrong = None;
        match self.dtype {
            TokenDtype::U16 => {
                let (ids, _) = bytes.as_chunks::<2>();
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = u16::from_le_bytes(id).into());
            }
            TokenDtype::U32 => {
                let (ids, _) = bytes.as_chunks::<4>();
                out.iter_mut().zip(ids).for_each(|(out, &id)| *out = u32::from_le_bytes(id));
            }
            TokenDtype::I32 => {
                let (ids, _) = bytes.as_chunks::<4>();
                for (out, &id) in out.iter_mut().zip(ids) {
                    let id = i32::from_le_bytes(id);
                    *out = u32::try_from(id).unwrap_or_else(|_| *wrong.insert(id.into()) as u32);
                }
            }
            TokenDtype::I64 => {
                let (ids, _) = bytes.as_chunks::<8>();
                for (out, &id) in out.iter_mut().zip(ids) {
                    let id = i64::from_le_bytes(id);
                    *out = u32::try_from(id).unwrap_or_else(|_| *wrong.insert(id) as u32);
                }
            }
        }
        match wrong {
            None => Ok(()),
            Some(id) => Err(Error::Data(format!(
                "{} has the id {id}, and ids are at least 0 and less than 2^32; is data.token_dtype = \"{}\" right?",
                self.name(),
                self.dtype.name()
            ))),
        }
    }
}

impl TokenDtype {
    pub(crate) fn size(self) -> usize {
        match self {
            Self::U16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::I64 => "i64",
        }
    }
}

/// The wider type that a file's ids seem to have: read as `dtype`, every second id would be
/// (nearly) 0.
fn looks_wider(head: &[u8], dtype: TokenDtype) -> Option<TokenDtype> {
    let (values, _) = head.as_chunks::<2>();
    if values.len() < SAMPLE {
        return None;
    }
    // The largest value at each of the four places of an id of eight bytes.
    let mut largest = [0; 4];
    for (i, &value) in values.iter().enumerate() {
        let largest = &mut largest[i % 4];
        *largest = u16::from_le_bytes(value).max(*largest);
    }
    // The upper half of an id below a million is less than 16. Text never has such an id at every
    // second position.
    let halves = |lower: u16, upper: u16| lower > 0 && upper == 0 || lower > 255 && upper < 16;
    let wide = halves(largest[0], largest[1]) && largest[2..] == [0, 0];
    match dtype {
        TokenDtype::U16 | TokenDtype::U32 if wide => Some(TokenDtype::I64),
        TokenDtype::U16 if halves(largest[0], largest[1]) && halves(largest[2], largest[3]) => {
            Some(TokenDtype::U32)
        }
        _ => None,
    }
}

/// The header of a file of ids.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    dtype: TokenDtype,
    /// The position of the first element.
    start: u64,
    len: u64,
}

impl Header {
    /// Parses the header of llm.c: 256 numbers of four bytes. The first three are the kind, the
    /// version, and the number of ids. `None` for other files.
    fn of_llm_c(head: &[u8]) -> Option<Self> {
        const KINDS: [(u32, u32, TokenDtype); 2] =
            [(20_240_520, 1, TokenDtype::U16), (20_240_801, 7, TokenDtype::U32)];
        let (numbers, _) = head.get(..1024)?.as_chunks::<4>();
        let [kind, version, len] = [0, 1, 2].map(|i| u32::from_le_bytes(numbers[i]));
        let known = KINDS.iter().find(|known| (known.0, known.1) == (kind, version));
        known.map(|(.., dtype)| Self { dtype: *dtype, start: 1024, len: len.into() })
    }

    /// Parses the header of a one-dimensional NumPy array. Errors are words that follow the file's
    /// name.
    fn of_numpy(head: &[u8]) -> Result<Self, String> {
        let broken = || "has a broken NumPy header".to_owned();
        let version = *head.get(NUMPY.len()).ok_or_else(broken)?;
        let (len, at) = match (version, &head[NUMPY.len() + 2..]) {
            (1, [a, b, ..]) => (u64::from(u16::from_le_bytes([*a, *b])), 10),
            (2 | 3, [a, b, c, d, ..]) => (u64::from(u32::from_le_bytes([*a, *b, *c, *d])), 12),
            _ => return Err(broken()),
        };
        let start = at + len;
        let header = head.get(at as usize..start as usize).ok_or_else(broken)?;
        let header = str::from_utf8(header).map_err(|_| broken())?;
        let value = |key: &str| {
            let (_, after) = header.split_once(&format!("'{key}':"))?;
            Some(after.trim_start())
        };
        let quoted = value("descr").and_then(|rest| rest.strip_prefix('\'')?.split('\'').next());
        let descr = quoted.ok_or("is a NumPy array with fields; save one of whole numbers")?;
        let dtype = match descr {
            "<u2" => TokenDtype::U16,
            "<u4" => TokenDtype::U32,
            "<i4" => TokenDtype::I32,
            "<i8" => TokenDtype::I64,
            other => {
                return Err(format!(
                    "is a NumPy array of type {other:?}; save it as uint16, uint32, int32 or int64, such as \
                     `ids.astype(\"uint32\")`"
                ));
            }
        };
        let shape = value("shape").and_then(|rest| rest.strip_prefix('(')?.split(')').next());
        let shape = shape.ok_or_else(broken)?;
        let sizes: Vec<&str> =
            shape.split(',').map(str::trim).filter(|size| !size.is_empty()).collect();
        let [len] = &*sizes else {
            let dims = sizes.len();
            return Err(format!(
                "is a NumPy array of {dims} dimensions ({shape}); save it flat, as `ids.reshape(-1)`"
            ));
        };
        Ok(Self { dtype, start, len: len.parse().map_err(|_| broken())? })
    }
}

/// The type of ids by the Megatron-LM index beside a file; `None` without an index.
///
/// # Errors
/// If the index cannot be read, or the type of ids is not supported.
fn megatron_dtype(path: &Path) -> Result<Option<TokenDtype>> {
    let index = path.with_extension("idx");
    if !has_extension(path, &["bin"]) || !index.is_file() {
        return Ok(None);
    }
    let mut head = Vec::new();
    let read = open_regular(&index)?.take(MEGATRON_HEAD as u64).read_to_end(&mut head);
    read.map_err(Error::io("reading", &index))?;
    let (true, Some(&code)) = (head.starts_with(MEGATRON), head.get(MEGATRON.len() + 8)) else {
        return Ok(None);
    };
    match code {
        4 => Ok(Some(TokenDtype::I32)),
        5 => Ok(Some(TokenDtype::I64)),
        8 => Ok(Some(TokenDtype::U16)),
        _ => Err(Error::Data(format!(
            "{} has ids of the Megatron-LM type {code}, as {} says; only int32 (4), int64 (5) and uint16 (8) are read",
            path.display(),
            index.display()
        ))),
    }
}
