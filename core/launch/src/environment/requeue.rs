//! [`Requeue`].

use crate::Interruption;

/// How a job is put back into its scheduler's queue, once its ranks were told that they lose the machine and
/// have saved: what [`ClusterEnvironment::requeue`](super::ClusterEnvironment::requeue) answers.
///
/// If the ranks end because of [`on`](Self::on), rank 0 runs the command when the others have ended, and all exit
/// with 0, for the job is not over. If the command fails, rank 0 says so and exits as without it, with 128 + the
/// signal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requeue {
    /// The interruption after which the job is put back.
    pub on: Interruption,
    /// The program that does it, looked up in `PATH`.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
}
