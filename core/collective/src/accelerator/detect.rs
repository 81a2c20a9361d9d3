//! Detection of the best accelerator.

use super::{AcceleratorConfig, Available};
use crate::{Error, Result};
use fulgurite_config::registry::{self, kind};

/// The linked plugin of highest priority that has a device on this machine.
///
/// # Errors
/// If two plugins share a name, one cannot be made from its name alone, or no plugin has a device.
pub fn detect() -> Result<Box<dyn AcceleratorConfig>> {
    registry::validate()?;
    let mut found: Option<Box<dyn AcceleratorConfig>> = None;
    for name in registry::names(kind::ACCELERATOR) {
        let candidate = by_name(name)?;
        let Some(priority) = candidate.priority().filter(|_| candidate.is_built()) else {
            continue;
        };
        let better = found.as_ref().is_none_or(|best| best.priority() < Some(priority));
        let is_there = || match candidate.available() {
            Ok(Available::Devices(devices)) => !devices.is_empty(),
            Ok(Available::Host) => true,
            Err(why) => {
                tracing::debug!("accelerator {name}: {why}");
                false
            }
        };
        if better && is_there() {
            found = Some(candidate);
        }
    }
    found.ok_or_else(|| {
        Error::Config(
            "`trainer.accelerator`: no linked plugin has a device on this machine".to_owned(),
        )
    })
}

fn by_name(name: &str) -> Result<Box<dyn AcceleratorConfig>> {
    serde_json::from_value(serde_json::json!({ "type": name })).map_err(|e| {
        Error::Config(format!(
            "accelerator `{name}` cannot be made from its name alone: {e}. Its options need defaults \
             (`#[serde(default)]`)"
        ))
    })
}
