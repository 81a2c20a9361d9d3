//! Problems of a configuration, and their messages.

use std::fmt::{self, Display};

use serde::de::{self, Expected, Unexpected};

use super::catalogue::KnownTable;
use super::suggest::{for_key, nearest};
use fulgurite_error::counted;

/// One step of a path into a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PathSegment {
    /// A key of a table.
    Key(String),
    /// An element of a list, counted from 0.
    Index(usize),
}

/// A problem of a value, without its path: the error type of the [deserializer](super::parse).
///
/// typetag and erased-serde pass errors on as text, so [`Display`] writes serde's own phrases and
/// [`custom`](de::Error::custom) parses them, so that a problem survives typetag.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Problem {
    /// A key that the table does not have. With `key: None` it is the last segment of the path.
    UnknownKey { key: Option<String>, expected: Vec<String> },
    /// A string that does not match any expected one.
    UnknownValue { value: String, expected: Vec<String> },
    /// A value of the wrong type, or out of range. `optional` is whether the key may be left out,
    /// if known.
    Mismatch { found: String, expected: String, optional: bool },
    /// A key without a default is missing.
    MissingKey { key: String },
    /// Anything else.
    Custom(String),
}

impl Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |words: &[String]| {
            words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::UnknownKey { key, expected } => {
                let key = key.as_deref().unwrap_or_default();
                write!(f, "unknown field `{key}`, expected one of {}", list(expected))
            }
            Self::UnknownValue { value, expected } => {
                write!(f, "unknown variant `{value}`, expected one of {}", list(expected))
            }
            Self::Mismatch { found, expected, .. } => {
                write!(f, "invalid type: {found}, expected {expected}")
            }
            Self::MissingKey { key } => write!(f, "missing field `{key}`"),
            Self::Custom(message) => f.write_str(message),
        }
    }
}

impl Problem {
    fn from_text(text: &str) -> Option<Self> {
        if let Some(rest) = text.strip_prefix("missing field `") {
            return Some(Self::MissingKey { key: rest.strip_suffix('`')?.to_owned() });
        }
        if let Some(rest) = text.strip_prefix("unknown field `") {
            let (key, rest) = rest.split_once('`')?;
            let key = Some(key.to_owned()).filter(|key| !key.is_empty());
            return Some(Self::UnknownKey { key, expected: quoted(rest) });
        }
        if let Some(rest) = text.strip_prefix("unknown variant `") {
            let (value, rest) = rest.split_once('`')?;
            return Some(Self::UnknownValue { value: value.to_owned(), expected: quoted(rest) });
        }
        let rest =
            text.strip_prefix("invalid type: ").or_else(|| text.strip_prefix("invalid value: "))?;
        let (found, expected) = rest.split_once(", expected ")?;
        Some(Self::mismatch(describe_found(found), expected))
    }

    fn mismatch(found: String, expected: &str) -> Self {
        Self::Mismatch { found, expected: describe_expected(expected), optional: false }
    }

    /// Marks the mismatch as belonging to a key that may be left out.
    pub(crate) fn optional(self) -> Self {
        match self {
            Self::Mismatch { found, expected, .. } => {
                Self::Mismatch { found, expected, optional: true }
            }
            other => other,
        }
    }
}

impl std::error::Error for Problem {}

impl de::Error for Problem {
    fn custom<T: Display>(message: T) -> Self {
        let message = message.to_string();
        let message = message.trim_end();
        Self::from_text(message).unwrap_or_else(|| Self::Custom(message.to_owned()))
    }

    fn invalid_type(unexpected: Unexpected, expected: &dyn Expected) -> Self {
        Self::mismatch(describe_found(&unexpected.to_string()), &expected.to_string())
    }

    fn invalid_value(unexpected: Unexpected, expected: &dyn Expected) -> Self {
        Self::invalid_type(unexpected, expected)
    }

    fn invalid_length(len: usize, expected: &dyn Expected) -> Self {
        Self::mismatch(counted(len, "element"), &expected.to_string())
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownValue { value: variant.to_owned(), expected: owned(expected) }
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::UnknownKey { key: Some(field.to_owned()), expected: owned(expected) }
    }

