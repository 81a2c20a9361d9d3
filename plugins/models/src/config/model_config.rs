//! The table `[model]`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use fulgurite_config::{Documented, DocumentedType, KeyDoc};
use fulgurite_error::{Error, Result};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::keys::{self, KeyKind};
use super::{pretrained, rope};

/// The table `[model]` of a run that trains a model of this crate.
///
/// It has the keys of Hugging Face's `config.json`, `type` for `model_type`, and
/// `from_pretrained`. With `from_pretrained`, the directory's `config.json` has the values of keys
/// that are not set.
///
/// ```
/// use fulgurite_models::ModelConfig;
///
/// let config: ModelConfig = serde_json::from_str(
///     r#"{ "type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
///          "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16 }"#,
/// )?;
/// assert_eq!(config.model_type(), "qwen3");
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelConfig {
    model_type: Option<String>,
    from_pretrained: Option<PathBuf>,
    values: BTreeMap<&'static str, Value>,
    /// The path of `config.json` and its keys, once it was read.
    file: Option<(PathBuf, Map<String, Value>)>,
}

/// The value of `type` that leaves the choice to `config.json`.
pub(crate) const AUTO: &str = "auto";

/// The largest `config.json` that is read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

impl ModelConfig {
    /// The model's type, such as `"llama"`: [`type`](Self) of the table, else `model_type` of
    /// `config.json`; `"auto"` before the file is read.
    pub fn model_type(&self) -> &str {
        self.model_type.as_deref().unwrap_or(AUTO)
    }

    /// The directory of the weights to start from.
    ///
    /// # Errors
    /// If `from_pretrained` is neither a directory nor a repository in the local Hub cache.
    pub fn directory(&self) -> Result<Option<PathBuf>> {
        self.from_pretrained.as_deref().map(pretrained::resolve).transpose()
    }

    /// Names the directory of the weights to start from, as `from_pretrained` does.
    pub fn start_from(&mut self, directory: impl Into<PathBuf>) {
        self.from_pretrained = Some(directory.into());
    }

    /// Whether the configuration names weights to start from.
    pub fn is_pretrained(&self) -> bool {
        self.from_pretrained.is_some()
    }

    /// Returns a value that the table sets; `false` stands for none unless the key is a flag.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Whether the table or `config.json` has a value of this key.
    pub fn has(&self, key: &str) -> bool {
        let of_file = || self.file.as_ref().and_then(|(_, values)| values.get(key));
        self.values.get(key).or_else(of_file).is_some_and(|value| !value.is_null())
    }

    /// Sets the value of a key, as a configuration file does.
    ///
    /// # Errors
    /// If there is no such key, or its values are of another type.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<()> {
        let (key, value) = checked(key, value.into())
            .map_err(|message| Error::Config(format!("`model.{key}`: {message}")))?;
        self.values.insert(key, value);
        Ok(())
    }

    /// Reads `config.json` of the directory to start from, once.
    ///
    /// # Errors
    /// If the file is missing or no table, or its model is of another type than `type`.
    pub fn read_file(&mut self) -> Result<()> {
        if self.file.is_some() {
            return Ok(());
        }
        let directory = match self.directory() {
            Ok(Some(directory)) => directory,
            Ok(None) => return Ok(()),
            // The configuration of a checkpoint is complete, and may be read on another machine.
            Err(_) if self.is_complete() => return Ok(()),
            Err(error) => return Err(error),
        };
        let file = directory.join("config.json");
        let found: Value =
            fulgurite_checkpoint::read_json(&file, MAX_CONFIG).map_err(|e| match e {
                Error::Io { source, .. } => Error::Config(format!(
                    "{}: {source}; `model.from_pretrained` is to name a folder with it",
                    file.display()
                )),
                e => Error::Config(format!("`model.from_pretrained`: {e}")),
            })?;
        let Value::Object(mut values) = found else {
            return Err(Error::Config(format!("{}: expected a table", file.display())));
        };
        let named = match values.get("model_type") {
            Some(Value::String(named)) => named.clone(),
            Some(other) => {
                return Err(Error::Config(format!(
                    "{}: `model_type`: expected a string, found {other}",
                    file.display()
                )));
            }
            None => {
                return Err(Error::Config(format!(
                    "{}: there is no `model_type`, which says what the model is",
                    file.display()
                )));
            }
        };
        if self.model_type().ne(AUTO) && self.model_type() != named {
            return Err(Error::Config(format!(
                "{}: the model is of type \"{named}\", and `model.type` is \"{}\"; leave it out",
                file.display(),
                self.model_type()
            )));
        }
        self.model_type = Some(named);
        rope::overlay(&mut self.values, &mut values);
        self.file = Some((file, values));
        Ok(())
    }

    /// Whether the table has what a model needs, without `config.json`.
    fn is_complete(&self) -> bool {
        self.model_type.is_some()
            && ["hidden_size", "n_embd", "d_model"].iter().any(|key| self.values.contains_key(key))
    }

    /// The path of the weights to start from, which need not exist.
    pub(crate) fn weights(&self) -> Option<PathBuf> {
        let named = self.from_pretrained.clone()?;
        Some(self.directory().ok().flatten().unwrap_or(named))
    }

    /// All keys of the table and of `config.json`; the table goes first.
    fn complete(&self) -> Map<String, Value> {
        let file = self.file.iter().flat_map(|(_, values)| values);
        let known = file.filter_map(|(name, value)| {
            let key = keys::find(name)?;
            match value.is_null() {
                false => Some((key.name, value.clone())),
                // TOML lacks null.
                true if key.kind != KeyKind::Flag => Some((key.name, Value::Bool(false))),
                true => None,
            }
        });
        let set = self.values.iter().map(|(key, value)| (*key, value.clone()));
        known.chain(set).map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// The path of `config.json` and its keys, if it was [read](Self::read_file).
    pub(crate) fn file(&self) -> Option<(&Path, &Map<String, Value>)> {
        self.file.as_ref().map(|(path, values)| (path.as_path(), values))
    }

    /// Whether the table sets a key to none.
    pub(crate) fn is_none(&self, key: &str) -> bool {
        let is_flag = keys::find(key).is_some_and(|key| key.kind == KeyKind::Flag);
        !is_flag && self.values.get(key) == Some(&Value::Bool(false))
    }

    /// The keys that the table sets.
    pub(crate) fn values(&self) -> &BTreeMap<&'static str, Value> {
        &self.values
    }
}

