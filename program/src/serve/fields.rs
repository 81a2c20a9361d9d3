//! [`Fields`].

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields that change no answer.
const HARMLESS: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
];

/// The fields of a request that were not read yet. A field that is null is absent.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Parses the body of a request.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let invalid = |what: String| ApiError::request(400, "invalid_json", what);
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(invalid("the body must be an object of JSON".to_owned())),
            Err(error) => Err(invalid(format!("the body is not JSON: {error}"))),
        }
    }

    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Reads a whole number.
    pub(super) fn count(
        &mut self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        match count.filter(|count| range.contains(count)) {
            Some(count) => Ok(Some(count)),
            None => Err(wrong(
                name,
                &format!("a whole number from {} to {}", range.start(), range.end()),
                &value,
            )),
        }
    }

    pub(super) fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        value.as_u64().map(Some).ok_or_else(|| wrong(name, "a whole number of at least 0", &value))
    }

    pub(super) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        value.as_f64().map(Some).ok_or_else(|| wrong(name, "a number", &value))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(value) => Err(wrong(name, "true or false", &value)),
        }
    }

    /// Reads a text or a list of texts, none of them empty.
    pub(super) fn texts(&mut self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let expected = || format!("a text or a list of at most {most} texts, none of them empty");
        let Some(value) = self.take(name) else {
            return Ok(Vec::new());
        };
        let texts: Option<Vec<String>> = match &value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => {
                list.iter().map(|text| text.as_str().map(str::to_owned)).collect()
            }
            _ => None,
        };
        let texts = texts.filter(|list| list.len() <= most && !list.iter().any(String::is_empty));
        texts.ok_or_else(|| wrong(name, &expected(), &value))
    }

    /// Reads a field that is not supported, unless it has the value without an effect.
    pub(super) fn unsupported(
        &mut self,
        name: &str,
        without_effect: &Value,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if value != *without_effect && value.as_f64() != Some(0.0) => {
                Err(ApiError::field(
                    name,
                    format!("`{name}` is not supported; leave it out, or set {without_effect}"),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks that no field is left.
    pub(super) fn finish(mut self) -> Result<(), ApiError> {
        HARMLESS.iter().for_each(|name| drop(self.take(name)));
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                Err(ApiError::field(name, format!("`{name}` is not supported; leave it out")))
            }
        }
    }
}

/// A field with a wrong value.
pub(super) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let mut found = found.to_string();
    if let Some((at, _)) = found.char_indices().nth(60) {
        found.truncate(at);
        found.push('…');
    }
    ApiError::field(name, format!("`{name}`: must be {expected}, found {found}"))
}
