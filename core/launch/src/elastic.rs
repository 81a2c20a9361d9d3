//! Jobs that go on after they have lost a rank, as generations.
//!
//! In generation 0 the supervisor starts all ranks. When one is lost, the supervisor begins the
//! next generation: it hosts a new store, with another key, for the ranks that are left and for the
//! processes that replace lost ones. The old store's failure is the invitation to the new one. So
//! no message of one generation can reach another.
//!
//! On several hosts, agents take the supervisor's place (`link`).

use std::collections::HashSet;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::link::{Link, Place};
use super::rank::{LaunchedRank, Membership, RankInfo, membership};
use super::signals::Starting;
use crate::{Error, Result};
use fulgurite_store::{Store as _, TcpStore};

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

/// The message to the ranks of a generation that is over, from their supervisor or agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Invitation {
    /// The number of the next generation.
    pub(super) generation: u64,
    /// The address of its store.
    pub(super) store: (String, u16),
    /// Under an agent, the number of its attempt, and the port of this host's own store.
    pub(super) agent: Option<(u64, u16)>,
    /// Number of its ranks on each node.
    pub(super) nodes: Vec<usize>,
    /// Its ranks that are new processes. Few, as those below: a message has a limited length.
    pub(super) new: Vec<usize>,
    /// Ranks of the generation before that are left out. The others keep their order.
    pub(super) left_out: Vec<usize>,
}

/// Time to connect to the next store, which listens already.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time to connect before the agent is asked whether the store is lost.
const CONNECT_SLICE: Duration = Duration::from_secs(2);
/// The supervisor alone decides which ranks have not come in time.
pub(super) const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);
/// Begins an invitation in the message of a failure.
const MARK: &str = "\nnext generation: ";

impl Invitation {
    /// An invitation to ranks whose numbers before are given; `None` for new processes.
    pub(super) fn new(
        (generation, store): (u64, (String, u16)),
        nodes: Vec<usize>,
        members: &[Option<usize>],
        world_size_before: usize,
    ) -> Self {
        let new = (0..members.len()).filter(|&rank| members[rank].is_none()).collect();
        let stays: HashSet<usize> = members.iter().copied().flatten().collect();
        let left_out = (0..world_size_before).filter(|old| !stays.contains(old)).collect();
        Self { generation, store, agent: None, nodes, new, left_out }
    }

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

    /// Returns the rank that was `old` in the generation before; `None` if it is left out.
    pub(super) fn rank_of(&self, old: usize) -> Option<usize> {
        if self.left_out.contains(&old) {
            return None;
        }
        let place = old - self.left_out.iter().filter(|&&other| other < old).count();
        let world_size: usize = self.nodes.iter().sum();
        (0..world_size).filter(|rank| !self.new.contains(rank)).nth(place)
    }

