//! Byte-level BPE: "gpt2" of llama.cpp.

use fulgurite_error::{Error, Result};
use serde_json::Value as Json;

use super::special::Special;
use super::{Kind, Token, Vocabulary, fail, pre};

/// Reads the model of a `tokenizer.json`.
///
/// # Errors
/// If it is not a byte-level BPE, or llama.cpp lacks its pre-tokenizer.
pub(super) fn read(json: &Json, special: Special) -> Result<Vocabulary> {
    let model = &json["model"];
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        return fail(&format!(
            "tokenizer.json: GGUF files of decoders have a BPE, and the model is of type {kind:?}"
        ));
    }
    let suffix = ["continuing_subword_prefix", "end_of_word_suffix"];
    if let Some(key) =
        suffix.iter().find(|key| model[**key].as_str().is_some_and(|s| !s.is_empty()))
    {
        return fail(&format!(
            "tokenizer.json: `model.{key}` is {}, which GGUF lacks",
            model[*key]
        ));
    }
    let ignores_merges = model["ignore_merges"] == true;
    let pre = pre::name(json, ignores_merges)?;
    let tokens = tokens(model)?
        .into_iter()
        .enumerate()
        .map(|(id, text)| match text {
            Some(text) => Token { text, score: 0.0, kind: Kind::Normal },
            None => Token::unused(id),
        })
        .collect();
    let merges = merges(model)?.into_iter().map(|[left, right]| {
        // A merge is two words with a space between.
        let escape = |part: &str| part.replace(' ', "\u{120}");
        format!("{} {}", escape(&left), escape(&right))
    });
    let merges = merges.collect();
    Ok(Vocabulary {
        kind: ("gpt2", pre),
        tokens,
        merges,
        adds_space: None,
        stripping: None,
        special,
    })
}

/// Returns the tokens of `model.vocab`, by their ids.
///
/// # Errors
/// If the vocabulary is damaged.
pub(super) fn tokens(model: &Json) -> Result<Vec<Option<String>>> {
    let wrong = |message: &str| Error::Config(format!("tokenizer.json: `model.vocab`: {message}"));
    let vocabulary = model["vocab"].as_object().ok_or_else(|| wrong("expected a table"))?;
    let mut tokens = Vec::new();
    for (text, id) in vocabulary {
        // No vocabulary has more tokens.
        let id = id.as_u64().filter(|id| *id < 1 << 24);
        let id = id.ok_or_else(|| wrong(&format!("{text:?} has no id")))? as usize;
        if tokens.len() <= id {
            tokens.resize(id + 1, None);
        }
        if let Some(other) = tokens[id].replace(text.clone()) {
            return Err(wrong(&format!("{other:?} and {text:?} have the id {id}")));
        }
    }
    Ok(tokens)
}

/// Returns `model.merges`: pairs, or texts with a space between.
///
/// # Errors
/// If they are damaged.
pub(super) fn merges(model: &Json) -> Result<Vec<[String; 2]>> {
    let wrong = |found: &Json| {
        Error::Config(format!("tokenizer.json: `model.merges`: expected pairs, found {found}"))
    };
    let merges = model["merges"].as_array().ok_or_else(|| wrong(&model["merges"]))?;
    let pair = |merge: &Json| {
        let pair = match merge {
            Json::String(text) => text.split_once(' '),
            Json::Array(pair) => match pair.as_slice() {
                [Json::String(left), Json::String(right)] => Some((left.as_str(), right.as_str())),
                _ => None,
            },
            _ => None,
        };
        let (left, right) = pair.ok_or_else(|| wrong(merge))?;
        Ok([left.to_owned(), right.to_owned()])
    };
    merges.iter().map(pair).collect()
}
