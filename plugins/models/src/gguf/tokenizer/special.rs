//! Special tokens, and the chat template.
//!
//! Source: `SpecialVocab` in `gguf/vocab.py` of llama.cpp.

use fulgurite_error::{Error, Result};
use serde_json::{Map, Value as Json};

use super::super::file::{Metadata, Value};
use super::Files;

/// Roles of tokens in `tokenizer_config.json` and `config.json`, and their keys in a GGUF file.
const ROLES: [(&str, &str); 4] = [
    ("bos", "tokenizer.ggml.bos_token_id"),
    ("eos", "tokenizer.ggml.eos_token_id"),
    ("unk", "tokenizer.ggml.unknown_token_id"),
    ("pad", "tokenizer.ggml.padding_token_id"),
];

/// The special tokens of a tokenizer.
#[derive(Debug, Default)]
pub(super) struct Special {
    /// Ids by role, of the tokenizer's files.
    ids: Vec<(&'static str, usize)>,
    /// Whether text gets the first and the last token of the model.
    adds: [Option<bool>; 2],
    /// Chat templates by name; the default's is empty.
    templates: Vec<(String, String)>,
}

impl Special {
    /// Reads them from the files of a model.
    ///
    /// # Errors
    /// If a file is not JSON or not text.
    pub(super) fn read(files: &Files<'_>, tokenizer: Option<&Json>) -> Result<Self> {
        let config = files.json("tokenizer_config.json")?.unwrap_or_default();
        let content = |role: &str| {
            let token = &config[format!("{role}_token")];
            token.as_str().or(token["content"].as_str())
        };
        let mut special = Self::default();
        for (role, _) in ROLES {
            let id = content(role).and_then(|text| id_of(text, tokenizer, &config));
            special.ids.extend(id.map(|id| (role, id)));
        }
        special.adds = ["bos", "eos"].map(|role| {
            let of_template = tokenizer.and_then(|json| added(json, role, content(role)));
            let of_config = || config[format!("add_{role}_token")].as_bool();
            // Readers of "llama-bpe" would put the first token there by themselves.
            of_template.or_else(of_config).or(tokenizer.map(|_| false))
        });
        special.templates = templates(files, &config)?;
        Ok(special)
    }

