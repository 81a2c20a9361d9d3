//! Checkpoint storage.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};
use fulgurite_error::files::check_len;

/// Limit of a manifest's bytes. The manifest of a model with a thousand parameters, saved by a
/// thousand ranks, has half as many.
pub const MAX_MANIFEST: u64 = 1 << 30;

/// Reads and writes the files of checkpoints in one place: a directory or an object store.
///
/// Paths are relative to the place's root, with `/` between their parts: `step-00000010/model/x`.
/// Wrappers (retries, asynchronous writing) hold another `CheckpointIO` and pass calls on. Every
/// rank has its own `CheckpointIO` for the same place; no method is collective.
pub trait CheckpointIO: std::fmt::Debug + Send + Sync {
    /// `path` as shown in messages and results. For a local directory, the path on disk.
    fn location(&self, path: &str) -> PathBuf;

    /// Opens a new file for writing. Makes the directories above it and replaces an existing file.
    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>>;

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::Io`] of kind `NotFound` if the file does not exist.
    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>>;

    /// Lists a directory, sorted by name; the root is `""`. A missing directory is empty.
    fn list(&self, path: &str) -> Result<Vec<Entry>>;

    /// Removes a file, or a directory with all its contents. An interrupted removal must not leave
    /// anything that looks like a whole checkpoint. A missing `path` is not an error.
    fn remove(&self, path: &str) -> Result<()>;

    /// Makes the finished directory `staged` appear as `name`, durably and atomically, and removes
    /// any earlier `name`. Both are direct children of the root. Called by one rank, after all
    /// ranks have [finished](CheckpointWriter::finish) their files.
    fn commit(&self, staged: &str, name: &str) -> Result<()>;

    /// Writes a small file whole, durably.
    fn save(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let mut writer = self.create(path)?;
        writer.write_all(bytes).map_err(Error::io("writing", self.location(path)))?;
        writer.finish()
    }

    /// Writes or replaces a small file atomically: a reader, also after a crash, finds the old
    /// content or the new. The default calls [`save`](Self::save), which suffices where files
    /// appear only when finished, as in object stores.
    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        self.save(path, bytes)
    }

    /// Reads a whole small file of at most [`MAX_MANIFEST`] bytes.
    ///
    /// # Errors
    /// As [`load_at_most`](Self::load_at_most).
    fn load(&self, path: &str) -> Result<Vec<u8>> {
        self.load_at_most(path, MAX_MANIFEST)
    }

    /// Reads a whole small file of at most `max` bytes.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`Error::Io`] of kind `FileTooLarge` if the file is longer.
    fn load_at_most(&self, path: &str, max: u64) -> Result<Vec<u8>> {
        let reader = self.open(path)?;
        let failed = || Error::io("reading", self.location(path));
        let len = reader.len().map_err(failed())?;
        check_len(len, max).map_err(failed())?;
        let mut bytes = vec![0; len as usize];
        reader.read_exact_at(&mut bytes, 0).map_err(failed())?;
        Ok(bytes)
    }

    /// Locks `name` until the result is dropped or this process ends in any way. A locked
    /// unfinished save is not removed by other programs. `""` locks the place itself, to which one
    /// run at a time saves. Called on one rank. By default there are no locks, and the result is
    /// `None`.
    ///
    /// # Errors
    /// If another living process has locked the place. The message names the process.
    fn lock(&self, name: &str) -> Result<Option<PlaceLock>> {
        let _ = name;
        Ok(None)
    }

    /// Whether `name` is [locked](Self::lock) by a living process (`true`) or was by a killed one
    /// (`false`). `None` if it is not locked, or without support for locks.
    fn is_locked(&self, name: &str) -> Result<Option<bool>> {
        let _ = name;
        Ok(None)
    }

    /// Whether `name` was [locked](Self::lock) by a process of this host that has ended. Unlike
    /// [`is_locked`](Self::is_locked), never `true` if a process of another host may be alive. The
    /// default is false.
    ///
    /// # Errors
    /// If the place cannot be read.
    fn is_abandoned(&self, name: &str) -> Result<bool> {
        let _ = name;
        Ok(false)
    }

    /// Completes pending writes. Called once on each rank, after the last save, by the code that
    /// opened the place. This is the trainer at the end of a run (even if it failed or was
    /// interrupted), `Fabric::save` and `save_full` before they return, or a loop that used
    /// `CheckpointConfig::open`. Dropping a Fabric does not call it.
    ///
    /// # Errors
    /// If a write failed and its error was not returned before.
    fn teardown(&self) -> Result<()> {
        Ok(())
    }
}

/// A lock, held until dropped.
pub struct PlaceLock(#[expect(dead_code, reason = "it is held, not used")] Box<dyn Send + Sync>);

impl PlaceLock {
    /// A lock that is released when `lock` is dropped.
    pub fn new(lock: impl Send + Sync + 'static) -> Self {
        Self(Box::new(lock))
    }
}

impl std::fmt::Debug for PlaceLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PlaceLock")
    }
}

/// A file being written. Dropping it without [`finish`](Self::finish) abandons the file and leaves
/// its content undefined.
pub trait CheckpointWriter: Write + Send {
    /// Makes the written bytes and the file's name durable.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A file that is read at offsets, from any thread.
#[expect(clippy::len_without_is_empty, reason = "a file's length, not a collection's")]
pub trait CheckpointReader: Send + Sync {
    /// The file's length in bytes.
    fn len(&self) -> std::io::Result<u64>;

    /// Fills `buffer` with the bytes that start at `offset`.
    ///
    /// # Errors
    /// Of kind `UnexpectedEof` if the file ends earlier.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()>;

    /// [`read_exact_at`](Self::read_exact_at) that also passes the bytes to `on_read`, in order,
    /// for checksums. An implementation that reads in pieces should pass on each piece while it is
    /// in the processor's cache.
    ///
    /// # Errors
    /// As [`read_exact_at`](Self::read_exact_at).
    fn read_exact_at_with(
        &self,
        buffer: &mut [u8],
        offset: u64,
        on_read: &mut dyn FnMut(&[u8]),
    ) -> std::io::Result<()> {
        self.read_exact_at(buffer, offset)?;
        on_read(buffer);
        Ok(())
    }
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The entry's name in the directory.
    pub name: String,
    /// Whether the entry is a directory.
    pub is_directory: bool,
    /// A file's length; 0 for directories.
    pub bytes: u64,
}

/// Configuration of a place: `checkpoint.io.type = "local"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_checkpoint_io!`](fulgurite_config::register_checkpoint_io). The configuration of a
/// wrapper holds an inner one as `Box<dyn CheckpointIOConfig>`.
#[typetag::serde(tag = "type")]
pub trait CheckpointIOConfig: std::fmt::Debug + Send + Sync {
    /// Opens the place whose root is `root` (`checkpoint.dir`). Called on every rank; not
    /// collective. The first write makes a missing root.
    ///
    /// # Errors
    /// If the place cannot be reached.
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>>;

    /// Checks the options without reaching the place, before any rank is started. The default
    /// accepts all.
    ///
    /// # Errors
    /// If an option is invalid.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

fulgurite_config::plugin_kind!(
    dyn CheckpointIOConfig,
    fulgurite_config::registry::kind::CHECKPOINT_IO,
    "checkpoint.io"
);
