//! The `[data]` table of labelled texts.

use fulgurite_config::{ConfigType, Documented};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::config::{Paths, check_validation};
use crate::rows::Column;

/// The default fraction of rows for validation.
const VALIDATION_FRACTION: f64 = 0.1;
/// Maximum tokens in a micro-batch of one rank: far above any real one.
const MAX_TOKENS: usize = 1 << 27;

/// The configuration of [`LabelledTexts`](super::LabelledTexts): rows of texts and labels.
///
/// ```toml
/// [data]
/// path = "reviews.csv"
/// label_key = "stars"
/// tokenizer = "bert-base-uncased/tokenizer.json"
/// seq_len = 256
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Documented)]
#[serde(default, deny_unknown_fields)]
pub struct LabelledTextsConfig {
    /// The content of a row: `"texts"` (a text or a pair, and a label), `"words"` (a list of words,
    /// and a list of their tags), `"pairs"` (two texts that belong together, and optionally one
    /// that does not) or `"text_to_text"` (a text, and the text to write for it).
    #[serde(rename = "type")]
    #[default(RowKind::Texts)]
    pub kind: RowKind,
    /// Files and folders of rows for training. The extension says how they are read: `.jsonl` and
    /// `.ndjson` (a JSON object in each line), `.csv` and `.tsv` (with a header) or, in programs
    /// with the feature `parquet`, `.parquet`.
    #[default(Paths::One(".".into()))]
    pub path: Paths,
    /// Files and folders of rows for validation; then all of `path` is for training.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_path: Option<Paths>,
    /// Files and folders of rows for a test; by default those for validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_path: Option<Paths>,
    /// Files and folders of rows for a prediction, whose rows need no labels; by default those for
    /// a test.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predict_path: Option<Paths>,
    /// The fraction of the rows of `path` for validation, chosen at random, the same in every run.
    /// By default 0.1, and 0 with a `validation_path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<f64>,
    /// The column (or key of a JSON object) of the text, for types `"texts"` and `"text_to_text"`;
    /// by default `"text"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_key: Option<String>,
    /// The column of the second text of a pair, such as a hypothesis; by default rows have one
    /// text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_pair_key: Option<String>,
    /// The column of the label; by default `"label"`. Labels are class names or integers from 0 on,
    /// lists of them (several classes for a text), or numbers with a decimal point (to predict as
    /// such) and lists of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label_key: Option<String>,
    /// The column of the words, for type `"words"`; by default `"tokens"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_key: Option<String>,
    /// The column of the words' tags, for type `"words"`; by default `"tags"`. Tags are class names
    /// or integers from 0 on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tags_key: Option<String>,
    /// The column of the first text, for type `"pairs"`; by default `"anchor"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anchor_key: Option<String>,
    /// The column of the text that belongs to the first, for type `"pairs"`; by default
    /// `"positive"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub positive_key: Option<String>,
    /// The column of a text that does not belong to the first, for type `"pairs"`; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub negative_key: Option<String>,
    /// The column of the text to write, for type `"text_to_text"`; by default `"target"`. Rows of a
    /// prediction need none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_key: Option<String>,
    /// A text in front of each text, for type `"text_to_text"`, such as `"summarize: "`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_prefix: Option<String>,
    /// The names of the classes, in the order of the model's outputs. By default the names in
    /// `path`, sorted. A module that knows names from a `config.json` has its own order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// A Hugging Face `tokenizer.json`, a folder with one, or a repository in the local Hub cache.
    /// Its post-processor puts the special
    /// tokens around texts and pairs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// The token of padding, by its name in `tokenizer`; by default the one that
    /// `tokenizer_config.json` or `special_tokens_map.json` names, or the token 0. Models do not
    /// see padding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_token: Option<String>,
    /// Tokens in a sample at most, with the special ones; longer texts are cut.
    #[default(256)]
    pub seq_len: usize,
    /// The length of a micro-batch's texts is rounded up to a multiple of this number. Dropout
    /// depends on that length: only with `seq_len` here other numbers of ranks drop the same.
    #[default(1)]
    pub pad_to_multiple_of: usize,
    /// Samples in a micro-batch of one data-parallel rank.
    #[default(8)]
    pub batch_size: usize,
    /// Whether training samples are shuffled, differently in each epoch.
    #[default(true)]
    pub shuffle: bool,
}

/// The content of a row: `data.type` of labelled texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// A text or a pair of texts, and a label.
    Texts,
    /// Words, and a tag for each.
    Words,
    /// Two texts that belong together, and optionally one that does not.
    Pairs,
    /// A text, and the text to write for it.
    TextToText,
}

impl RowKind {
    /// The value of `data.type`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Texts => "texts",
            Self::Words => "words",
            Self::Pairs => "pairs",
            Self::TextToText => "text_to_text",
        }
    }
}

