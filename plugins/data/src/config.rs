//! The `[data]` table.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fulgurite_config::{ConfigType, Documented, Scalar, deserialize_scalar};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::special_tokens::Wanted;

/// The default fraction of text samples for validation.
const VALIDATION_FRACTION: f64 = 0.05;
/// Maximum tokens in a micro-batch of one rank: far above any real one.
const MAX_TOKENS: usize = 1 << 27;

/// The configuration of [`TextData`](crate::TextData): the data, and how samples are cut from it.
///
/// ```toml
/// [data]
/// type = "text"
/// path = ["books", "notes.txt"]
/// tokenizer = "tokenizer.json"
/// seq_len = 512
/// batch_size = 4
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct TextDataConfig {
    /// The content of `path`: `"text"` (each file is a document), `"lines"` or `"jsonl"` (each line
    /// is one), `"tokens"` or, in programs with the feature `parquet`, `"parquet"`.
    #[serde(rename = "type")]
    #[default(DataKind::Text)]
    pub kind: DataKind,
    /// Files and folders. Folders are walked with their sub-folders, in order of their paths. Links
    /// are followed. Hidden files are left out. A folder of text also leaves out files that a
    /// `.gitignore` in it excludes, and files that are not UTF-8 text. For the other types the
    /// extension decides: `.txt` (lines), `.jsonl` and `.ndjson`, `.parquet`, or `.u16`, `.u32`,
    /// `.bin` and `.npy` (tokens).
    #[default(Paths::One(".".into()))]
    pub path: Paths,
    /// Sources that training mixes by weight, in place of `path`:
    /// `[{ path = "books", weight = 0.7 }, { path = "code", weight = 0.3 }]`. A source too short
    /// for its weight is repeated, in a different order each time. A long source is not used up in
    /// an epoch, which has as many samples as all sources together.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<MixtureSource>,
    /// The key of the text in a JSON object, or its column in a Parquet file; by default `"text"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_key: Option<String>,
    /// The treatment of unusable files, lines and rows (not UTF-8, not JSON, or without text under
    /// `text_key`): `"error"` ends the run, `"skip"` leaves them out. The start of a run reports
    /// how many were left out. Files in a folder of text are always skipped.
    #[default(OnError::Error)]
    pub on_error: OnError,
    /// `"bytes"`, or a Hugging Face `tokenizer.json`, a folder with one, or a repository in the
    /// local Hub cache. By default no tokenizer for type `"tokens"`, and `"bytes"` for every other
    /// type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// The token that ends each document, by its name in `tokenizer`. By default the token that
    /// `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` or
    /// `config.json` beside `tokenizer.json` names, or the token that the post-processor puts
    /// behind a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos_token: Option<String>,
    /// Whether each document begins with the start token: `true`, `false`, or `"auto"`, as
    /// transformers does it with this tokenizer (its post-processor decides; without one,
    /// `add_bos_token` of `tokenizer_config.json`).
    #[default(AddBosToken::Never)]
    pub add_bos_token: AddBosToken,
    /// The start token of documents, by its name in `tokenizer`; found like `eos_token` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos_token: Option<String>,
    /// The folder that caches token ids of text, so that other ranks of the host and later runs do
    /// not tokenize the same text again; `false` keeps ids in memory. By default (`true`)
    /// `fulgurite/tokens` in `$XDG_CACHE_HOME` or `~/.cache`, for 4 MiB of text or more with a
    /// Hugging Face tokenizer.
    #[serde(skip_serializing_if = "CacheDir::is_default")]
    #[default(CacheDir::Default)]
    pub cache_dir: CacheDir,
    /// Tokens in a sample.
    #[default(256)]
    pub seq_len: usize,
    /// Tokens between the starts of two samples; by default `seq_len`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Whether a token attends to its own document only, if a sample has several: each is computed
    /// as if it were alone, and the token after its end is not predicted. Documents end with the
    /// token that `eos_token` describes. Not with `context_parallel_size` above 1.
    pub separate_documents: bool,
    /// Samples in a micro-batch of one data-parallel rank.
    #[default(8)]
    pub batch_size: usize,
    /// Whether training samples are shuffled, differently in each epoch.
    #[default(true)]
    pub shuffle: bool,
    /// The fraction of the samples for validation, taken from the end; at least 0 and less than 1.
    /// By default 0 with type `"tokens"`, `validation_path` or `validation_sets`, and 0.05
    /// otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// Files and folders of the same type for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// Several validation sets by name, each with files and folders of the same type; then all of
    /// `path` is for training. The names of logged metrics end with the set's name, as in
    /// `val_loss/books`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub validation_sets: BTreeMap<String, Paths>,
    /// The type of ids in token files. By default the header of a `.npy` or llm.c file decides, or
    /// the Megatron-LM `.idx` file beside a `.bin` file, and then the extension: u32 for `.u32`,
    /// u16 for `.u16` and `.bin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_dtype: Option<TokenDtype>,
    /// Ids must be less than this; by default the tokenizer's number of ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
}

