//! `[trainer.elastic]`.

use serde::{Deserialize, Serialize};

use super::trainer_config::config_error;
use crate::Result;
use fulgurite_config::ConfigType;

/// Whether a training goes on that has lost a rank: the table `[trainer.elastic]`. A rank is
/// lost if its process is killed, or is stopped while others run. For ranks that the program
/// starts itself, on one host, and for those of `fulgurite run` on one host or several.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, fulgurite_config::Documented)]
#[serde(deny_unknown_fields, default)]
pub struct ElasticConfig {
    /// Whether the other ranks go on, without a restart: they take the step in which the rank
    /// was lost again, with the same samples. Otherwise the loss of a rank ends the run.
    pub enabled: bool,
    /// Fewest ranks with which the training goes on.
    #[default(1)]
    pub min_ranks: usize,
    /// How often a new process takes the place of the same rank. After that the other ranks
    /// divide its samples among them.
    #[default(3)]
    pub max_restarts: u64,
    /// Number of copies of shards that only one rank has: `0` or `1`. A copy is in the memory
    /// of the rank's host, and in a job of several hosts also in the memory of the next host.
    /// Without copies, a run that has lost such shards goes on from its last checkpoint.
    /// Replicas (`ddp`, and `fsdp` with `data_parallel_replicate_size`) need none.
    pub replicas: usize,
    /// The interval of these copies, in optimizer steps. The steps since the last copy are
    /// taken again.
    #[default(1)]
    pub replicate_every_n_steps: u64,
    /// Number of seconds that ranks wait for each other after a loss; by default
    /// `trainer.timeout_secs`. Ranks that have not come then are lost too.
    pub join_timeout_secs: Option<u64>,
    /// Whether a rank that `trainer.slow_rank_factor` names is replaced by a new process, or
    /// after `max_restarts` of them left out.
    pub replace_slow_ranks: bool,
}

impl ElasticConfig {
    /// Checks ranges.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) that names the key.
    pub(crate) fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("min_ranks", self.min_ranks as u64),
            ("replicate_every_n_steps", self.replicate_every_n_steps),
            ("join_timeout_secs", self.join_timeout_secs.unwrap_or(1)),
        ];
        for (key, value) in at_least_one {
            if value == 0 {
                return config_error(&format!("elastic.{key}"), "must be at least 1, found 0");
            }
        }
        if self.replicas > 1 {
            return config_error(
                "elastic.replicas",
                format!("must be 0 or 1, found {}: one host has one memory", self.replicas),
            );
        }
        Ok(())
    }
}

impl ConfigType for ElasticConfig {
    fn describe() -> String {
        "table".to_owned()
    }
}
