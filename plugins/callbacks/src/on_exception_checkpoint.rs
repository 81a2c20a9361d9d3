//! Saves a checkpoint when a run fails.

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{
    Callback, CallbackConfig, HookContext, Hooks, SaveRequest, Stage,
};
use serde::{Deserialize, Serialize};

/// Saves a checkpoint of the last complete step when an error ends the training:
/// `{ type = "on_exception_checkpoint", filename = "on_exception" }`. A run can resume from it as
/// from any other. Like Lightning's `OnExceptionCheckpoint`, but only for runs on one rank: saving
/// is collective, and impossible after one rank has failed.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct OnExceptionCheckpointConfig {
    /// The checkpoint's name in the run's checkpoint directory.
    #[default("on_exception".to_owned())]
    pub filename: String,
}

#[typetag::serde(name = "on_exception_checkpoint")]
impl CallbackConfig for OnExceptionCheckpointConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        let name = &self.filename;
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\']) || name == "last"
        {
            return Err(Error::Config(format!(
                "`trainer.callbacks`, on_exception_checkpoint: `filename`: must be the name of a checkpoint in \
                 `checkpoint.dir`, such as \"on_exception\", found \"{name}\""
            )));
        }
        Ok(Box::new(OnExceptionCheckpoint(name.clone())))
    }
}

fulgurite_config::register_callback!(
    "on_exception_checkpoint",
    OnExceptionCheckpointConfig,
    "Saves a checkpoint when an error ends a training on one rank",
    "{ type = \"on_exception_checkpoint\", filename = \"on_exception\" }"
);

struct OnExceptionCheckpoint(String);

impl Callback for OnExceptionCheckpoint {}

impl Hooks for OnExceptionCheckpoint {
    fn setup(&mut self, ctx: &mut HookContext) -> Result<()> {
        if ctx.stage != Stage::Fit {
            return Ok(());
        }
        let mut request = SaveRequest::default();
        request.name = Some(self.0.clone());
        ctx.save_on_exception(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_checkpoint_names() {
        for name in ["", "a/b", "..", "last"] {
            let config = OnExceptionCheckpointConfig { filename: name.to_owned() };
            assert!(config.build().is_err(), "{name}");
        }
        OnExceptionCheckpointConfig::default().build().unwrap();
    }
}
