//! The cache on this machine.

use std::path::{Path, PathBuf};

use crate::Repository;

/// The folder in which `huggingface_hub` keeps repositories, and we too:
///
/// ```text
/// models--owner--name/refs/main             the commit of a branch
/// models--owner--name/blobs/4f1c…           files by their contents
/// models--owner--name/snapshots/9e0d…/…     links to them, by commit
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// A cache in this folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The cache that `huggingface_hub` uses: `$HF_HUB_CACHE`, `$HF_HOME/hub` or
    /// `~/.cache/huggingface/hub`.
    pub fn from_environment() -> Self {
        if let Some(cache) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
        {
            return Self::new(cache);
        }
        Self::new(home().join("hub"))
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files of a repository at a branch, tag or commit, if they are in the cache.
    pub fn find(&self, repository: &Repository, revision: &str) -> Option<PathBuf> {
        let folder = self.of(repository);
        let commit = std::fs::read_to_string(folder.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned());
        let is_name = commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) && !commit.is_empty();
        let snapshot = folder.join("snapshots").join(commit);
        (is_name && snapshot.is_dir()).then_some(snapshot)
    }

    /// The folder of a repository.
    pub(crate) fn of(&self, repository: &Repository) -> PathBuf {
        self.folder.join(repository.folder())
    }
}

/// `$HF_HOME`, or where it is by default.
pub(crate) fn home() -> PathBuf {
    let home = || variable("HOME").map_or_else(PathBuf::new, PathBuf::from);
    variable("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = variable("XDG_CACHE_HOME").map_or_else(|| home().join(".cache"), PathBuf::from);
        cache.join("huggingface")
    })
}

/// A variable that is set and not empty.
pub(crate) fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
