//! Messages between agents.

use serde::{Deserialize, Serialize};

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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
}

/// A node of an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Node {
    /// The number of its agent.
    pub(super) agent: u64,
    pub(super) host: String,
    pub(super) first_rank: usize,
    pub(super) devices: usize,
}

impl Attempt {
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
        let node =
            Node { agent: *agent, host: member.host.clone(), first_rank, devices: member.devices };
        first_rank += member.devices;
        node
    };
    places.into_iter().flatten().map(node).collect()
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
        let attempt = Attempt { id, log_name, number: 1, restarts: 0, nodes: nodes(&agents, 4) };
        assert_eq!((attempt.world_size(), attempt.place(2), attempt.place(9)), (10, Some(2), None));
    }
}