    /// Adds the keys; ids that no file of the tokenizer has come from `config.json`.
    pub(super) fn describe(
        &self,
        metadata: &mut Metadata,
        config: &Map<String, Json>,
        tokens: usize,
    ) {
        for (role, key) in ROLES {
            let own = self.ids.iter().find(|(name, _)| *name == role).map(|(_, id)| *id);
            // A list has the tokens that end a text or a turn; the first counts.
            let of_config = || {
                let value = config.get(&format!("{role}_token_id"))?;
                value.as_u64().or_else(|| value.get(0)?.as_u64()).map(|id| id as usize)
            };
            if let Some(id) = own.or_else(of_config).filter(|id| *id < tokens) {
                metadata.set(key, Value::size(id));
            }
        }
        let keys = ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"];
        for (key, adds) in keys.into_iter().zip(self.adds) {
            if let Some(adds) = adds {
                metadata.set(key, Value::Bool(adds));
            }
        }
        let mut names = Vec::new();
        for (name, template) in &self.templates {
            match name.is_empty() {
                true => metadata.set("tokenizer.chat_template", template.as_str()),
                false => {
                    metadata.set(format!("tokenizer.chat_template.{name}"), template.as_str());
                    names.push(name.clone());
                }
            }
        }
        if !names.is_empty() {
            metadata.set("tokenizer.chat_templates", Value::Texts(names));
        }
    }
}

/// The id of a token by its text.
fn id_of(text: &str, tokenizer: Option<&Json>, config: &Json) -> Option<usize> {
    let of_tokenizer = || {
        let json = tokenizer?;
        let mut added = json["added_tokens"].as_array()?.iter();
        let found = added.find(|token| token["content"] == text);
        found.map(|token| &token["id"]).or_else(|| json["model"]["vocab"].get(text))?.as_u64()
    };
    let of_config = || {
        let mut added = config["added_tokens_decoder"].as_object()?.iter();
        added.find(|(_, token)| token["content"] == text)?.0.parse().ok()
    };
    of_tokenizer().or_else(of_config).map(|id| id as usize)
}

/// Whether the post-processor puts the token `text` of this role around a text; `None` if it says
/// nothing.
fn added(tokenizer: &Json, role: &str, text: Option<&str>) -> Option<bool> {
    let post = &tokenizer["post_processor"];
    let steps = match post["processors"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(post),
    };
    let mut adds = None;
    for step in steps {
        match step["type"].as_str() {
            Some("ByteLevel") => adds = adds.or(Some(false)),
            Some("TemplateProcessing") => {
                let parts = step["single"].as_array().map(Vec::as_slice).unwrap_or_default();
                let edge = if role == "bos" { parts.first() } else { parts.last() };
                let token = edge.and_then(|part| part["SpecialToken"]["id"].as_str());
                adds = Some(token.is_some() && token == text);
            }
            _ => {}
        }
    }
    adds
}

/// The chat templates, by name.
fn templates(files: &Files<'_>, config: &Json) -> Result<Vec<(String, String)>> {
    let text = |name: &str| {
        let text = files.get(name).map(|bytes| std::str::from_utf8(bytes).map(str::to_owned));
        text.transpose().map_err(|e| Error::Config(format!("{name}: {e}")))
    };
    // As in `transformers`, the file goes before the key.
    let template = match (text("chat_template.jinja")?, &config["chat_template"]) {
        (Some(template), _) => Json::String(template),
        (None, Json::Null) => {
            let of_processor = files.json("chat_template.json")?;
            of_processor.map(|json| json["chat_template"].clone()).unwrap_or_default()
        }
        (None, template) => template.clone(),
    };
    Ok(match template {
        Json::String(template) => vec![(String::new(), template)],
        Json::Array(list) => list
            .iter()
            .filter_map(|entry| {
                let name = entry["name"].as_str()?;
                let name = if name == "default" { "" } else { name };
                Some((name.to_owned(), entry["template"].as_str()?.to_owned()))
            })
            .collect(),
        _ => Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn metadata(files: &[(&str, Json)], config: &Json) -> Vec<(String, Value)> {
        let bytes = |(name, json): &(&str, Json)| {
            let text = json.as_str().map_or_else(|| json.to_string(), str::to_owned);
            ((*name).to_owned(), text.into_bytes())
        };
        let files: Vec<(String, Vec<u8>)> = files.iter().map(bytes).collect();
        let files = Files(&files);
        let tokenizer = files.json("tokenizer.json").unwrap();
        let special = Special::read(&files, tokenizer.as_ref()).unwrap();
        let mut metadata = Metadata::default();
        special.describe(&mut metadata, config.as_object().unwrap(), 10);
        metadata.0
    }

    fn value<'a>(metadata: &'a [(String, Value)], key: &str) -> Option<&'a Value> {
        let name = format!("tokenizer.{key}");
        metadata.iter().find(|(found, _)| *found == name).map(|(_, value)| value)
    }

    #[test]
    fn the_file_of_a_template_goes_first() {
        let config =
            |template: Json| ("tokenizer_config.json", json!({ "chat_template": template }));
        let file = ("chat_template.jinja", json!("of the file"));
        let found = metadata(&[config("of the key".into()), file], &json!({}));
        assert_eq!(value(&found, "chat_template"), Some(&"of the file".into()));
        let list = json!([
            { "name": "default", "template": "a" },
            { "name": "tool_use", "template": "b" },
        ]);
        let found = metadata(&[config(list)], &json!({}));
        assert_eq!(value(&found, "chat_template"), Some(&"a".into()));
        assert_eq!(value(&found, "chat_template.tool_use"), Some(&"b".into()));
        let names = Value::Texts(vec!["tool_use".to_owned()]);
        assert_eq!(value(&found, "chat_templates"), Some(&names));
        assert_eq!(metadata(&[], &json!({})), []);
    }

    #[test]
    fn ids_come_from_the_tokenizer_first() {
        let token = |id: u64, content: &str| json!({ "id": id, "content": content });
        let tokenizer = json!({ "added_tokens": [token(1, "<s>"), token(7, "<end>")] });
        let config = json!({ "bos_token": { "content": "<s>" }, "eos_token": "<end>", "add_eos_token": true });
        let files = [("tokenizer.json", tokenizer), ("tokenizer_config.json", config)];
        let model = json!({ "eos_token_id": [3, 4], "pad_token_id": 9, "unk_token_id": 12 });
        let found = metadata(&files, &model);
        assert_eq!(value(&found, "ggml.bos_token_id"), Some(&Value::U32(1)));
        assert_eq!(value(&found, "ggml.eos_token_id"), Some(&Value::U32(7)));
        assert_eq!(value(&found, "ggml.padding_token_id"), Some(&Value::U32(9)));
        // There are ten tokens.
        assert_eq!(value(&found, "ggml.unknown_token_id"), None);
        assert_eq!(value(&found, "ggml.add_bos_token"), Some(&Value::Bool(false)));
        assert_eq!(value(&found, "ggml.add_eos_token"), Some(&Value::Bool(true)));
        let found = metadata(&[], &model);
        assert_eq!(value(&found, "ggml.eos_token_id"), Some(&Value::U32(3)));
        assert_eq!(value(&found, "ggml.add_bos_token"), None);
    }
}
