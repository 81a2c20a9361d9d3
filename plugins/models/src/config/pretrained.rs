//! The directory of a pretrained model.

use std::path::{Path, PathBuf};

use fulgurite_error::{Error, Result};

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
    let is_name = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
            && !part.starts_with('.')
    };
    let repository = match text.split_once('/') {
        Some((owner, name)) if is_name(owner) && is_name(name) => Some((owner, name)),
        _ => None,
    };
    let missing = "`model.from_pretrained` is to name a folder with config.json and weights";
    let (Some((owner, name)), false) = (repository, path.exists()) else {
        return Err(Error::Config(format!("{text}: there is no such folder; {missing}")));
    };
    let cache = cache();
    let repository = cache.join(format!("models--{owner}--{name}"));
    let revision = std::fs::read_to_string(repository.join("refs/main"));
    let snapshot = revision.ok().map(|name| repository.join("snapshots").join(name.trim()));
    snapshot.filter(|path| path.is_dir()).ok_or_else(|| {
        Error::Config(format!(
            "{text}: there is no such folder, and no repository of this name in {}; {missing}, or a repository that \
             is in the cache (`hf download {text}` puts it there)",
            cache.display()
        ))
    })
}

/// The directory of the Hub cache.
fn cache() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE")) {
        return cache.into();
    }
    let home = || variable("HOME").map_or_else(PathBuf::new, PathBuf::from);
    let hugging_face = variable("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = variable("XDG_CACHE_HOME").map_or_else(|| home().join(".cache"), PathBuf::from);
        cache.join("huggingface")
    });
    hugging_face.join("hub")
}
