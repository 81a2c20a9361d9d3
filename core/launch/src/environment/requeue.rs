//! [`Requeue`].

use crate::Interruption;

/// The command that requeues a job in its scheduler, returned by
/// [`ClusterEnvironment::requeue`](super::ClusterEnvironment::requeue).
///
/// If the ranks save and end because of [`on`](Self::on), rank 0 runs the command after the others
/// have ended. All ranks exit with 0, because the job is not over. If the command fails, rank 0
/// reports it and exits with 128 + the signal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requeue {
    /// The interruption after which the job is requeued.
    pub on: Interruption,
    /// The program that requeues the job, looked up in `PATH`.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
}
