//! The objects of a checkpoint.

use fulgurite_checkpoint::is_temporary;
use serde::{Deserialize, Serialize};

/// The object that names the committed version of a checkpoint.
pub(crate) const POINTER: &str = "committed.json";

/// Longest [`POINTER`] that is read, in bytes.
pub(crate) const MAX_POINTER: u64 = 4096;

const FORMAT: &str = "fulgurite-committed-version";

/// The content of [`POINTER`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Pointer {
    format: String,
    format_version: u32,
    /// The identifier of the save that wrote it.
    pub(crate) version: String,
}

impl Pointer {
    pub(crate) fn new(version: &str) -> Self {
        Self { format: FORMAT.to_owned(), format_version: 1, version: version.to_owned() }
    }

    /// The error is a message without the object's name.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let pointer: Self =
            serde_json::from_slice(bytes).map_err(|e| format!("is damaged: {e}"))?;
        if pointer.format != FORMAT || pointer.format_version != 1 {
            return Err(format!(
                "is `{}` of version {}; this library reads `{FORMAT}` of version 1",
                pointer.format, pointer.format_version
            ));
        }
        if !is_version(&pointer.version) {
            return Err(format!("is damaged: `{}` is no version", pointer.version));
        }
        Ok(pointer)
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and a number can be encoded")
    }
}

/// Whether a name is the identifier of a save.
pub(crate) fn is_version(name: &str) -> bool {
    is_temporary(&temporary_name("x", name))
}

/// Returns the name of an unfinished save of `name`.
pub(crate) fn temporary_name(name: &str, version: &str) -> String {
    format!("{name}.tmp-{version}")
}

/// Inverts [`temporary_name`]: returns the checkpoint and the save's identifier.
///
/// Returns `None` for other names.
pub(crate) fn parse_temporary_name(name: &str) -> Option<(&str, &str)> {
    if is_temporary(name) { name.rsplit_once(".tmp-") } else { None }
}

/// Splits a path into its first segment and the rest.
pub(crate) fn split(path: &str) -> (&str, &str) {
    let path = path.trim_matches('/');
    path.split_once('/').unwrap_or((path, ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_checkpoint::staging_name;
    use fulgurite_test_message::assert_says;

    #[test]
    fn save_names_are_parsed() {
        let staged = staging_name("last");
        let (name, version) = parse_temporary_name(&staged).unwrap();
        assert_eq!((name, temporary_name(name, version)), ("last", staged.clone()));
        assert!(is_version(version) && !is_version("model"));
        assert_eq!(parse_temporary_name("last"), None);
        assert_eq!(split("/a/b/c/"), ("a", "b/c"));
        assert_eq!(split("a"), ("a", ""));
        let pointer = Pointer::parse(&Pointer::new(version).to_bytes()).unwrap();
        assert_eq!(pointer.version, version);
        let text =
            r#"{"format":"fulgurite-committed-version","format_version":1,"version":"../x"}"#;
        assert_says!(
            Pointer::parse(text.as_bytes()).unwrap_err(),
            "is damaged: `../x` is no version"
        );
    }
}
