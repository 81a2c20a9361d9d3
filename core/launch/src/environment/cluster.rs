//! The traits [`ClusterEnvironment`] and [`EnvironmentConfig`].

use std::fmt::Debug;

use super::{Requeue, Variables};
use crate::{Error, Result};

/// This process's rank in its job. No method communicates.
pub trait ClusterEnvironment: Debug + Send + Sync {
    /// The `type` tag of the [`EnvironmentConfig`] that built it.
    fn name(&self) -> &'static str;

    /// Whether all processes of the job are started from outside (`torchrun`, `srun`). If not, this
    /// process is alone and [`launch`](crate::launch()) starts the other ranks.
    fn creates_processes_externally(&self) -> bool;

    /// Number of processes of the job, at least 1.
    fn world_size(&self) -> usize;

    /// This process's rank, below [`world_size`](Self::world_size).
    fn global_rank(&self) -> usize;

    /// This process's rank on its node.
    fn local_rank(&self) -> usize;

    /// Number of the job's processes on this node.
    fn local_world_size(&self) -> usize;

    /// This node's rank among the job's nodes.
    fn node_rank(&self) -> usize;

    /// Host name or address of rank 0, which hosts the store.
    fn main_address(&self) -> String;

    /// The TCP port of rank 0's store. It must be free on that host.
    fn main_port(&self) -> u16;

    /// The job's id: equal on all its ranks and, as far as the launcher's variables allow,
    /// different for jobs that may use the same port.
    fn job_id(&self) -> String;

    /// Number of times that the launcher or the scheduler has restarted this job: 0, the default,
    /// in its first attempt. Equal on all ranks. A restarted training resumes from the last
    /// checkpoint that the job has saved, unless its configuration names one.
    fn restart_count(&self) -> u64 {
        0
    }

    /// An id that all attempts of this job share, and no other job: rank 0 marks the job's runs
    /// with it. Used on rank 0 only. The default is the job's id.
    fn restart_id(&self) -> String {
        self.job_id()
    }

    /// The command that requeues the job when its ranks are about to lose the machine. By default
    /// the job is not requeued.
    fn requeue(&self) -> Option<Requeue> {
        None
    }

    /// Checks that `devices * num_nodes` ranks were started; `devices` is the number of ranks per
    /// node.
    ///
    /// # Errors
    /// [`Error::Launch`], with both numbers.
    fn validate_settings(&self, devices: usize, num_nodes: usize) -> Result<()> {
        let (configured, started) = (devices.saturating_mul(num_nodes), self.world_size());
        if configured == started {
            return Ok(());
        }
        Err(Error::Launch(format!(
            "trainer.devices = {devices} and trainer.num_nodes = {num_nodes} make {configured} ranks, \
             but the `{}` environment started {started}. Change the configuration or the number \
             of processes that are started",
            self.name()
        )))
    }
}

/// Recognises and reads one launcher's variables: `trainer.environment = "torchelastic"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_environment!`](fulgurite_config::register_environment). It must deserialise from its
/// `type` tag alone, because [`detect`](super::detect()) creates the candidates that way.
#[typetag::serde(tag = "type")]
pub trait EnvironmentConfig: Debug + Send + Sync {
    /// Priority among the environments that [detect](Self::detect) their variables; the highest
    /// wins. A fallback for any variables has a negative priority.
    fn priority(&self) -> i32 {
        0
    }

    /// Returns whether these variables belong to this launcher. A subset should suffice: then
    /// [`build`](Self::build) can name the missing variables, instead of each process training
    /// alone.
    fn detect(&self, variables: &Variables) -> bool;

    /// Reads the variables.
    ///
    /// # Errors
    /// [`Error::Launch`], naming the variable that is missing, malformed or out of range.
    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>>;
}

fulgurite_config::plugin_kind!(
    dyn EnvironmentConfig,
    fulgurite_config::registry::kind::ENVIRONMENT,
    "trainer.environment"
);

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    /// One of two ranks started by a launcher.
    #[derive(Debug)]
    struct Started;

    impl ClusterEnvironment for Started {
        fn name(&self) -> &'static str {
            "started"
        }
        fn creates_processes_externally(&self) -> bool {
            true
        }
        fn world_size(&self) -> usize {
            2
        }
        fn global_rank(&self) -> usize {
            0
        }
        fn local_rank(&self) -> usize {
            0
        }
        fn local_world_size(&self) -> usize {
            2
        }
        fn node_rank(&self) -> usize {
            0
        }
        fn main_address(&self) -> String {
            "127.0.0.1".to_owned()
        }
        fn main_port(&self) -> u16 {
            29500
        }
        fn job_id(&self) -> String {
            "job".to_owned()
        }
    }

    #[test]
    fn overflowing_rank_counts_are_refused() {
        Started.validate_settings(1, 2).unwrap();
        assert_says!(
            Started.validate_settings(3, 1).unwrap_err(),
            "launch: trainer.devices = 3 and trainer.num_nodes = 1 … `started` … started 2 …"
        );
        // With wrapping arithmetic this would be 2.
        assert!(Started.validate_settings((1 << 63) + 1, 2).is_err());
    }
}