/// The keys of the table that `config.json` lacks.
fn own_keys() -> [KeyDoc; 2] {
    let key = |name, ty: &str, doc| KeyDoc { name: Cow::Borrowed(name), ty: ty.to_owned(), doc };
    [
        key(
            "type",
            "string",
            "The kind of model, as `model_type` in `config.json`: `\"llama\"`, `\"qwen3\"`, `\"bert\"`, …; by default \
             (`\"auto\"`) that of `from_pretrained`.",
        ),
        key(
            "from_pretrained",
            "path, optional",
            "A directory in Hugging Face's format with `config.json` and weights, or the name of a repository in the \
             local Hub cache. The keys below are then taken from its `config.json`, if they are not set.",
        ),
    ]
}

impl Documented for ModelConfig {
    fn keys() -> Vec<KeyDoc> {
        own_keys().into_iter().chain(keys::documented()).collect()
    }
}

fulgurite_config::__private::inventory::submit! { DocumentedType::new::<ModelConfig>() }

/// Returns the key's name and the value, if there is such a key and it takes the value.
fn checked(name: &str, value: Value) -> std::result::Result<(&'static str, Value), String> {
    let key = keys::find(name).ok_or("there is no such key")?;
    match key.kind.accepts(&value) || value == Value::Bool(false) {
        true => Ok((key.name, value)),
        // JSON cannot hold such a number.
        false if value.is_null() => {
            Err(format!("expected {}, found inf or nan", key.kind.expected()))
        }
        false => Err(format!("expected {}, found {value}", key.kind.expected())),
    }
}

impl Serialize for ModelConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut all = Map::new();
        all.insert("type".to_owned(), self.model_type().into());
        if let Some(path) = &self.from_pretrained {
            all.insert("from_pretrained".to_owned(), path.to_string_lossy().into());
        }
        all.extend(self.complete());
        all.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ModelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = ModelConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<ModelConfig, A::Error> {
                use serde::de::Error as _;
                let mut config = ModelConfig::default();
                while let Some(name) = map.next_key::<String>()? {
                    match name.as_str() {
                        "type" | "model_type" => {
                            let named: String = map.next_value()?;
                            config.model_type = Some(named).filter(|named| named != AUTO);
                        }
                        "from_pretrained" => config.from_pretrained = Some(map.next_value()?),
                        _ if keys::find(&name).is_none() => {
                            return Err(A::Error::unknown_field(&name, known()));
                        }
                        _ => {
                            let (key, value) = map.next_value_seed(OfKey(&name))?;
                            config.values.insert(key, value);
                        }
                    }
                }
                Ok(config)
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

/// The value of a key, checked where it is read, so that an error names its place.
struct OfKey<'a>(&'a str);

impl<'de> serde::de::DeserializeSeed<'de> for OfKey<'_> {
    type Value = (&'static str, Value);

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        checked(self.0, Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// The names of all keys.
fn known() -> &'static [&'static str] {
    static NAMES: std::sync::OnceLock<Vec<&'static str>> = std::sync::OnceLock::new();
    NAMES.get_or_init(|| {
        ["type", "from_pretrained"]
            .into_iter()
            .chain(keys::KEYS.iter().map(|key| key.name))
            .collect()
    })
}
