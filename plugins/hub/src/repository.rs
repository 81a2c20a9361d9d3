//! Names of repositories.

use std::fmt;
use std::str::FromStr;

use fulgurite_error::{Error, Result};

/// The name of a repository: `owner/name`, or `name` alone as of the Hub's oldest models. With
/// `datasets/` before it, a repository of data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    name: String,
    dataset: bool,
}

impl Repository {
    /// The name without the kind: `owner/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it holds data, not a model.
    pub fn is_dataset(&self) -> bool {
        self.dataset
    }

    /// The folder in the cache: `models--owner--name`.
    pub(crate) fn folder(&self) -> String {
        let kind = if self.dataset { "datasets" } else { "models" };
        format!("{kind}--{}", self.name.replace('/', "--"))
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.dataset { "datasets/" } else { "" })?;
        f.write_str(&self.name)
    }
}

impl FromStr for Repository {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (dataset, name) = match text.strip_prefix("datasets/") {
            Some(name) => (true, name),
            None => (false, text),
        };
        let is_part = |part: &str| {
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && !part.contains("--")
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        if name.split('/').count() <= 2 && name.split('/').all(is_part) {
            return Ok(Self { name: name.to_owned(), dataset });
        }
        Err(Error::Config(format!(
            "`{text}` is no name of a repository; expected owner/name, of letters, digits, `.`, `_` and `-`"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_folders() {
        for (text, folder) in [
            ("Qwen/Qwen3-0.6B", "models--Qwen--Qwen3-0.6B"),
            ("gpt2", "models--gpt2"),
            ("datasets/allenai/c4", "datasets--allenai--c4"),
        ] {
            let repository: Repository = text.parse().unwrap();
            assert_eq!(repository.folder(), folder);
            assert_eq!(repository.to_string(), text);
        }
        for wrong in ["", "/a", "a/", "a/b/c", "../a", "a/..", "a b", "/tmp/a", "a--b/c", "a/b?c"] {
            assert!(wrong.parse::<Repository>().is_err(), "{wrong}");
        }
    }
}