    fn missing_field(field: &'static str) -> Self {
        Self::MissingKey { key: field.to_owned() }
    }
}

/// Formats the message for a problem at a path.
pub(crate) fn render(path: &[PathSegment], problem: &Problem, known: &[KnownTable]) -> String {
    let at = if path.is_empty() { String::new() } else { format!("`{}`: ", format_path(path)) };
    match problem {
        Problem::UnknownKey { expected, .. } => {
            let full = error_path(path, problem);
            let (table, key) = match full.split_last() {
                Some((PathSegment::Key(key), table)) => (table, key.as_str()),
                _ => (path, ""),
            };
            let message = format!("unknown key `{}`", format_path(&full));
            message + &for_key(&format_path(table), key, expected, known)
        }
        Problem::UnknownValue { value, expected } => {
            let words: Vec<_> = expected.iter().map(|word| format!("{word:?}")).collect();
            let mut message = format!("{at}expected {}, found {value:?}", one_of(&words));
            if let Some(near) = nearest(value, expected) {
                message += &format!("; did you mean {near:?}?");
            }
            message
        }
        Problem::Mismatch { found, expected, optional } => {
            let message = format!("{at}expected {expected}, found {found}");
            message
                + &advice(found, expected, *optional)
                    .map_or(String::new(), |text| format!("; {text}"))
        }
        Problem::MissingKey { key } => {
            let mut full = path.to_vec();
            full.push(PathSegment::Key(key.clone()));
            format!("missing key `{}`, which has no default", format_path(&full))
        }
        Problem::Custom(message) => format!("{at}{message}"),
    }
}

/// Suggests a value for common mistakes.
///
/// These are a number in quotes, a float for a count, and words of Python and YAML.
fn advice(found: &str, expected: &str, optional: bool) -> Option<String> {
    let text = found.strip_prefix("the string \"").and_then(|text| text.strip_suffix('"'));
    let bare = found.strip_prefix('`').and_then(|found| found.strip_suffix('`'));
    let word = text.or(bare).unwrap_or_default().to_lowercase();
    let is_number = expected == "a number" || expected.starts_with("an integer");
    if text.is_some() && ["null", "none", "nil", "~", "undefined", ""].contains(&word.as_str()) {
        return Some(match optional {
            true => {
                "for no value leave the key out, or take it away with `--set KEY=null`".to_owned()
            }
            false => "leave the key out for its default, or take it away with `--set KEY=null`"
                .to_owned(),
        });
    }
    if word == "-1" && expected.contains("\"auto\"") {
        return Some("did you mean \"auto\"?".to_owned());
    }
    if expected.starts_with("a number of ranks") && (text.is_some() || found == "a list") {
        return match word.parse::<u64>() {
            Ok(number) => Some(format!("write {number}")),
            Err(_) if word.contains(',') || found == "a list" => Some(
                "it is a number of devices, not a list of them: for a choice set CUDA_VISIBLE_DEVICES".to_owned(),
            ),
            Err(_) => None,
        };
    }
    if let Some(precision) = precision(&word).filter(|word| expected.contains(*word)) {
        return Some(format!("did you mean {precision}?"));
    }
    if word == "-1" && optional && is_number {
        return Some("for no limit leave the key out".to_owned());
    }
    if expected.contains("a fraction")
        && let Some(percent) = word.strip_suffix('%')
    {
        let percent: f64 = percent.trim().parse().ok()?;
        return (0.0..=100.0).contains(&percent).then(|| format!("write {:?}", percent / 100.0));
    }
    match expected {
        "a string" => bare.map(|_| "write it in quotes".to_owned()),
        _ if expected.starts_with("a list") => match (text, bare) {
            (Some(text), _) => {
                let items = text.trim_matches(['(', ')', '[', ']', ' ']).split(',').map(str::trim);
                let items = items.map(|item| match item.parse::<f64>() {
                    Ok(_) => item.to_owned(),
                    Err(_) => format!("{item:?}"),
                });
                Some(format!("write [{}]", items.collect::<Vec<_>>().join(", ")))
            }
            (None, bare) => bare.map(|bare| format!("write [{bare}]")),
        },
        "true or false" => match word.as_str() {
            "true" | "yes" | "on" | "1" | "y" => Some("write true".to_owned()),
            "false" | "no" | "off" | "0" | "n" => Some("write false".to_owned()),
            _ => None,
        },
        _ if is_number => {
            // In some languages a comma is the decimal point.
            let has_thousands = word.split(',').skip(1).all(|group| group.len() == 3);
            let plain = if has_thousands { word.replace(['_', ','], "") } else { word };
            let number = plain.parse::<f64>().ok().filter(|number| number.is_finite())?;
            let whole = number.fract() == 0.0 && (0.0..1e15).contains(&number);
            match expected.starts_with("an integer") {
                true if whole => Some(format!("write {number}")),
                true => None,
                false => Some(format!("write {number:?}")),
            }
        }
        _ => None,
    }
}

