//! The tokenizer of a GGUF file.
//!
//! llama.cpp has two kinds that our families use: byte-level BPE ("gpt2") with merges and one of a
//! list of pre-tokenizers, and SentencePiece's BPE ("llama") with scores. A tokenizer of another
//! kind is refused.

mod bpe;
mod pieces;
mod pre;
mod sentencepiece;
mod special;

use fulgurite_error::{Error, Result};
use serde_json::{Map, Value as Json};

use super::file::{Metadata, Value};
use special::Special;

/// Small files of a model, by name.
pub(super) struct Files<'a>(pub(super) &'a [(String, Vec<u8>)]);

impl Files<'_> {
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The JSON of a file; `None` if the file is missing.
    ///
    /// # Errors
    /// If it is not JSON.
    pub(super) fn json(&self, name: &str) -> Result<Option<Json>> {
        let parse = |bytes| {
            serde_json::from_slice(bytes).map_err(|e| Error::Config(format!("{name}: {e}")))
        };
        self.get(name).map(parse).transpose()
    }
}

/// The kind of a token: `llama_token_type` of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// A token.
#[derive(Debug, Clone, PartialEq)]
struct Token {
    text: String,
    score: f32,
    kind: Kind,
}

impl Token {
    /// The token of an id that the tokenizer lacks.
    fn unused(id: usize) -> Self {
        Self { text: format!("[PAD{id}]"), score: -10_000.0, kind: Kind::Unused }
    }
}

/// A model's tokenizer.
#[derive(Debug)]
pub(super) struct Vocabulary {
    /// `tokenizer.ggml.model` and `tokenizer.ggml.pre`.
    kind: (&'static str, &'static str),
    tokens: Vec<Token>,
    /// For "gpt2".
    merges: Vec<String>,
    /// Whether a space is put before the text, if the kind of tokenizer can.
    adds_space: Option<bool>,
    /// An added token that takes the spaces beside it (`lstrip`, `rstrip`).
    stripping: Option<String>,
    special: Special,
}

/// The tokens that llama.cpp looks up in a model whose name has "phi-3" or "phi3" in it.
const PHI_3: [&str; 4] = ["</s>", "<unk>", "<s>", "<|endoftext|>"];

/// Reads the tokenizer of a model with `size` tokens.
///
/// # Errors
/// If the tokenizer is missing, or GGUF lacks its kind.
pub(super) fn vocabulary(files: &Files<'_>, size: usize) -> Result<Vocabulary> {
    let json = files.json("tokenizer.json")?;
    let special = Special::read(files, json.as_ref())?;
    let mut vocabulary = match (files.get("tokenizer.model"), &json) {
        (Some(model), _) => sentencepiece::read(model, special)?,
        (None, Some(json)) => match json.pointer("/model/byte_fallback") == Some(&true.into()) {
            true => pieces::read(json, special)?,
            false => bpe::read(json, special)?,
        },
        (None, None) => {
            return fail("there is no tokenizer: no tokenizer.json and no tokenizer.model");
        }
    };
    vocabulary.stripping = add_tokens(&mut vocabulary.tokens, files, json.as_ref())?;
    let found = vocabulary.tokens.len();
    if found > size {
        return fail(&format!(
            "the tokenizer has {found} tokens, and the model's `vocab_size` is {size}"
        ));
    }
    for id in found..size {
        vocabulary.tokens.push(Token::unused(id));
    }
    Ok(vocabulary)
}

fn fail<T>(message: &str) -> Result<T> {
    Err(Error::Config(format!(
        "{message}. `--without-tokenizer` writes the file without one, for programs that give token ids to it"
    )))
}

