//! The pre-tokenizers that llama.cpp knows by name.
//!
//! llama.cpp's converter recognises a tokenizer by the hash of the tokens of one text. Here the
//! steps of `pre_tokenizer` in `tokenizer.json` decide, so a tokenizer with another vocabulary is
//! recognised, too. A normalizer NFC is left out, as llama.cpp does.

use fulgurite_error::Result;
use serde_json::Value as Json;

use super::fail;

/// A step of a pre-tokenizer.
#[derive(Debug, PartialEq, Eq)]
enum Step<'a> {
    /// Pieces that match the expression.
    Split(&'a str),
    /// Each digit alone.
    Digits,
    /// Bytes as letters, with GPT-2's expression or without.
    Bytes { splits: bool },
}

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Returns the name of a tokenizer's pre-tokenizer, for `tokenizer.ggml.pre`.
///
/// # Errors
/// If llama.cpp has no equal pre-tokenizer.
pub(super) fn name(json: &Json, ignores_merges: bool) -> Result<&'static str> {
    match json["normalizer"]["type"].as_str() {
        None | Some("NFC") => {}
        Some(other) => {
            return fail(&format!("tokenizer.json: GGUF lacks the normalizer {other:?} of a BPE"));
        }
    }
    let pre = &json["pre_tokenizer"];
    let parts = match pre["type"] == "Sequence" {
        true => pre["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default(),
        false => std::slice::from_ref(pre),
    };
    let steps: Option<Vec<Step<'_>>> = parts.iter().map(step).collect();
    let steps = steps.unwrap_or_default();
    Ok(match (steps.as_slice(), ignores_merges) {
        ([Step::Bytes { splits: true }], false) => "gpt-2",
        ([Step::Digits, Step::Bytes { splits: true }], false) => "smollm",
        ([Step::Split(LLAMA_3), Step::Bytes { splits: false }], true) => "llama-bpe",
        ([Step::Split(LLAMA_3), Step::Bytes { splits: false }], false) => "dbrx",
        ([Step::Split(QWEN_2), Step::Bytes { splits: false }], false) => "qwen2",
        ([Step::Split(GPT_4O), Step::Bytes { splits: false }], false) => "gpt-4o",
        ([Step::Split(TEKKEN), Step::Bytes { splits: false }], true) => "tekken",
        _ => {
            return fail(&format!(
                "tokenizer.json: llama.cpp has no pre-tokenizer that is known to split as this one: {pre}{}",
                if ignores_merges { ", with `ignore_merges`" } else { "" }
            ));
        }
    })
}

/// A step; `None` for one that is not known.
fn step(step: &Json) -> Option<Step<'_>> {
    match step["type"].as_str()? {
        "ByteLevel" if step["add_prefix_space"] != true => {
            Some(Step::Bytes { splits: step["use_regex"] != false })
        }
        "Digits" if step["individual_digits"] == true => Some(Step::Digits),
        "Split" => {
            let covers = match (step["behavior"].as_str()?, step["invert"] == true) {
                // These expressions match every character.
                ("Isolated", false) | ("Removed", true) => true,
                _ => false,
            };
            covers.then_some(Step::Split(step["pattern"]["Regex"].as_str()?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named(pre: &Json, ignores_merges: bool) -> Option<&'static str> {
        name(&json!({ "pre_tokenizer": pre }), ignores_merges).ok()
    }

    #[test]
    fn steps_choose_the_name() {
        let bytes =
            |splits| json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": splits });
        let split = |pattern, behavior: &str, invert| {
            json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": pattern }, "behavior": behavior, "invert": invert },
                bytes(false),
            ] })
        };
        assert_eq!(named(&bytes(true), false), Some("gpt-2"));
        assert_eq!(named(&bytes(true), true), None);
        assert_eq!(named(&split(LLAMA_3, "Isolated", false), true), Some("llama-bpe"));
        assert_eq!(named(&split(LLAMA_3, "Removed", true), false), Some("dbrx"));
        assert_eq!(named(&split(QWEN_2, "Isolated", false), false), Some("qwen2"));
        assert_eq!(named(&split(GPT_4O, "Isolated", false), false), Some("gpt-4o"));
        assert_eq!(named(&split(TEKKEN, "Isolated", false), true), Some("tekken"));
        assert_eq!(named(&split(QWEN_2, "Removed", false), false), None);
        assert_eq!(named(&split(r"\w+", "Isolated", false), false), None);
        let digits = json!({ "type": "Digits", "individual_digits": true });
        let smollm = json!({ "type": "Sequence", "pretokenizers": [digits, bytes(true)] });
        assert_eq!(named(&smollm, false), Some("smollm"));
        assert_eq!(named(&json!({ "type": "ByteLevel", "add_prefix_space": true }), false), None);
        assert_eq!(named(&Json::Null, false), None);
    }

    #[test]
    fn normalizers_other_than_nfc_are_refused() {
        let pre = json!({ "type": "ByteLevel", "add_prefix_space": false });
        let of = |normalizer: &str| {
            name(&json!({ "pre_tokenizer": pre, "normalizer": { "type": normalizer } }), false)
        };
        assert_eq!(of("NFC").unwrap(), "gpt-2");
        let error = of("Lowercase").unwrap_err().to_string();
        assert!(
            error.contains("\"Lowercase\"") && error.contains("--without-tokenizer"),
            "{error}"
        );
    }
}
