//! Which files of a repository are wanted.

use fulgurite_error::{Error, Result};
use globset::{Glob, GlobSet, GlobSetBuilder};

/// Endings of weights in other formats, which are left out where there are safetensors.
const OTHER_WEIGHTS: [&str; 8] =
    [".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot", ".gguf"];
/// Folders with a copy of the model for other programs.
const OTHER_FOLDERS: [&str; 5] = ["original/", "onnx/", "openvino/", "coreml/", "metal/"];

/// The files to download. By default all that transformers would read: everything but weights in
/// other formats than safetensors, if there are any of those, and copies for other programs.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    include: Option<GlobSet>,
    exclude: Option<GlobSet>,
}

impl Selection {
    /// Files that match one of `include` (all that are wanted by default, if it is empty) and none
    /// of `exclude`. `*` matches across folders, as in `hf download`.
    ///
    /// # Errors
    /// If a pattern is malformed.
    pub fn new(include: &[String], exclude: &[String]) -> Result<Self> {
        Ok(Self { include: globs(include)?, exclude: globs(exclude)? })
    }

    /// The wanted files among these.
    pub(crate) fn of<'a>(&self, files: &'a [String], dataset: bool) -> Vec<&'a str> {
        let has_safetensors = files.iter().any(|file| file.ends_with(".safetensors"));
        let by_default = |file: &str| {
            let other = has_safetensors && OTHER_WEIGHTS.iter().any(|end| file.ends_with(end));
            dataset || !(other || OTHER_FOLDERS.iter().any(|folder| file.starts_with(folder)))
        };
        let wanted = |file: &&str| {
            let included = match &self.include {
                Some(include) => include.is_match(file),
                None => by_default(file),
            };
            included && !self.exclude.as_ref().is_some_and(|exclude| exclude.is_match(file))
        };
        files.iter().map(String::as_str).filter(wanted).collect()
    }
}

fn globs(patterns: &[String]) -> Result<Option<GlobSet>> {
    if patterns.is_empty() {
        return Ok(None);
    }
    let wrong = |error: globset::Error| Error::Config(format!("a pattern of files: {error}"));
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(Glob::new(pattern).map_err(wrong)?);
    }
    Ok(Some(set.build().map_err(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_one_format_are_wanted() {
        let files =
            ["config.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "a.gguf"];
        let files = files.map(str::to_owned);
        assert_eq!(Selection::default().of(&files, false), ["config.json", "model.safetensors"]);
        assert_eq!(Selection::default().of(&files, true).len(), 5);
        let old = ["config.json", "pytorch_model.bin"].map(str::to_owned);
        assert_eq!(Selection::default().of(&old, false), ["config.json", "pytorch_model.bin"]);
        let patterns = |of: &[&str]| of.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
        let chosen =
            Selection::new(&patterns(&["*.gguf", "onnx/*"]), &patterns(&["onnx/*"])).unwrap();
        assert_eq!(chosen.of(&files, false), ["a.gguf"]);
        assert!(Selection::new(&patterns(&["a["]), &[]).is_err());
    }
}
