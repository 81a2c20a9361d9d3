//! Detects the environment among the linked plugins.

use super::{EnvironmentConfig, Variables};
use crate::{Error, Result};
use fulgurite_config::registry::{self, kind};

/// Returns the linked plugin with the highest priority (then the first by name) that recognises
/// these variables; `None` if there is none.
///
/// # Errors
/// If two plugins share a name, or one cannot be created from its name alone.
pub fn detect(variables: &Variables) -> Result<Option<Box<dyn EnvironmentConfig>>> {
    registry::validate()?;
    let mut found: Option<Box<dyn EnvironmentConfig>> = None;
    for name in registry::names(kind::ENVIRONMENT) {
        let candidate = by_name(name)?;
        let better = found.as_ref().is_none_or(|best| candidate.priority() > best.priority());
        if better && candidate.detect(variables) {
            found = Some(candidate);
        }
    }
    Ok(found)
}

/// Returns the environment plugin called `name`, with its default options.
///
/// # Errors
/// [`Error::UnknownPlugin`], or [`Error::Config`] if the plugin has options without a default.
pub fn by_name(name: &str) -> Result<Box<dyn EnvironmentConfig>> {
    registry::require(kind::ENVIRONMENT, name)?;
    serde_json::from_value(serde_json::json!({ "type": name })).map_err(|e| {
        Error::Config(format!(
            "environment `{name}` cannot be made from its name alone: {e}. Its options need \
             defaults (`#[serde(default)]`)"
        ))
    })
}