/// Returns Fulgurite's precision, in quotes, for another library's word.
fn precision(word: &str) -> Option<&'static str> {
    Some(match word {
        "fp16" | "half" | "float16" | "f16" | "mixed" | "fp16-mixed" | "16-bit" | "amp" => {
            "\"16-mixed\""
        }
        "bfloat16" | "bfloat16-mixed" => "\"bf16-mixed\"",
        "fp32" | "float32" | "f32" | "float" | "full" | "no" => "\"32-true\"",
        "fp64" | "float64" | "f64" | "double" => "\"64-true\"",
        "fp16-true" => "\"16-true\"",
        _ => return None,
    })
}

/// Returns the path of the wrong key or value.
pub(crate) fn error_path(path: &[PathSegment], problem: &Problem) -> Vec<PathSegment> {
    let mut full = path.to_vec();
    if let Problem::UnknownKey { key: Some(key), .. } = problem {
        full.push(PathSegment::Key(key.clone()));
    }
    full
}

/// Formats a path: `trainer.loggers[0].dir`.
pub(crate) fn format_path(path: &[PathSegment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            PathSegment::Index(index) => text += &format!("[{index}]"),
            PathSegment::Key(key) => {
                if !text.is_empty() {
                    text.push('.');
                }
                let bare = !key.is_empty()
                    && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                if bare {
                    text += key;
                } else {
                    text += &format!("{key:?}");
                }
            }
        }
    }
    text
}

/// Lists words in quotes, for messages: `"a", "b" or "c"`.
pub(crate) fn one_of_words(words: &[&str]) -> String {
    one_of(&words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>())
}

pub(crate) fn one_of(words: &[String]) -> String {
    match words {
        [] => "nothing".to_owned(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Returns the words in backticks.
fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Translates serde's name of an expected type into TOML's terms.
fn describe_expected(expected: &str) -> String {
    if let Some(length) = expected.strip_prefix("a tuple of size ") {
        return format!("a list of {length}");
    }
    let ours = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "an integer, at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "an integer",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a table",
        "path string" => "a string",
        other if other.starts_with("struct ") => "a table",
        other if other.starts_with("dyn ") => "a table with a `type`",
        other => other,
    };
    ours.to_owned()
}

/// Translates serde's description of a found value into TOML's terms.
fn describe_found(found: &str) -> String {
    match found {
        "map" => return "a table".to_owned(),
        "sequence" => return "a list".to_owned(),
        _ => {}
    }
    if let Some(text) = found.strip_prefix("string ") {
        return format!("the string {text}");
    }
    let scalars = ["integer ", "floating point ", "boolean "];
    let bare = scalars.iter().find_map(|kind| found.strip_prefix(kind));
    bare.unwrap_or(found).to_owned()
}

/// Inverts [`format_path`], for paths without quoted keys.
pub(crate) fn parse_path(text: &str) -> Vec<PathSegment> {
    let mut path = Vec::new();
    for part in text.split('.').filter(|part| !part.is_empty()) {
        let mut pieces = part.split('[');
        path.extend(pieces.next().map(|key| PathSegment::Key(key.to_owned())));
        let indices = pieces.filter_map(|piece| piece.strip_suffix(']')?.parse().ok());
        path.extend(indices.map(PathSegment::Index));
    }
    path
}
