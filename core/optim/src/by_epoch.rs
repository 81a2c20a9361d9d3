//! Schedules that count epochs.
//!
//! ```
//! use fulgurite_core::optim::{ByEpoch, Interval, SchedulerConfig, Step};
//!
//! let every_epoch = Step { step_size: 1, gamma: 0.5, ..Step::default() };
//! let schedule = ByEpoch { schedule: Box::new(every_epoch) };
//! assert_eq!(schedule.interval(), Interval::Epoch);
//! assert_eq!(schedule.factor(3, None)?, 0.125); // in the fourth epoch
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

use serde::{Deserialize, Serialize};

use super::optimizer::{Interval, SchedulerConfig};
use crate::{Error, Result};

/// Another schedule, in epochs instead of steps. The rate changes only between epochs:
/// `scheduler = { type = "by_epoch", schedule = { type = "step", step_size = 1, gamma = 0.5 } }`.
/// As a schedule with `interval: "epoch"` in PyTorch Lightning. The run's length is in epochs too.
#[derive(Debug, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields)]
pub struct ByEpoch {
    /// The schedule. Each `step` in its options means an epoch.
    pub schedule: Box<dyn SchedulerConfig>,
}

#[typetag::serde(name = "by_epoch")]
impl SchedulerConfig for ByEpoch {
    fn factor(&self, epoch: u64, max_epochs: Option<u64>) -> Result<f64> {
        if self.schedule.interval() == Interval::Epoch {
            return Err(Error::Config(
                "scheduler.schedule is by epoch itself; take its own `schedule`".to_owned(),
            ));
        }
        self.schedule.factor(epoch, max_epochs)
    }

    fn interval(&self) -> Interval {
        Interval::Epoch
    }
}

fulgurite_config::register_scheduler!(
    "by_epoch",
    ByEpoch,
    "Another schedule, whose steps are epochs",
    "{ type = \"by_epoch\", schedule = { type = \"step\", step_size = 1, gamma = 0.5 } }"
);
