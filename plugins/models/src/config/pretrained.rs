//! The directory of a pretrained model.

use std::path::{Path, PathBuf};

use fulgurite_error::{Error, Result};
use fulgurite_hub::{Cache, Repository};

/// Returns the directory that `model.from_pretrained` names: an existing directory, or the newest
/// snapshot of a repository `owner/name` in the local Hub cache (`$HF_HUB_CACHE`,
/// `$HF_HOME/hub` or `~/.cache/huggingface/hub`, as `huggingface_hub` looks for it). Nothing is
/// downloaded.
///
/// # Errors
/// If there is neither; the message says where it looked.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    let text = path.to_string_lossy();
    let missing = "expected a folder with config.json and weights";
    let repository = text.parse::<Repository>().ok().filter(|_| !path.exists());
    let Some(repository) = repository else {
        return Err(Error::Config(format!("{text}: there is no such folder; {missing}")));
    };
    let cache = Cache::from_environment();
    cache.find(&repository, "main").ok_or_else(|| {
        // Rather a folder than one of the Hub's few repositories without an owner.
        if !text.contains('/') {
            return Error::Config(format!("{text}: there is no such folder; {missing}"));
        }
        Error::Config(format!(
            "{text}: there is no such folder, and no repository of this name in {}; {missing}, or a repository that \
             is in the cache (`fulgurite hub download {text}` puts it there)",
            cache.folder().display()
        ))
    })
}
