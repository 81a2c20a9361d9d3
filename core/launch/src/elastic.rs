//! Jobs that go on after they have lost a rank, as generations.
//!
//! In generation 0 the supervisor starts all ranks. When one is lost, the supervisor begins the
//! next generation: it hosts a new store, with another key, for the ranks that are left and for the
//! processes that replace lost ones. The old store's failure is the invitation to the new one. So
//! no message of one generation can reach another.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::launcher::client_options;
use super::rank::{LaunchedRank, Membership, RankInfo, membership};
use super::rank_env::RankEnv;
use super::signals::Starting;
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_store::{ClientIdentity, StoreHost, TcpStore};

/// How a job goes on after it has lost a rank.
///
/// A rank is lost if a signal has ended its process, or if the process is stopped and does not run
/// on. A rank that reports an error of its own is not: the error would come again.
#[derive(Clone)]
pub struct Elastic {
    /// Fewest ranks with which the job goes on.
    pub min_ranks: usize,
    /// How often a new process takes the place of the same rank. After that the job goes on without
    /// the rank.
    pub max_restarts: u64,
    /// How long a generation waits for its ranks. A rank that has not come until then is lost.
    pub join_timeout: Duration,
    /// Returns whether the job can have this number of ranks.
    pub fits: Arc<dyn Fn(usize) -> bool>,
}

impl std::fmt::Debug for Elastic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Elastic")
            .field("min_ranks", &self.min_ranks)
            .field("max_restarts", &self.max_restarts)
            .field("join_timeout", &self.join_timeout)
            .finish_non_exhaustive()
    }
}

/// The supervisor's message to the ranks of a generation that is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Invitation {
    /// The number of the next generation.
    pub(super) generation: u64,
    /// The port of its store.
    pub(super) port: u16,
    /// For each of its ranks the rank in the generation before; `None` for a new process.
    pub(super) members: Vec<Option<usize>>,
}

/// Time to connect to the next store, which listens already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// The supervisor alone decides which ranks have not come in time.
pub(super) const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// Begins an invitation in the message of a failure.
const MARK: &str = "\nnext generation: ";

impl Invitation {
    /// The failure that ends a generation, and invites to the next.
    pub(super) fn message(&self, reason: &str) -> String {
        let invitation = serde_json::to_string(self).expect("numbers in lists are JSON");
        format!("it {reason}{MARK}{invitation}")
    }

    /// Returns the invitation in a failure's message, if there is one.
    pub(super) fn read(message: &str) -> Option<Self> {
        let (_, invitation) = message.rsplit_once(MARK)?;
        serde_json::from_str(invitation).ok()
    }
}

/// Returns a failure's message without its invitation.
pub(super) fn reason(message: &str) -> &str {
    message.rsplit_once(MARK).map_or(message, |(reason, _)| reason)
}

/// Returns the number of this process's generation; 0 in a job that has lost no rank.
pub fn generation() -> u64 {
    membership().map_or(0, |membership| membership.generation)
}

/// Returns the number of ranks of the job's first generation; `None` in a job of one process.
pub fn first_world_size() -> Option<usize> {
    membership().map(|membership| membership.first_world_size)
}

/// Joins the next generation of this process's job, if its supervisor has begun one.
///
/// Call it after an error of a collective. It waits up to `within` for the reason of the error, and
/// then for all ranks. The supervisor ends those that do not come. Every
/// [`LaunchedRank`] of the generation before stays valid, but its store is closed.
///
/// Returns `None` if there is no next generation: the job has another failure, or none.
///
/// # Errors
/// If this process has no place in the next generation; [`Error::Interrupted`] if it is asked to end
/// meanwhile.
pub fn join_next_generation(within: Duration) -> Result<Option<LaunchedRank>> {
    let Some(mut before) = membership() else { return Ok(None) };
    let _starting = Starting::new();
    loop {
        let Some((lost, message)) = before.client.wait_for_failure(within) else {
            return Ok(None);
        };
        let Some(invitation) = Invitation::read(&message) else { return Ok(None) };
        let own = invitation.members.iter().position(|&old| old == Some(before.info.rank));
        let Some(rank) = own else {
            let message = reason(&message).to_owned();
            return Err(Error::PeerFailed { rank: lost, message });
        };
        let joined = join(before, &invitation, rank)?;
        joined.end_on_panic();
        match joined.client.wait_for_all(UNLIMITED) {
            Ok(()) => return Ok(Some(joined.launched())),
            // Another rank was lost meanwhile.
            Err(Error::PeerFailed { .. }) => before = joined,
            Err(error) => return Err(error),
        }
    }
}

/// Connects to the store of the next generation.
fn join(before: &Membership, invitation: &Invitation, rank: usize) -> Result<&'static Membership> {
    let world_size = invitation.members.len();
    let info =
        RankInfo { rank, world_size, local_rank: rank, local_world_size: world_size, node_rank: 0 };
    let Some(env) = RankEnv::read(&Variables::current())? else {
        return Err(Error::Launch("only a supervisor begins another generation".to_owned()));
    };
    let env = RankEnv { generation: invitation.generation, info, port: invitation.port, ..env };
    let identity = ClientIdentity { key: env.key(), rank, world_size };
    let options = client_options(StoreHost::Supervisor);
    let client = TcpStore::connect_with("127.0.0.1", env.port, identity, CONNECT_TIMEOUT, options)?;
    let membership = Membership {
        info,
        generation: invitation.generation,
        first_world_size: before.first_world_size,
        address: None,
        client: Arc::new(client),
        server: None,
        supervisor: before.supervisor,
        environment: before.environment,
        started: before.started,
        presence: Mutex::new(Weak::new()),
    };
    Ok(membership.enter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitation_is_read_from_its_failure() {
        let invitation =
            Invitation { generation: 2, port: 4711, members: vec![Some(0), None, Some(3)] };
        let message = invitation.message("was killed by signal 9 (SIGKILL)");
        assert_eq!(Invitation::read(&message), Some(invitation));
        assert_eq!(reason(&message), "it was killed by signal 9 (SIGKILL)");
    }

    #[test]
    fn other_failures_invite_nobody() {
        let message = "it ran out of memory";
        assert_eq!(Invitation::read(message), None);
        assert_eq!(reason(message), message);
    }
}
