//! Messages between agents.

use serde::{Deserialize, Serialize};

use crate::link::GoingOn;

/// An agent's announcement when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    /// The name of its host.
    pub(super) host: String,
    /// Number of ranks it starts.
    pub(super) devices: usize,
    /// Its node rank, if configured.
    pub(super) node_rank: Option<usize>,
    /// Its minimum and maximum number of nodes.
    pub(super) nodes: (usize, usize),
    /// Its maximum number of restarts.
    pub(super) max_restarts: u64,
}

/// The agents that start ranks in an attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Attempt {
    /// The job's id.
    pub(super) id: String,
    /// Name of the job's log folder: the id plus a suffix that distinguishes the job from an
    /// earlier one with the same id.
    pub(super) log_name: String,
    /// Starts at 1.
    pub(super) number: u64,
    /// Number of restarts after failures so far.
    pub(super) restarts: u64,
    /// The nodes, in the order of their ranks.
    pub(super) nodes: Vec<Node>,
    /// The address of the store for the ranks of an elastic job, which the coordinator hosts.
    pub(super) store: (String, u16),
    /// How it goes on with the ranks of the attempt before; `None` if all ranks are started.
    pub(super) generation: Option<Generation>,
}

/// A generation of an elastic job: an attempt that keeps ranks of the one before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Generation {
    /// 1 is the first after a loss.
    pub(super) number: u64,
    /// Number of ranks of the first generation.
    pub(super) first_world_size: usize,
    /// Number of ranks of the generation before.
    pub(super) world_size_before: usize,
    /// For each rank its rank in the generation before; `None` for a new process.
    pub(super) members: Vec<Option<usize>>,
    pub(super) cause: Cause,
    pub(super) going_on: GoingOn,
}

/// Why a generation ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Cause {
    /// A rank was lost. `how` is as in `was killed by signal 9`.
    Rank { rank: usize, node: String, how: String },
    /// A node was lost, with all of its ranks.
    Node { first_rank: usize, node: String, how: String },
    /// A node has left, with all of its ranks.
    Left { first_rank: usize, node: String },
    /// The coordinator was lost on this host, which had no ranks.
    Coordinator { host: String, world_size_before: usize },
    /// A node has come on this host. Nobody was lost.
    Joined { host: String, world_size_before: usize },
}

impl Cause {
    /// The rank whose failure ends the generation. No rank has heard of a new one, so none takes
    /// the failure for its own.
    pub(super) fn rank(&self) -> usize {
        match self {
            Self::Rank { rank, .. }
            | Self::Node { first_rank: rank, .. }
            | Self::Left { first_rank: rank, .. } => *rank,
            Self::Coordinator { world_size_before, .. }
            | Self::Joined { world_size_before, .. } => *world_size_before,
        }
    }

    /// The failure of that rank, after `it`.
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Rank { how, .. } => how.clone(),
            Self::Node { node, how, .. } => format!("is on {node}, which {how}"),
            Self::Left { node, .. } => format!("is on {node}, which leaves the job"),
            Self::Coordinator { host, .. } => {
                format!("is the next one; the coordinator on {host} was lost")
            }
            Self::Joined { host, .. } => format!("is new, on {host}"),
        }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rank { rank, node, how } => write!(f, "rank {rank} on {node} {how}"),
            Self::Node { node, how, .. } => write!(f, "{node} {how}"),
            Self::Left { node, .. } => write!(f, "{node} leaves the job, as it was asked to"),
            Self::Coordinator { host, .. } => {
                write!(f, "the agent that coordinated the job, on {host}, was lost")
            }
            Self::Joined { host, .. } => write!(f, "{host} joins the job"),
        }
    }
}

/// A node of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    /// The number of its agent.
    pub(super) agent: u64,
    pub(super) host: String,
    pub(super) first_rank: usize,
    pub(super) devices: usize,
    /// Whether a running job takes it in with this attempt.
    pub(super) joins: bool,
}

impl Attempt {
    /// The node with this index, for messages: `node 1 (host)`.
    pub(super) fn node_name(&self, place: usize) -> String {
        format!("node {place} ({})", self.nodes[place].host)
    }

