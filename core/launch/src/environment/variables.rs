//! Environment variables as a value.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::{Error, Result};

/// A snapshot of environment variables, passed as an argument so that code that reads them can be
/// tested.
#[derive(Debug, Clone, Default)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// This process's variables. Bytes that are not UTF-8 are replaced.
    pub fn current() -> Self {
        let lossy = |s: std::ffi::OsString| s.to_string_lossy().into_owned();
        Self(std::env::vars_os().map(|(name, value)| (lossy(name), lossy(value))).collect())
    }

    /// The value of `name`, if it is set.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Whether `name` is set, possibly to an empty value.
    pub fn is_set(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Parses the value of `name`, if it is set. `what` describes the expected value in messages:
    /// `this process's rank, a number`.
    ///
    /// # Errors
    /// [`Error::Launch`] naming the variable, if it is set and does not parse.
    pub fn parse<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(value) => Ok(Some(value)),
            Err(_) => Err(Error::Launch(format!(
                "the environment variable {name} is `{value}`, but should be {what}"
            ))),
        }
    }

    /// Like [`parse`](Self::parse), for a required variable.
    ///
    /// # Errors
    /// Also if it is not set.
    pub fn require<T: FromStr>(&self, name: &str, what: &str) -> Result<T> {
        self.parse(name, what)?.ok_or_else(|| {
            Error::Launch(format!(
                "the environment variable {name} ({what}) is not set, but others of its family \
                 are. Set it, or unset them all to run without a launcher"
            ))
        })
    }
}

impl<const N: usize> From<[(&str, &str); N]> for Variables {
    fn from(pairs: [(&str, &str); N]) -> Self {
        pairs.into_iter().collect()
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for Variables {
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a str)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn messages_name_the_variable() {
        let variables = Variables::from([("RANK", "one"), ("SIZE", " 4 ")]);
        assert_eq!(variables.require::<usize>("SIZE", "a number").unwrap(), 4);
        assert_eq!(variables.parse::<usize>("ABSENT", "a number").unwrap(), None);
        assert_says!(
            variables.parse::<usize>("RANK", "this process's rank, a number").unwrap_err(),
            "launch: the environment variable RANK is `one` … a number"
        );
        assert_says!(
            variables.require::<usize>("ABSENT", "a number").unwrap_err(),
            "launch: the environment variable ABSENT (a number) is not set … unset them all …"
        );
    }
}
