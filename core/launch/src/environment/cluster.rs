//! The traits of a cluster environment.

use std::fmt::Debug;

use super::Variables;
use crate::{Error, Result};

/// This process's place in its job. Nothing here communicates.
pub trait ClusterEnvironment: Debug + Send + Sync {
    /// The `type` tag of the [`EnvironmentConfig`] that built it.
    fn name(&self) -> &'static str;

    /// Whether someone else starts all processes of the job. If not, this process is alone and the
    /// launcher starts the other ranks.
    fn creates_processes_externally(&self) -> bool;

    /// Number of processes of the job, at least 1.
    fn world_size(&self) -> usize;

    /// This process's rank, below [`world_size`](Self::world_size).
    fn global_rank(&self) -> usize;

    /// This process's place among those of its node.
    fn local_rank(&self) -> usize;

    /// Number of the job's processes on this node.
    fn local_world_size(&self) -> usize;

    /// This node's place among the job's nodes.
    fn node_rank(&self) -> usize;

    /// Host name or address of rank 0, which hosts the store.
    fn main_address(&self) -> String;

    /// The TCP port of rank 0's store. It must be free on that host.
    fn main_port(&self) -> u16;

    /// What tells this job from others: the same on all its ranks, different for another job that
    /// might meet it on the same port, as far as the launcher lets one know.
    fn job_id(&self) -> String;

    /// Checks that the configured `devices` (ranks a node) and `num_nodes` are what was started.
    ///
    /// # Errors
    /// [`Error::Launch`], with both numbers.
    fn validate_settings(&self, devices: usize, num_nodes: usize) -> Result<()> {
        let (asked, started) = (devices * num_nodes, self.world_size());
        if asked == started {
            return Ok(());
        }
        Err(Error::Launch(format!(
            "trainer.devices = {devices} and trainer.num_nodes = {num_nodes} make {asked} ranks, \
             but the `{}` environment started {started}. Change the configuration or the number \
             of processes that are started",
            self.name()
        )))
    }
}

/// Recognises and reads one launcher's variables: `trainer.environment = "torchelastic"`.
///
/// Registered with `#[typetag::serde(name = "…")]` and
/// [`register_environment!`](fulgurite_config::register_environment). It must deserialise from its `type` tag
/// alone, since that is how [`detect`](super::detect()) makes the candidates.
#[typetag::serde(tag = "type")]
pub trait EnvironmentConfig: Debug + Send + Sync {
    /// Candidates are asked in descending order. 0 is in the middle; a fallback that always answers
    /// is far below.
    fn priority(&self) -> i32 {
        0
    }

    /// Whether these variables are this launcher's. Partly set ones should count, so that
    /// [`build`](Self::build) can say what is missing instead of a job running as many single ones.
    fn detect(&self, variables: &Variables) -> bool;

    /// Reads the variables.
    ///
    /// # Errors
    /// [`Error::Launch`], naming the variable that is missing, malformed or out of range.
    fn build(&self, variables: &Variables) -> Result<Box<dyn ClusterEnvironment>>;
}

fulgurite_config::plugin_kind!(
    dyn EnvironmentConfig,
    crate::registry::kind::ENVIRONMENT,
    "trainer.environment"
);