    /// The index of the node of a rank.
    pub(super) fn place_of_rank(&self, rank: usize) -> usize {
        let after = self.nodes.partition_point(|node| node.first_rank <= rank);
        after.saturating_sub(1)
    }

    pub(super) fn world_size(&self) -> usize {
        self.nodes.iter().map(|node| node.devices).sum()
    }

    /// An agent's index among the nodes.
    pub(super) fn place(&self, agent: u64) -> Option<usize> {
        self.nodes.iter().position(|node| node.agent == agent)
    }
}

/// Places at most `most` agents as the nodes of an attempt. Agents with a configured node rank get
/// that place; the others fill the free places in the order of joining.
pub(super) fn nodes(agents: &[(u64, Member)], most: usize) -> Vec<Node> {
    let mut places: Vec<Option<&(u64, Member)>> = vec![None; most];
    for agent in agents {
        if let Some(place) = agent.1.node_rank.and_then(|rank| places.get_mut(rank)) {
            place.get_or_insert(agent);
        }
    }
    let mut others = agents.iter().filter(|(_, member)| member.node_rank.is_none());
    for place in &mut places {
        if place.is_none() {
            *place = others.next();
        }
    }
    let mut first_rank = 0;
    let node = |(agent, member): &(u64, Member)| {
        let node = Node {
            agent: *agent,
            host: member.host.clone(),
            first_rank,
            devices: member.devices,
            joins: false,
        };
        first_rank += member.devices;
        node
    };
    places.into_iter().flatten().map(node).collect()
}

/// What an agent says of its ranks in an attempt of an elastic job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Losses {
    /// Ranks whose processes a signal has ended.
    pub(super) lost: Vec<(usize, Loss)>,
    /// Whether a rank has left, or has ended by itself: it is done with the training.
    pub(super) ends: bool,
    /// Whether a rank has ended well without having come to this generation.
    pub(super) done: bool,
    /// Whether all ranks have come to this attempt.
    pub(super) all_have_come: bool,
    /// Whether the node was asked to leave the job.
    pub(super) leaves: bool,
}

/// The end of a lost rank's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Loss {
    /// As in `was killed by signal 9`.
    pub(super) how: String,
    /// The exit code of a job that ends because of it.
    pub(super) code: i32,
}

/// Why the ranks of an attempt end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stop {
    pub(super) message: String,
    /// The rank that has failed, if it is known.
    pub(super) rank: Option<usize>,
    /// Whether the training has ended well.
    pub(super) is_done: bool,
}

/// The end of a node's ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum End {
    /// All with exit code 0.
    Well,
    /// Asked to end, by this signal.
    Interrupted(i32),
    /// Ended because ranks of another node failed or were lost.
    Stopped,
    /// A rank failed: message and exit code.
    Failed { message: String, code: i32 },
}

/// The coordinator's message about the end of the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Over {
    pub(super) code: i32,
    /// Printed on nodes that have not printed it yet.
    pub(super) message: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(node_rank: Option<usize>, devices: usize) -> Member {
        Member { host: "h".to_owned(), devices, node_rank, nodes: (1, 4), max_restarts: 0 }
    }

    #[test]
    fn nodes_are_ordered_by_rank_then_by_joining() {
        let agents = [
            (0, member(None, 1)),
            (1, member(Some(0), 2)),
            (2, member(None, 3)),
            (3, member(Some(3), 4)),
        ];
        let places = |most| -> Vec<(u64, usize)> {
            nodes(&agents, most).iter().map(|node| (node.agent, node.first_rank)).collect()
        };
        assert_eq!(places(4), [(1, 0), (0, 2), (2, 3), (3, 6)]);
        assert_eq!(places(2), [(1, 0), (0, 2)]);
        let (id, log_name) = ("job".to_owned(), "job".to_owned());
        let (nodes, generation, store) = (nodes(&agents, 4), None, (String::new(), 0));
        let attempt = Attempt { id, log_name, number: 1, restarts: 0, nodes, store, generation };
        assert_eq!((attempt.world_size(), attempt.place(2), attempt.place(9)), (10, Some(2), None));
    }
}
