//! JSON files that Python programs wrote.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::{Error, Result};
use fulgurite_error::files::{foreign_content, read_regular};

/// Reads a JSON file of at most `max` bytes, such as a model's `config.json`.
///
/// `NaN` and `Infinity`, which Python writes although JSON does not have them, become strings. A
/// byte order mark is skipped. If a key is repeated, its last value counts in a
/// `serde_json::Value`, as in Python.
///
/// # Errors
/// If the file is missing, longer than `max`, or not the JSON of a `T`. The message names the file
/// and, if known, its actual content, such as a Git LFS pointer.
pub fn read_json<T: DeserializeOwned>(path: impl AsRef<Path>, max: u64) -> Result<T> {
    let path = path.as_ref();
    let bytes = read_regular(path, max)?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let parsed = serde_json::from_slice(bytes);
    // Only files with such numbers are copied.
    let parsed = parsed.or_else(|error| match with_quoted_numbers(bytes) {
        Some(quoted) => serde_json::from_slice(&quoted),
        None => Err(error),
    });
    parsed.map_err(|error| {
        let message = match foreign_content(bytes) {
            Some(what) => format!("is no JSON: {what}"),
            None => format!("is no JSON that can be read: {error}"),
        };
        Error::checkpoint(path, message)
    })
}

/// Returns the text with `NaN`, `Infinity` and `-Infinity` in quotes; `None` if it has none.
fn with_quoted_numbers(text: &[u8]) -> Option<Vec<u8>> {
    const NUMBERS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
    let mut quoted = Vec::with_capacity(text.len() + 16);
    let (mut rest, mut in_string, mut found) = (text, false, false);
    while let Some((&byte, after)) = rest.split_first() {
        let number = NUMBERS.iter().find(|number| !in_string && rest.starts_with(number));
        if let Some(number) = number {
            quoted.push(b'"');
            quoted.extend_from_slice(number);
            quoted.push(b'"');
            rest = &rest[number.len()..];
            found = true;
            continue;
        }
        let taken = if in_string && byte == b'\\' { 2.min(rest.len()) } else { 1 };
        in_string ^= byte == b'"';
        quoted.extend_from_slice(&rest[..taken]);
        rest = if taken == 2 { &rest[2..] } else { after };
    }
    found.then_some(quoted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_test_message::assert_says;
    use serde_json::Value;

    fn read(bytes: &[u8]) -> Result<Value, String> {
        let temp = std::env::temp_dir().join(format!("json-{}", std::process::id()));
        std::fs::create_dir_all(&temp).unwrap();
        let path = temp.join(format!("{:?}.json", std::thread::current().id()));
        std::fs::write(&path, bytes).unwrap();
        let read = read_json(&path, 1 << 20);
        std::fs::remove_file(&path).unwrap();
        read.map_err(|e| e.to_string().replace(path.to_str().unwrap(), "FILE"))
    }

    #[test]
    fn json_parses_as_in_python() {
        let marked = read(b"\xef\xbb\xbf{\"a\": 1}").unwrap();
        assert_eq!(marked, serde_json::json!({ "a": 1 }));
        let twice = read(br#"{"a": 1, "a": 2}"#).unwrap();
        assert_eq!(twice, serde_json::json!({ "a": 2 }));
        let numbers =
            read(br#"{"a": NaN, "b": [-Infinity, Infinity], "c\"NaN": "NaN \\"}"#).unwrap();
        let expected = serde_json::json!({
            "a": "NaN", "b": ["-Infinity", "Infinity"], "c\"NaN": "NaN \\"
        });
        assert_eq!(numbers, expected);
    }

    #[test]
    fn other_content_is_recognised() {
        let error = |bytes: &[u8]| read(bytes).unwrap_err();
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
        assert_says!(error(pointer), "checkpoint FILE: is no JSON … Git LFS … `git lfs pull`");
        assert_says!(error(b"<!DOCTYPE html><html>"), "checkpoint FILE: is no JSON … web site …");
        assert_says!(error(b""), "checkpoint FILE: is no JSON: it is empty … download …");
        assert_says!(error(b"{\"a\": }"), "checkpoint FILE: is no JSON … line 1 column 7");
        let deep = b"[".repeat(100_000);
        assert_says!(error(&deep), "checkpoint FILE: is no JSON … recursion limit … column 128");
    }
}