/// A source of a mixture: an element of `data.mixture`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureSource {
    /// Files and folders, like `data.path`.
    pub path: Paths,
    /// The share of samples from this source, relative to the other weights.
    pub weight: f64,
}

/// The content of data files: `data.type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataKind {
    /// UTF-8 text.
    Text,
    /// Token ids, flat, little-endian.
    Tokens,
    /// Text with one document per line.
    Lines,
    /// One JSON object per line, with a document under `text_key`.
    Jsonl,
    /// Parquet files with one document per row in the column `text_key`. An error without the
    /// feature `parquet`.
    Parquet,
}

/// Whether documents begin with the start token: `data.add_bos_token`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AddBosToken {
    /// `false`.
    #[default]
    Never,
    /// `true`.
    Always,
    /// `"auto"`: as transformers does it with this tokenizer.
    Auto,
}

impl Serialize for AddBosToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Never => serializer.serialize_bool(false),
            Self::Always => serializer.serialize_bool(true),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

impl<'de> Deserialize<'de> for AddBosToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "`true`, `false` or `\"auto\"`", |value| match value {
            Scalar::Bool(false) => Some(Self::Never),
            Scalar::Bool(true) => Some(Self::Always),
            Scalar::Text(text) if text == "auto" => Some(Self::Auto),
            _ => None,
        })
    }
}

/// The treatment of unusable data: `data.on_error`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The run ends with an error that names the data.
    #[default]
    Error,
    /// The data is left out and counted.
    Skip,
}

/// The cache of token ids: `data.cache_dir`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CacheDir {
    /// In the user's cache.
    #[default]
    Default,
    /// `false`: only in memory.
    Off,
    /// In this folder.
    At(PathBuf),
}

impl CacheDir {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::Default
    }
}

impl Serialize for CacheDir {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Default => serializer.serialize_bool(true),
            Self::Off => serializer.serialize_bool(false),
            Self::At(folder) => folder.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for CacheDir {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_scalar(deserializer, "the path of a folder, `true` or `false`", |value| {
            match value {
                Scalar::Bool(true) => Some(Self::Default),
                Scalar::Bool(false) => Some(Self::Off),
                Scalar::Text(path) if !path.is_empty() => Some(Self::At(path.into())),
                _ => None,
            }
        })
    }
}

/// The type of ids in a token file: `data.token_dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenDtype {
    /// Two bytes.
    U16,
    /// Four bytes.
    U32,
    /// Four bytes with a sign, as Megatron-LM writes them.
    I32,
    /// Eight bytes with a sign, as NumPy and PyTorch write them by default.
    I64,
}

/// One path or several.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
pub enum Paths {
    /// One file or folder.
    One(PathBuf),
    /// Several, in this order.
    Many(Vec<PathBuf>),
}

impl ConfigType for DataKind {
    fn describe() -> String {
        "`\"text\"`, `\"lines\"`, `\"jsonl\"`, `\"tokens\"` or `\"parquet\"`".to_owned()
    }
}

impl ConfigType for OnError {
    fn describe() -> String {
        "`\"error\"` or `\"skip\"`".to_owned()
    }
}

impl ConfigType for AddBosToken {
    fn describe() -> String {
        "true, false or `\"auto\"`".to_owned()
    }
}

impl ConfigType for CacheDir {
    fn describe() -> String {
        "path, true or false".to_owned()
    }
}

impl ConfigType for TokenDtype {
    fn describe() -> String {
        "`\"u16\"`, `\"u32\"`, `\"i32\"` or `\"i64\"`".to_owned()
    }
}

impl ConfigType for Paths {
    fn describe() -> String {
        "path or list of path".to_owned()
    }
}

impl Paths {
    pub(crate) fn as_slice(&self) -> &[PathBuf] {
        match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Many(paths) => paths,
        }
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Paths {
    fn from(path: &P) -> Self {
        Self::One(path.as_ref().to_owned())
    }
}

impl TextDataConfig {
    /// The training sources: keys of the configuration, paths and weights.
    pub(crate) fn sources(&self) -> Vec<(String, &Paths, f64)> {
        match &*self.mixture {
            [] => vec![("data.path".to_owned(), &self.path, 1.0)],
            mixture => mixture
                .iter()
                .enumerate()
                .map(|(i, source)| (format!("data.mixture[{i}].path"), &source.path, source.weight))
                .collect(),
        }
    }

    pub(crate) fn text_key(&self) -> &str {
        self.text_key.as_deref().unwrap_or("text")
    }