    /// Returns the numbers of the rank that was `old`, as [`rank_of`](Self::rank_of).
    fn info(&self, old: usize) -> Option<RankInfo> {
        let (rank, world_size) = (self.rank_of(old)?, self.nodes.iter().sum());
        let (mut node_rank, mut first) = (0, 0);
        while rank >= first + self.nodes[node_rank] {
            first += self.nodes[node_rank];
            node_rank += 1;
        }
        let local_world_size = self.nodes[node_rank];
        Some(RankInfo { rank, world_size, local_rank: rank - first, local_world_size, node_rank })
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

/// Joins the next generation of this process's job, if its supervisor or agent has begun one.
///
/// Call it after an error of a collective. It waits up to `within` for the reason of the error;
/// under an agent, at least as long as the loss of a host takes to be noticed. Then it waits for
/// all ranks. The supervisor or agents end those that do not come. Every [`LaunchedRank`] of the
/// generation before stays valid, but its store is closed.
///
/// Returns `None` if there is no next generation: the job has another failure, or none.
///
/// # Errors
/// If this process has no place in the next generation; [`Error::Interrupted`] if it is asked to
/// end meanwhile.
pub fn join_next_generation(within: Duration) -> Result<Option<LaunchedRank>> {
    let Some(before) = membership() else { return Ok(None) };
    let Membership { link, first_world_size, environment, started, .. } = before;
    let (first_world_size, environment) = (*first_world_size, *environment);
    let origin = Origin { link, first_world_size, environment, started: *started };
    join_after(before.place(), &origin, within)
}

/// The part of a rank's membership that is the same in all generations.
pub(super) struct Origin<'a> {
    pub(super) link: &'a Link,
    pub(super) first_world_size: usize,
    pub(super) environment: &'static str,
    /// When the job started, in seconds since 1970.
    pub(super) started: f64,
}

/// Joins the generation after the one in which this rank has a place, as
/// [`join_next_generation`]. It need not have reached that one's store.
pub(super) fn join_after(
    mut place: Place,
    origin: &Origin<'_>,
    within: Duration,
) -> Result<Option<LaunchedRank>> {
    let _starting = Starting::new();
    let mut failed = None;
    loop {
        let told = place.wait_for_failure(within);
        let invited = told.and_then(|(lost, message)| {
            Some((lost, Invitation::read(&message)?, reason(&message).to_owned()))
        });
        let Some((lost, invitation, message)) = invited else {
            return failed.map_or(Ok(None), Err);
        };
        let Some(info) = invitation.info(place.rank) else {
            return Err(Error::PeerFailed { rank: lost, message });
        };
        let link = origin.link.to(&invitation, &info)?;
        let client = match connect(&link, info, CONNECT_TIMEOUT) {
            Ok(client) => Arc::new(client),
            // The host of the next store may be lost too, which the agent tells.
            Err(error @ Error::Launch(_)) if link.agent.is_some() => {
                place = Place::without_job(info.rank, &link);
                failed = Some(error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let membership = Membership {
            info,
            generation: invitation.generation,
            first_world_size: origin.first_world_size,
            address: link.address(&info),
            client,
            link,
            server: None,
            environment: origin.environment,
            started: origin.started,
            presence: Mutex::new(Weak::new()),
        };
        let joined = membership.enter();
        joined.end_on_panic();
        match joined.client.wait_for_all(UNLIMITED) {
            Ok(()) => return Ok(Some(joined.launched())),
            // Another rank was lost meanwhile.
            Err(Error::PeerFailed { .. }) => (place, failed) = (joined.place(), None),
            Err(error) => return Err(error),
        }
    }
}

/// Connects to the store of a generation, unless the agent tells meanwhile that the generation is
/// over.
pub(super) fn connect(link: &Link, info: RankInfo, timeout: Duration) -> Result<TcpStore> {
    let begun = Instant::now();
    loop {
        let is_over = || link.agent.as_ref().is_some_and(|to| to.client().failure().is_some());
        let slice = Instant::now();
        let why = match link.connect(info, CONNECT_SLICE) {
            // A refusal comes earlier, and would come again.
            Err(Error::Launch(why)) if slice.elapsed() >= CONNECT_SLICE && !is_over() => why,
            done => return done,
        };
        if begun.elapsed() >= timeout {
            return Err(Error::Launch(format!("{why}. It was tried for {timeout:?}")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invitation(nodes: &[usize], members: &[Option<usize>], before: usize) -> Invitation {
        Invitation::new((2, ("host".to_owned(), 4711)), nodes.to_vec(), members, before)
    }

    #[test]
    fn invitation_is_read_from_its_failure() {
        let invitation = invitation(&[3], &[Some(0), None, Some(3)], 4);
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

    #[test]
    fn ranks_keep_their_order() {
        // Of ranks 0 to 5 on three nodes, 1 is replaced, and the node of 2 and 3 is lost.
        let members = [Some(0), None, Some(4), Some(5)];
        let invitation = invitation(&[2, 2], &members, 6);
        let place = |old| {
            let info = invitation.info(old)?;
            Some((info.rank, info.local_rank, info.node_rank))
        };
        assert_eq!([0, 4, 5].map(place), [Some((0, 0, 0)), Some((2, 0, 1)), Some((3, 1, 1))]);
        assert_eq!([1, 2, 3].map(place), [None; 3]);
    }
}
