//! The tokens that end an answer, as a model's files name them.

use std::path::Path;

use fulgurite_error::{Error, Result};
use serde_json::Value;

/// The largest file that is read, in bytes.
const MAX_FILE: u64 = 16 << 20;

/// Returns the end tokens of the Hugging Face model in a directory: `eos_token_id`, a token or a
/// list, of `generation_config.json` or, without that file, of `config.json`. None if neither names
/// one.
///
/// # Errors
/// If a file cannot be read, or has something else there.
pub fn end_tokens(directory: &Path) -> Result<Vec<u32>> {
    for name in ["generation_config.json", "config.json"] {
        let file = directory.join(name);
        if !file.exists() {
            continue;
        }
        let values: Value = fulgurite_checkpoint::read_json(&file, MAX_FILE)?;
        let ids = match values.get("eos_token_id") {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
        };
        let token = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
        return ids.iter().map(token).collect::<Option<Vec<u32>>>().ok_or_else(|| {
            Error::Config(format!(
                "{}: `eos_token_id`: expected a token or a list of tokens",
                file.display()
            ))
        });
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_config_comes_first() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        assert!(end_tokens(dir.path()).unwrap().is_empty());
        write("config.json", r#"{ "eos_token_id": 7 }"#);
        assert_eq!(end_tokens(dir.path()).unwrap(), [7]);
        write("generation_config.json", r#"{ "eos_token_id": [7, 9] }"#);
        assert_eq!(end_tokens(dir.path()).unwrap(), [7, 9]);
        write("generation_config.json", "{}");
        assert!(end_tokens(dir.path()).unwrap().is_empty());
        write("generation_config.json", r#"{ "eos_token_id": -1 }"#);
        let error = end_tokens(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("`eos_token_id`: expected a token or a list of tokens"), "{error}");
    }
}
