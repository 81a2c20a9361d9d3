//! [`LocalDirectory`]: checkpoints in a directory.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fulgurite_config::{Error, Result, register_checkpoint_io};
use fulgurite_engine::checkpoint_io::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry, LocalFile,
    PlaceLock, is_temporary, replaced_name, staging_name,
};
use serde::{Deserialize, Serialize};

use crate::file::{LocalWriter, sync_directory};
use crate::lock::{self, Attempt, FileLock};

/// `checkpoint.io.type = "local"`: a directory, on a file system that all ranks share.
#[derive(Debug, Clone, Serialize, Deserialize, fulgurite_config_derive::Documented)]
#[serde(default, deny_unknown_fields)]
pub struct LocalConfig {
    /// Whether files and directories are synced to the disk, so that a checkpoint survives a crash
    /// of the machine and not only of the program.
    #[default(true)]
    pub sync: bool,
}

#[typetag::serde(name = "local")]
impl CheckpointIOConfig for LocalConfig {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        Ok(Arc::new(LocalDirectory::new(root).with_sync(self.sync)))
    }
}

register_checkpoint_io!(
    "local",
    LocalConfig,
    "a directory of a file system that all ranks share",
    "{ type = \"local\" }"
);

/// A directory of the file system, created by the first write.
#[derive(Debug, Clone)]
pub struct LocalDirectory {
    root: PathBuf,
    sync: bool,
}

impl LocalDirectory {
    /// Uses the directory `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), sync: true }
    }

    /// Sets whether writes are synced to the disk; see [`LocalConfig::sync`].
    #[must_use]
    pub fn with_sync(self, sync: bool) -> Self {
        Self { sync, ..self }
    }

    /// Removes lock files whose save no longer exists, since its process was killed.
    fn remove_stale_locks(&self) {
        for entry in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            if lock::locked_save(&entry.file_name().to_string_lossy())
                .is_some_and(|save| !self.root.join(save).exists())
                && let Err(error) = lock::remove_if_stale(&entry.path())
            {
                tracing::warn!("{error}");
            }
        }
    }

    fn sync_directory(&self, path: &Path) -> Result<()> {
        if self.sync { sync_directory(path) } else { Ok(()) }
    }

    /// Creates a directory and its parents, durably.
    fn create_directory(&self, path: &Path) -> Result<()> {
        if path.is_dir() {
            return Ok(());
        }
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        self.create_directory(parent)?;
        match fs::create_dir(path) {
            // Another rank has created it.
            Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            made => made.map_err(Error::io("creating", path))?,
        }
        self.sync_directory(parent)
    }

    /// Exchanges two directories atomically; false if the file system does not support that.
    fn exchange(&self, a: &Path, b: &Path) -> Result<bool> {
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            use rustix::io::Errno;
            match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
                Ok(()) => Ok(true),
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
                Err(e) => Err(Error::io("replacing", b)(e.into())),
            }
        }
        #[cfg(not(target_os = "linux"))]
        {
            let _ = (a, b);
            Ok(false)
        }
    }

    /// Replaces `name` by `staged` with two renames.
    ///
    /// The replaced checkpoint stays valid under another name until the new one is in place. A
    /// crash between the renames loses neither.
    fn replace_with_two_renames(&self, staged: &Path, name: &str) -> Result<()> {
        let (target, aside) = (self.root.join(name), self.root.join(replaced_name(name)));
        fs::rename(&target, &aside).map_err(Error::io("renaming", &target))?;
        if let Err(e) = fs::rename(staged, &target) {
            let _ = fs::rename(&aside, &target);
            return Err(Error::io("renaming", staged)(e));
        }
        self.sync_directory(&self.root)?;
        remove_replaced(&aside);
        Ok(())
    }
}

/// Removes the checkpoint that a commit has replaced. If it fails, the next save tries again.
fn remove_replaced(path: &Path) {
    if let Err(e) = fs::remove_dir_all(path) {
        tracing::warn!("removing the replaced checkpoint {}: {e}", path.display());
    }
}

