//! [`Journal`], a checkpoint IO that wraps another one.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fulgurite_core::Result;
use fulgurite_core::checkpoint::{
    CheckpointIO, CheckpointIOConfig, CheckpointReader, CheckpointWriter, Entry,
};
use serde::{Deserialize, Serialize};

/// Keeps checkpoints with another `CheckpointIO`. When a run ends, writes the names of its
/// committed checkpoints, in order, to `journal.txt` next to them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    /// The checkpoint IO that keeps the checkpoints.
    #[serde(deserialize_with = "fulgurite_core::config::plugin::deserialize")]
    pub io: Box<dyn CheckpointIOConfig>,
}

#[typetag::serde(name = "journal")]
impl CheckpointIOConfig for Journal {
    fn build(&self, root: &Path) -> Result<Arc<dyn CheckpointIO>> {
        Ok(Arc::new(Journaled { io: self.io.build(root)?, committed: Mutex::default() }))
    }
}

fulgurite_core::register_checkpoint_io!(
    "journal",
    Journal,
    "another checkpoint IO, and a list of what was committed",
    "{ type = \"journal\", io = \"local\" }"
);

#[derive(Debug)]
struct Journaled {
    io: Arc<dyn CheckpointIO>,
    /// Names that this rank committed since the last write of the journal.
    committed: Mutex<Vec<String>>,
}

impl CheckpointIO for Journaled {
    fn location(&self, path: &str) -> PathBuf {
        self.io.location(path)
    }

    fn create(&self, path: &str) -> Result<Box<dyn CheckpointWriter>> {
        self.io.create(path)
    }

    fn open(&self, path: &str) -> Result<Arc<dyn CheckpointReader>> {
        self.io.open(path)
    }

    fn list(&self, path: &str) -> Result<Vec<Entry>> {
        self.io.list(path)
    }

    fn remove(&self, path: &str) -> Result<()> {
        self.io.remove(path)
    }

    fn replace(&self, path: &str, bytes: &[u8]) -> Result<()> {
        self.io.replace(path, bytes)
    }

    fn commit(&self, staged: &str, name: &str) -> Result<()> {
        self.io.commit(staged, name)?;
        self.committed.lock().expect("no panic while noting").push(format!("{name}\n"));
        Ok(())
    }

    fn teardown(&self) -> Result<()> {
        let committed = std::mem::take(&mut *self.committed.lock().expect("no panic while noting"));
        // One rank commits; the others have nothing to write.
        if !committed.is_empty() {
            self.io.replace("journal.txt", committed.concat().as_bytes())?;
        }
        self.io.teardown()
    }
}
