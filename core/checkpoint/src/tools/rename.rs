//! Renaming parameters by prefix.

use std::str::FromStr;

use crate::{Error, Result};

/// Rules that replace prefixes of parameters' names; the first matching rule applies.
///
/// ```
/// use fulgurite_core::checkpoint::tools::Rename;
/// let rename = Rename::default().with("model.", "").with("", "base.");
/// assert_eq!(rename.apply("model.norm.weight"), "norm.weight");
/// assert_eq!(rename.apply("lm_head.weight"), "base.lm_head.weight");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rename {
    rules: Vec<(String, String)>,
}

impl Rename {
    /// Adds a rule: replaces the prefix `from` by `to`.
    #[must_use]
    pub fn with(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.rules.push((from.into(), to.into()));
        self
    }

    /// Returns the new name of `fqn`.
    pub fn apply(&self, fqn: &str) -> String {
        let renamed = self.rules.iter().find_map(|(from, to)| {
            fqn.strip_prefix(from.as_str()).map(|rest| format!("{to}{rest}"))
        });
        renamed.unwrap_or_else(|| fqn.to_owned())
    }

    /// Returns the new name of the optimizer state tensor of this
    /// [key](super::super::optimizer_key).
    pub(super) fn apply_to_key(&self, key: &str) -> String {
        match key.strip_prefix("state.") {
            Some(rest) => format!("state.{}", self.apply(rest)),
            None => key.to_owned(),
        }
    }
}

impl FromIterator<(String, String)> for Rename {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(rules: I) -> Self {
        Self { rules: rules.into_iter().collect() }
    }
}

impl FromStr for Rename {
    type Err = Error;

    /// One rule, `FROM=TO`.
    fn from_str(rule: &str) -> Result<Self> {
        match rule.split_once('=') {
            Some((from, to)) => Ok(Self::default().with(from, to)),
            None => Err(Error::other(format!(
                "`{rule}` is no rule: expected FROM=TO, such as `model.=` or `=model.`"
            ))),
        }
    }
}

impl Extend<Rename> for Rename {
    fn extend<I: IntoIterator<Item = Rename>>(&mut self, others: I) {
        self.rules.extend(others.into_iter().flat_map(|other| other.rules));
    }
}