impl CheckpointIO for LocalDirectory {
    fn location(&self, path: &str) -> PathBuf {
        if path.is_empty() { self.root.clone() } else { self.root.join(path) }
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        let path = self.location(path);
        if let Some(parent) = path.parent() {
            self.create_directory(parent)?;
        }
        Ok(Box::new(LocalWriter::create(path, self.sync)?))
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        Ok(Arc::new(LocalFile::open(&self.location(path))?))
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        let path = self.location(path);
        let read = match fs::read_dir(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(Error::io("listing", &path))?,
        };
        let mut entries = Vec::new();
        for entry in read {
            let entry = entry.map_err(Error::io("listing", &path))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if lock::is_lock(&name) {
                continue;
            }
            match fs::metadata(entry.path()) {
                Ok(metadata) => {
                    let is_directory = metadata.is_dir();
                    let bytes = if is_directory { 0 } else { metadata.len() };
                    entries.push(Entry { name, is_directory, bytes });
                }
                // The entry was removed meanwhile, or is a broken link.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(Error::io("reading", entry.path())(e)),
            }
        }
        entries.sort();
        Ok(entries)
    }

    fn remove(&self, path: &str) -> Result<()> {
        let place = self.location(path);
        let kind = match fs::symlink_metadata(&place) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(Error::io("removing", &place))?.file_type(),
        };
        if !kind.is_dir() {
            return fs::remove_file(&place).map_err(Error::io("removing", &place));
        }
        // Renamed first, so that a partly removed checkpoint is not taken for a whole one.
        let doomed =
            if is_temporary(path) { place.clone() } else { self.location(&staging_name(path)) };
        if doomed != place {
            fs::rename(&place, &doomed).map_err(Error::io("removing", &place))?;
        }
        fs::remove_dir_all(&doomed).map_err(Error::io("removing", &doomed))?;
        if is_temporary(path) {
            self.remove_stale_locks();
        }
        Ok(())
    }

    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let (staged, target) = (staging_name(path), self.location(path));
        self.save(&staged, bytes)?;
        let staged = self.location(&staged);
        if let Err(e) = fs::rename(&staged, &target) {
            let _ = fs::remove_file(&staged);
            return Err(Error::io("replacing", &target)(e));
        }
        self.sync_directory(target.parent().unwrap_or(&self.root))
    }

    fn lock(&self, name: &str) -> Result<Option<PlaceLock>> {
        match fs::metadata(&self.root) {
            Err(e) if e.kind() == ErrorKind::NotFound => self.create_directory(&self.root)?,
            Err(e) => return Err(Error::io("opening", &self.root)(e)),
            Ok(_) => {}
        }
        if !name.is_empty() {
            self.remove_stale_locks();
        }
        let path = self.root.join(lock::file_name(name));
        let attempt = match FileLock::take(&path) {
            // Saving will fail too, with an error of its own.
            Err(Error::Io { source, .. }) if lock::cannot_be_written(source.kind()) => {
                return Ok(None);
            }
            attempt => attempt?,
        };
        match attempt {
            Attempt::Locked(lock) => Ok(Some(PlaceLock::new(lock))),
            Attempt::Held(owner) => Err(Error::checkpoint(
                self.location(name),
                format!(
                    "another run saves here: {owner}. Give this one a `checkpoint.dir` of its own, or \
                     start it when that one has ended. If it has, and its host cannot be asked, remove {}",
                    path.display()
                ),
            )),
        }
    }

    fn is_locked(&self, name: &str) -> Result<Option<bool>> {
        lock::is_held(&self.root.join(lock::file_name(name)))
    }

    fn is_abandoned(&self, name: &str) -> Result<bool> {
        lock::is_abandoned(&self.root.join(lock::file_name(name)))
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        let (source, target) = (self.location(staged), self.location(name));
        for entry in self.list(staged)?.iter().filter(|entry| entry.is_directory) {
            self.sync_directory(&source.join(&entry.name))?;
        }
        self.sync_directory(&source)?;
        if !target.exists() {
            fs::rename(&source, &target).map_err(Error::io("renaming", &source))?;
            return self.sync_directory(&self.root);
        }
        if !self.exchange(&source, &target)? {
            return self.replace_with_two_renames(&source, name);
        }
        self.sync_directory(&self.root)?;
        remove_replaced(&source);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    fn directory() -> (tempfile::TempDir, LocalDirectory) {
        let temp = tempfile::tempdir().unwrap();
        let io = LocalDirectory::new(temp.path().join("deep/root"));
        (temp, io)
    }

    fn names(io: &LocalDirectory) -> Vec<String> {
        io.list("").unwrap().into_iter().map(|e| e.name).collect()
    }

    #[test]
    fn bytes_are_saved_and_removed() {
        let (_temp, io) = directory();
        assert_eq!(io.list("").unwrap(), []);
        io.save("a/b/c", b"hello").unwrap();
        io.save("a/x", b"").unwrap();
        assert_eq!(io.load("a/b/c").unwrap(), b"hello");
        let entry =
            |name: &str, is_directory, bytes| Entry { name: name.into(), is_directory, bytes };
        assert_eq!(io.list("a").unwrap(), [entry("b", true, 0), entry("x", false, 0)]);
        assert_eq!(io.list("a/b").unwrap(), [entry("c", false, 5)]);
        let mut two = [0; 2];
        io.open("a/b/c").unwrap().read_exact_at(&mut two, 3).unwrap();
        assert_eq!(&two, b"lo");
        let beyond = io.open("a/b/c").unwrap().read_exact_at(&mut two, 4).unwrap_err();
        assert_eq!(beyond.kind(), ErrorKind::UnexpectedEof);
        io.remove("a/b/c").unwrap();
        io.remove("a").unwrap();
        io.remove("a").unwrap();
        assert_eq!(names(&io), [""; 0]);
        assert!(
            matches!(io.load("a/x"), Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound)
        );
    }

    #[test]
    fn commit_replaces_in_one_or_two_steps() {
        let (_temp, io) = directory();
        let stage = |content: &[u8]| {
            let staged = staging_name("last");
            io.save(&format!("{staged}/file"), content).unwrap();
            staged
        };
        io.commit(&stage(b"one"), "last").unwrap();
        assert_eq!(io.load("last/file").unwrap(), b"one");
        io.commit(&stage(b"two"), "last").unwrap();
        assert_eq!(io.load("last/file").unwrap(), b"two");
        assert_eq!(names(&io), ["last"]);
        let staged = stage(b"three");
        io.replace_with_two_renames(&io.location(&staged), "last").unwrap();
        assert_eq!(io.load("last/file").unwrap(), b"three");
        assert_eq!(names(&io), ["last"]);
        // If the second rename fails, the first one is undone.
        io.replace_with_two_renames(&io.location("nothing"), "last").unwrap_err();
        assert_eq!(io.load("last/file").unwrap(), b"three");
        assert_eq!(names(&io), ["last"]);
    }

    #[test]
    fn file_is_replaced_atomically() {
        let (_temp, io) = directory();
        io.replace("last", b"one").unwrap();
        let old = io.open("last").unwrap();
        io.replace("last", b"three").unwrap();
        assert_eq!(io.load("last").unwrap(), b"three");
        // A reader with the old file open still sees its content: the file was not overwritten.
        assert_eq!(old.len().unwrap(), 3);
        assert_eq!(names(&io), ["last"]);
        io.save("dir/file", b"").unwrap();
        io.replace("dir", b"four").unwrap_err();
        assert_eq!(names(&io), ["dir", "last"]);
    }

    // checklist: Lightning: checkpoint_io not supported
    #[test]
    fn local_is_selected_by_name() {
        fulgurite_core::registry::validate().unwrap();
        fulgurite_core::registry::require("checkpoint_io", "local").unwrap();
        let build = |text: &str| {
            let table: toml::Table = toml::from_str(text).unwrap();
            Box::<dyn CheckpointIOConfig>::deserialize(table["io"].clone())
        };
        let io = build("io = { type = \"local\" }").unwrap().build(Path::new("/runs")).unwrap();
        assert_eq!(io.location("step-00000010"), Path::new("/runs/step-00000010"));
        let error = build("io = { type = \"local\", fsync = true }").unwrap_err();
        assert_says!(error, "unknown field `fsync`, expected `sync`");
    }
}