    /// The tokens around a text.
    pub(crate) fn special_tokens(&self) -> Wanted<'_> {
        Wanted {
            bos_token: self.bos_token.as_deref(),
            eos_token: self.eos_token.as_deref(),
            add_bos_token: self.add_bos_token,
        }
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride.unwrap_or(self.seq_len)
    }

    pub(crate) fn validation_fraction(&self) -> f64 {
        let from_path = self.validation_path.is_none() && self.validation_sets.is_empty();
        match (self.validation_fraction, self.kind) {
            (Some(fraction), _) => fraction,
            (None, kind) if kind != DataKind::Tokens && from_path => VALIDATION_FRACTION,
            _ => 0.0,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        for (key, value) in
            [("seq_len", self.seq_len), ("stride", self.stride()), ("batch_size", self.batch_size)]
        {
            if value == 0 {
                return fail(format!("data.{key} must be at least 1, got 0"));
            }
        }
        let tokens = self.batch_size.checked_mul(self.seq_len);
        if tokens.is_none_or(|tokens| tokens > MAX_TOKENS) {
            return fail(format!(
                "data.batch_size = {} times data.seq_len = {} are the tokens of a micro-batch, which \
                 must be at most {MAX_TOKENS}",
                self.batch_size, self.seq_len
            ));
        }
        let (path, sets) = (self.validation_path.is_some(), !self.validation_sets.is_empty());
        let others = [("validation_path", path), ("validation_sets", sets)];
        check_validation(self.validation_fraction(), &others)?;
        if path && sets {
            return fail(
                "data.validation_path and data.validation_sets exclude each other; make the path \
                 one of the sets"
                    .to_owned(),
            );
        }
        if !self.mixture.is_empty() {
            if self.path != Self::default().path {
                return fail(
                    "data.path and data.mixture exclude each other; make the path one of the \
                     mixture's sources"
                        .to_owned(),
                );
            }
            if !self.shuffle {
                return fail(
                    "data.shuffle = false and data.mixture exclude each other: a mixture draws at random"
                        .to_owned(),
                );
            }
        }
        if self.kind == DataKind::Parquet && !cfg!(feature = "parquet") {
            return fail(
                "data.type = \"parquet\" needs Parquet to be compiled in: give the dependency `fulgurite` \
                 (or `fulgurite-data`) the feature `parquet`"
                    .to_owned(),
            );
        }
        let has_key = matches!(self.kind, DataKind::Jsonl | DataKind::Parquet);
        if !has_key && self.text_key.is_some() {
            return fail("data.text_key is for data.type = \"jsonl\" or \"parquet\"".to_owned());
        }
        let bytes = matches!(self.tokenizer.as_deref(), None | Some("bytes"));
        let adds_bos = self.add_bos_token != AddBosToken::Never;
        for (key, given) in [
            ("eos_token", self.eos_token.is_some()),
            ("add_bos_token", adds_bos),
            ("bos_token", self.bos_token.is_some()),
            ("cache_dir", matches!(self.cache_dir, CacheDir::At(_))),
        ] {
            if given && (bytes || self.kind == DataKind::Tokens) {
                return fail(format!(
                    "data.{key} is for text with a Hugging Face tokenizer (data.tokenizer)"
                ));
            }
        }
        if self.bos_token.is_some() && !adds_bos {
            return fail(
                "data.bos_token is added with data.add_bos_token = true or \"auto\" only"
                    .to_owned(),
            );
        }
        if self.kind != DataKind::Tokens && self.token_dtype.is_some() {
            return fail("data.token_dtype is for data.type = \"tokens\"".to_owned());
        }
        let sources = self.sources().into_iter().map(|(key, paths, _)| (key, paths));
        let validation =
            self.validation_path.iter().map(|paths| ("data.validation_path".to_owned(), paths));
        let sets = self.validation_sets.iter();
        let sets = sets.map(|(name, paths)| (format!("data.validation_sets.{name}"), paths));
        for (key, paths) in sources.chain(validation).chain(sets) {
            if paths.as_slice().is_empty() {
                return fail(format!("{key} is an empty list; name a file or folder"));
            }
        }
        Ok(())
    }
}

/// Checks a fraction of rows for validation. Given `others` bring validation data of their own.
///
/// # Errors
/// If the fraction is below 0 or at least 1, or above 0 beside a given key.
pub(crate) fn check_validation(fraction: f64, others: &[(&str, bool)]) -> Result<()> {
    if !(0.0..1.0).contains(&fraction) {
        return Err(Error::Config(format!(
            "data.validation_fraction must be at least 0 and less than 1, got {fraction}"
        )));
    }
    match others.iter().find(|(_, given)| fraction > 0.0 && *given) {
        Some((key, _)) => Err(Error::Config(format!(
            "data.{key} and data.validation_fraction = {fraction} exclude each other; take one away"
        ))),
        None => Ok(()),
    }
}