/// Replaces tokens of the model by added ones of the same id, as llama.cpp does. Returns an added
/// token that takes the spaces beside it.
fn add_tokens(
    tokens: &mut Vec<Token>,
    files: &Files<'_>,
    json: Option<&Json>,
) -> Result<Option<String>> {
    let config = files.json("tokenizer_config.json")?;
    let of_json = json.and_then(|json| json["added_tokens"].as_array());
    let mut added: Vec<(usize, &Json)> = Vec::new();
    for token in of_json.into_iter().flatten() {
        let id = token["id"].as_u64().ok_or("an added token has no id");
        added
            .push((id.map_err(|e| Error::Config(format!("tokenizer.json: {e}")))? as usize, token));
    }
    let of_config = config.as_ref().and_then(|config| config["added_tokens_decoder"].as_object());
    for (id, token) in of_config.into_iter().flatten() {
        let id = id.parse().map_err(|_| {
            Error::Config(format!(
                "tokenizer_config.json: `added_tokens_decoder` has the id {id:?}"
            ))
        })?;
        added.push((id, token));
    }
    let mut stripping = None;
    for (id, token) in added {
        if token["lstrip"] == true || token["rstrip"] == true {
            stripping = stripping.or_else(|| token["content"].as_str().map(str::to_owned));
        }
        let Some(text) = token["content"].as_str() else { continue };
        let is_control = token["special"] == true || looks_special(text);
        let (kind, text) = match is_control {
            true => (Kind::Control, text.to_owned()),
            false => (Kind::UserDefined, text.replace('▁', " ")),
        };
        while tokens.len() <= id {
            tokens.push(Token::unused(tokens.len()));
        }
        let own = &tokens[id];
        let is_special = matches!(own.kind, Kind::Unknown | Kind::Control) && own.text == text;
        if !is_special {
            tokens[id] = Token { text, score: -1000.0, kind };
        }
    }
    Ok(stripping)
}

/// Whether a token is one of control although its tokenizer does not say so: the rule of
/// `does_token_look_special` in llama.cpp.
fn looks_special(text: &str) -> bool {
    let between = |open: &str, close: &str| text.starts_with(open) && text.ends_with(close);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

impl Vocabulary {
    /// Returns `general.name` for a model of this name. llama.cpp takes from it whether special
    /// tokens take the spaces behind them.
    pub(super) fn model_name(&self, name: &str) -> Option<String> {
        let says_phi = ["phi-3", "phi3"].iter().any(|word| name.to_lowercase().contains(word));
        match (self.is_phi(), says_phi) {
            (true, false) => Some(format!("{name} (Phi-3)")),
            (false, true) => None,
            _ => Some(name.to_owned()),
        }
    }

    /// Whether the tokenizer has the special tokens of Phi-3.
    fn is_phi(&self) -> bool {
        let has = |text: &&str| self.tokens.iter().any(|token| token.text == **text);
        self.stripping.is_some() && PHI_3.iter().all(has)
    }

    /// What llama.cpp will do in another way, in a sentence.
    pub(super) fn note(&self) -> Option<String> {
        let token = self.stripping.as_ref().filter(|_| !self.is_phi())?;
        Some(format!(
            "the token {token:?} takes the spaces beside it (`lstrip`, `rstrip`), which llama.cpp does for Phi-3 only"
        ))
    }

    /// Adds the keys of the tokenizer.
    pub(super) fn describe(&self, metadata: &mut Metadata, config: &Map<String, Json>) {
        let (model, pre) = self.kind;
        metadata.set("tokenizer.ggml.model", model);
        metadata.set("tokenizer.ggml.pre", pre);
        let texts = self.tokens.iter().map(|token| token.text.clone()).collect();
        metadata.set("tokenizer.ggml.tokens", Value::Texts(texts));
        if model == "llama" {
            let scores = self.tokens.iter().map(|token| token.score).collect();
            metadata.set("tokenizer.ggml.scores", Value::F32s(scores));
        }
        let kinds = self.tokens.iter().map(|token| token.kind as i32).collect();
        metadata.set("tokenizer.ggml.token_type", Value::I32s(kinds));
        if model == "gpt2" {
            metadata.set("tokenizer.ggml.merges", Value::Texts(self.merges.clone()));
        }
        if let Some(adds) = self.adds_space {
            metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(adds));
        }
        self.special.describe(metadata, config, self.tokens.len());
    }
}
