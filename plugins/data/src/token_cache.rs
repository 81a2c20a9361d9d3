//! Token ids of text, cached in files for other ranks of the host and for later runs.

use std::fs::{self, File, OpenOptions};
use std::hash::Hasher as _;
use std::io::{self, BufWriter, ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fulgurite_error::files::open_regular;
use fulgurite_error::{Error, Result};
use fulgurite_launch::interrupt_requested;
use rustix::fs::{Access, OFlags, access};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::TokenDtype;
use crate::config::CacheDir;
use crate::token_files::TokenFile;
use crate::unknown::Unknown;

/// Magic bytes of a file; the last one is the format version.
const MAGIC: &[u8; 8] = b"FULGIDS\x01";
/// Bytes before the ids: magic, key, number and size of ids, their hash, unknown tokens and
/// characters, the first unknown character, a hash of the header.
const HEADER: usize = 80;
/// Minimum text in bytes for the default folder. Less text is tokenized in two seconds.
const WORTH_KEEPING: u64 = 4 << 20;
/// Wait for another process before a warning.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// A folder of id files. A file's name is a hash of the documents and the tokenizer.
#[derive(Debug)]
pub(crate) struct TokenCache {
    folder: PathBuf,
    /// Minimum text in bytes whose ids are cached.
    from: u64,
}

/// A hash of a tokenizer and documents.
#[derive(Clone)]
pub(crate) struct CacheKey {
    hasher: XxHash3_128,
    /// Bytes of the documents.
    pub(crate) bytes: u64,
}

impl CacheKey {
    /// The key of zero documents, for a tokenizer.
    pub(crate) fn new(tokenizer: &str) -> Self {
        let mut key = Self { hasher: XxHash3_128::new(), bytes: 0 };
        key.add_document(tokenizer);
        Self { bytes: 0, ..key }
    }

    pub(crate) fn add_document(&mut self, text: &str) {
        // The length separates documents.
        self.hasher.write(&(text.len() as u64).to_le_bytes());
        self.hasher.write(text.as_bytes());
        self.bytes += text.len() as u64;
    }

    pub(crate) fn finish(&self) -> u128 {
        self.hasher.finish_128()
    }
}

/// The result of a cache lookup.
pub(crate) enum Cached {
    /// Cached ids.
    Ids(TokenFile, Unknown),
    /// The reason why the ids cannot be cached.
    Not(String),
}

impl TokenCache {
    /// The configured cache; `None` without one.
    pub(crate) fn in_dir(dir: &CacheDir) -> Option<Self> {
        let (folder, from) = match dir {
            CacheDir::Off => return None,
            CacheDir::At(folder) => (folder.clone(), 0),
            CacheDir::Default => {
                let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
                let home = || Some(PathBuf::from(set("HOME")?).join(".cache"));
                let caches = set("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
                (caches.join("fulgurite/tokens"), WORTH_KEEPING)
            }
        };
        Some(Self { folder, from })
    }

    /// Whether ids of this much text are cached.
    pub(crate) fn keeps(&self, bytes: u64) -> bool {
        bytes >= self.from
    }

    /// Whether the folder is writable. Creates it if needed.
    pub(crate) fn can_write(&self) -> bool {
        fs::create_dir_all(&self.folder).is_ok() && access(&self.folder, Access::WRITE_OK).is_ok()
    }

    /// Opens the file of `key`. If the file is missing or damaged, one rank calls `write` for it,
    /// and the others wait.
    ///
    /// # Errors
    /// The errors of `write`. Errors of writing the file give [`Cached::Not`] instead.
    pub(crate) fn get(
        &self,
        key: &CacheKey,
        dtype: TokenDtype,
        write: &mut dyn FnMut(&mut IdWriter) -> Result<()>,
    ) -> Result<Cached> {
        let key = key.finish();
        let path = self.folder.join(format!("{key:032x}.ids"));
        let partial = path.with_extension("partial");
        let failed =
            |error: io::Error| Ok(Cached::Not(format!("writing {}: {error}", path.display())));
        if let Some(ids) = read(&path, key, dtype) {
            return Ok(ids);
        }
        let file = match self.lock_or_wait(&partial) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::Interrupted => return Err(Error::Interrupted),
            Err(error) => return failed(error),
        };
        // Another rank may have written the file during the wait.
        if let Some(ids) = read(&path, key, dtype) {
            let _ = fs::remove_file(&partial);
            return Ok(ids);
        }
        let mut writer = match IdWriter::begin(file, dtype) {
            Ok(writer) => writer,
            Err(error) => return failed(error),
        };
        let written = write(&mut writer);
        let kept = match (writer.failed.take(), written) {
            (Some(error), _) => Err(error),
            (None, Err(error)) => {
                let _ = fs::remove_file(&partial);
                return Err(error);
            }
            // The lock is held until the file has its final name.
            (None, Ok(())) => {
                let file = writer.finish(key);
                file.and_then(|_locked| fs::rename(&partial, &path))
            }
        };
        if let Err(error) = kept {
            let _ = fs::remove_file(&partial);
            return failed(error);
        }
        let not_written = || io::Error::other("it is not what was written");
        read(&path, key, dtype).map_or_else(|| failed(not_written()), Ok)
    }

    /// Opens a file for writing once no other process writes it. The lock ends with this process.
    fn lock_or_wait(&self, partial: &Path) -> io::Result<File> {
        fs::create_dir_all(&self.folder)?;
        let since = Instant::now();
        let mut said = false;
        loop {
            if let Some(file) = lock(partial)? {
                return Ok(file);
            }
            if interrupt_requested() {
                return Err(ErrorKind::Interrupted.into());
            }
            if since.elapsed() > PATIENCE && !std::mem::replace(&mut said, true) {
                tracing::warn!("waiting for another process to write {}", partial.display());
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Opens and locks a file for writing; `None` while another process has the lock.
fn lock(path: &Path) -> io::Result<Option<File>> {
    // Another user may have put a link, or a pipe without a reader, here.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(flags.bits().cast_signed())
            .open(path)?;
        let then = file.metadata()?;
        if !then.is_file() {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is no regular file"));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        // The previous process may have renamed or removed the file after it was opened here.
        match fs::symlink_metadata(path) {
            Ok(now) if (now.dev(), now.ino()) == (then.dev(), then.ino()) => return Ok(Some(file)),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

/// Opens an id file if it exists and is complete.
fn read(path: &Path, key: u128, dtype: TokenDtype) -> Option<Cached> {
    let mut file = open_regular(path).ok()?;
    let mut header = [0; HEADER];
    file.read_exact(&mut header).ok()?;
    let (said, hash) = header.split_at(HEADER - 8);
    if XxHash3_64::oneshot(said).to_le_bytes() != hash {
        return None;
    }
    let number = |at: usize| u64::from_le_bytes(said[at..at + 8].try_into().unwrap_or_default());
    let (len, size, ids_hash) = (number(24), number(32), number(40));
    let first = u32::try_from(number(64)).ok().and_then(char::from_u32);
    let unknown =
        Unknown { tokens: number(48), characters: number(56), first: first.filter(|&c| c != '\0') };
    let expected = [&MAGIC[..], &key.to_le_bytes()].concat();
    if said[..24] != *expected || size != dtype.size() as u64 {
        return None;
    }
    let bytes = file.metadata().ok()?.len();
    if len.checked_mul(size)?.checked_add(HEADER as u64)? != bytes {
        return None;
    }
    let (mut hasher, mut block) = (XxHash3_64::default(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block) {
            Ok(0) => break,
            Ok(read) => hasher.write(&block[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    let ids = TokenFile::of_ids(path.to_owned(), file, dtype, HEADER as u64, len);
    (hasher.finish() == ids_hash).then_some(Cached::Ids(ids, unknown))
}

/// Writes ids to a file.
pub(crate) struct IdWriter {
    file: BufWriter<File>,
    dtype: TokenDtype,
    hasher: XxHash3_64,
    len: u64,
    bytes: Vec<u8>,
    /// The unknown parts of the text.
    pub(crate) unknown: Unknown,
    failed: Option<io::Error>,
}

impl IdWriter {
    fn begin(file: File, dtype: TokenDtype) -> io::Result<Self> {
        file.set_len(0)?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        file.write_all(&[0; HEADER])?;
        let (hasher, bytes, unknown) = (XxHash3_64::default(), Vec::new(), Unknown::default());
        Ok(Self { file, dtype, hasher, len: 0, bytes, unknown, failed: None })
    }

    /// Appends ids.
    ///
    /// # Errors
    /// If the ids cannot be written.
    pub(crate) fn push(&mut self, ids: &[u32]) -> Result<()> {
        self.bytes.clear();
        for id in ids {
            self.bytes.extend_from_slice(&id.to_le_bytes()[..self.dtype.size()]);
        }
        self.hasher.write(&self.bytes);
        self.len += ids.len() as u64;
        self.file.write_all(&self.bytes).map_err(|error| {
            self.failed = Some(error);
            Error::Data("ids cannot be kept".to_owned())
        })
    }

    fn finish(mut self, key: u128) -> io::Result<File> {
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&key.to_le_bytes());
        let Unknown { tokens, characters, first } = self.unknown;
        let (size, hash) = (self.dtype.size() as u64, self.hasher.finish());
        let first = first.map_or(0, u64::from);
        for number in [self.len, size, hash, tokens, characters, first] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        let hash = XxHash3_64::oneshot(&header);
        header.extend_from_slice(&hash.to_le_bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(file)
    }
}
