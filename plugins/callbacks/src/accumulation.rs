//! Gradient accumulation that changes at given epochs.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use fulgurite_error::{Error, Result};
use fulgurite_trainer::trainer::{Callback, CallbackConfig, Hooks};
use serde::{Deserialize, Serialize};

/// Changes `trainer.accumulate_grad_batches` from given epochs on, counted from 0:
/// `{ type = "gradient_accumulation_scheduler", scheduling = { 4 = 8 } }` takes eight micro-batches
/// a step from the fifth epoch on. Like Lightning's `GradientAccumulationScheduler`.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields)]
pub struct GradientAccumulationScheduler {
    /// Micro-batches per step, by the first epoch with that number.
    scheduling: BTreeMap<String, NonZeroU64>,
}

impl GradientAccumulationScheduler {
    /// Parses the epochs.
    fn by_epoch(&self) -> Result<BTreeMap<u64, NonZeroU64>> {
        let wrong = |message: String| {
            let place = "`trainer.callbacks`, gradient_accumulation_scheduler: `scheduling`";
            Error::Config(format!("{place}: {message}"))
        };
        if self.scheduling.is_empty() {
            return Err(wrong("names no epoch; write `{ 4 = 8 }`".to_owned()));
        }
        let epochs = self.scheduling.iter().map(|(epoch, count)| {
            let number = epoch.parse().map_err(|_| wrong(format!("`{epoch}` is no epoch")))?;
            Ok((number, *count))
        });
        epochs.collect()
    }
}

#[typetag::serde(name = "gradient_accumulation_scheduler")]
impl CallbackConfig for GradientAccumulationScheduler {
    fn build(&self) -> Result<Box<dyn Callback>> {
        Ok(Box::new(Scheduled(self.by_epoch()?)))
    }
}

fulgurite_config::register_callback!(
    "gradient_accumulation_scheduler",
    GradientAccumulationScheduler,
    "Changes the number of micro-batches in a step from certain epochs on",
    "{ type = \"gradient_accumulation_scheduler\", scheduling = { 4 = 8 } }"
);

struct Scheduled(BTreeMap<u64, NonZeroU64>);

impl Callback for Scheduled {
    fn accumulate_grad_batches(&self) -> BTreeMap<u64, NonZeroU64> {
        self.0.clone()
    }
}

impl Hooks for Scheduled {}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn epochs_are_numbers() {
        let error = |json: serde_json::Value| {
            let config: GradientAccumulationScheduler = serde_json::from_value(json).unwrap();
            config.build().err().unwrap().to_string()
        };
        assert_says!(
            error(serde_json::json!({ "scheduling": { "two": 2 } })),
            "`trainer.callbacks` … `scheduling`: `two` is no epoch"
        );
        assert_says!(
            error(serde_json::json!({ "scheduling": {} })),
            "`trainer.callbacks`, gradient_accumulation_scheduler: `scheduling`: names no epoch …"
        );
    }
}