impl ConfigType for RowKind {
    fn describe() -> String {
        "`\"texts\"`, `\"words\"`, `\"pairs\"` or `\"text_to_text\"`".to_owned()
    }
}

impl LabelledTextsConfig {
    pub(super) fn validation_fraction(&self) -> f64 {
        let default = if self.validation_path.is_some() { 0.0 } else { VALIDATION_FRACTION };
        self.validation_fraction.unwrap_or(default)
    }

    /// The columns of texts, or of words.
    pub(super) fn text_columns(&self) -> Vec<Column> {
        let column = |key, name: &Option<String>, default: &str| Column {
            key,
            name: name.clone().unwrap_or_else(|| default.to_owned()),
        };
        let optional = |key, name: &Option<String>| name.as_ref().map(|_| column(key, name, ""));
        match self.kind {
            RowKind::Texts => std::iter::once(column("data.text_key", &self.text_key, "text"))
                .chain(optional("data.text_pair_key", &self.text_pair_key))
                .collect(),
            RowKind::Words => vec![column("data.tokens_key", &self.tokens_key, "tokens")],
            RowKind::Pairs => [
                column("data.anchor_key", &self.anchor_key, "anchor"),
                column("data.positive_key", &self.positive_key, "positive"),
            ]
            .into_iter()
            .chain(optional("data.negative_key", &self.negative_key))
            .collect(),
            RowKind::TextToText => vec![
                column("data.text_key", &self.text_key, "text"),
                column("data.target_key", &self.target_key, "target"),
            ],
        }
    }

    /// Number of the columns of texts that a row of a prediction needs.
    pub(super) fn columns_of_predictions(&self) -> usize {
        match self.kind {
            RowKind::TextToText => 1,
            _ => self.text_columns().len(),
        }
    }

    /// The column of labels or tags; `None` for rows of texts alone.
    pub(super) fn label_column(&self) -> Option<Column> {
        let (key, name, default) = match self.kind {
            RowKind::Texts => ("data.label_key", &self.label_key, "label"),
            RowKind::Words => ("data.tags_key", &self.tags_key, "tags"),
            RowKind::Pairs | RowKind::TextToText => return None,
        };
        Some(Column { key, name: name.clone().unwrap_or_else(|| default.to_owned()) })
    }

    pub(super) fn validate(&self) -> Result<()> {
        let fail = |message: String| Err(Error::Config(message));
        for (key, value) in [
            ("seq_len", self.seq_len),
            ("pad_to_multiple_of", self.pad_to_multiple_of),
            ("batch_size", self.batch_size),
        ] {
            if value == 0 {
                return fail(format!("data.{key} must be at least 1, got 0"));
            }
        }
        let longest = self.seq_len.checked_next_multiple_of(self.pad_to_multiple_of);
        let tokens = longest.and_then(|longest| self.batch_size.checked_mul(longest));
        if tokens.is_none_or(|tokens| tokens > MAX_TOKENS) {
            return fail(format!(
                "data.batch_size = {} times data.seq_len = {} are the tokens of a micro-batch, which must be at most \
                 {MAX_TOKENS}",
                self.batch_size, self.seq_len
            ));
        }
        let others = [("validation_path", self.validation_path.is_some())];
        check_validation(self.validation_fraction(), &others)?;
        let (texts, words, pairs) = (RowKind::Texts, RowKind::Words, RowKind::Pairs);
        let to_text = RowKind::TextToText;
        for (key, given, of) in [
            ("text_key", &self.text_key, &[texts, to_text][..]),
            ("text_pair_key", &self.text_pair_key, &[texts]),
            ("label_key", &self.label_key, &[texts]),
            ("tokens_key", &self.tokens_key, &[words]),
            ("tags_key", &self.tags_key, &[words]),
            ("anchor_key", &self.anchor_key, &[pairs]),
            ("positive_key", &self.positive_key, &[pairs]),
            ("negative_key", &self.negative_key, &[pairs]),
            ("target_key", &self.target_key, &[to_text]),
            ("text_prefix", &self.text_prefix, &[to_text]),
        ] {
            if given.is_some() && !of.contains(&self.kind) {
                return fail(format!(
                    "data.{key} is for data.type = \"{}\", and data.type is \"{}\"",
                    of[0].name(),
                    self.kind.name()
                ));
            }
        }
        if [pairs, to_text].contains(&self.kind) && !self.labels.is_empty() {
            return fail(format!(
                "data.labels is not for data.type = \"{}\", which has no labels",
                self.kind.name()
            ));
        }
        let mut names: Vec<&String> = self.labels.iter().collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|two| two[0] == two[1]) {
            return fail(format!("data.labels names {:?} twice", twice[0]));
        }
        if self.tokenizer.is_none() {
            return fail(
                "data.tokenizer is missing: name the tokenizer.json of the model, or the folder with it"
                    .to_owned(),
            );
        }
        Ok(())
    }
}
