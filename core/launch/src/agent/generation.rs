//! The next generation of an elastic job.

use std::collections::{BTreeMap, BTreeSet};

use super::options::Nodes;
use super::plan::{Attempt, Cause, Generation, Loss, Member, Node};
use crate::link::GoingOn;

/// What has happened to an attempt since it began.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) lost: BTreeMap<usize, Loss>,
    /// Agents that are gone, with all of their ranks, and what has happened to them.
    pub(super) gone: BTreeMap<u64, String>,
    /// Agents that leave, with all of their ranks.
    pub(super) leaving: BTreeSet<u64>,
    /// Agents that have come, in the order of joining.
    pub(super) come: Vec<(u64, Member)>,
    /// The host of the coordinator that was lost, and with it the store of the present generation.
    pub(super) coordinator: Option<String>,
}

/// Why a job does not go on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Nothing would change.
    Unchanged,
    /// The job ends.
    Over,
    /// Too few ranks or nodes are left; the message says so.
    TooFew(String),
}

/// A rank's place in a generation: its rank before, and how often its process was replaced.
type Place = (Option<usize>, u64);

/// Returns the attempt in which a job goes on, and for each of its ranks how often its process was
/// replaced. `restarts` has these numbers of the present attempt. The caller sets the address of
/// the store.
///
/// Ranks keep their order. A lost rank of a node that is left gets a new process, up to
/// `max_restarts` times. Nodes that have come are added at the end, up to the most nodes. If the
/// strategy does not fit the number of ranks, new processes are left out first, then the last
/// ranks.
///
/// # Errors
/// The reason if the job does not go on.
pub(super) fn next(
    attempt: &Attempt,
    changes: &Changes,
    restarts: &[u64],
    going_on: &GoingOn,
    allowed: Nodes,
) -> Result<(Attempt, Vec<u64>), Refusal> {
    let mut nodes: Vec<(u64, String, Vec<Place>)> = Vec::new();
    for node in attempt.nodes.iter().filter(|node| !changes.takes_out(node.agent)) {
        let ranks = node.first_rank..node.first_rank + node.devices;
        let places = ranks.filter_map(|rank| match changes.lost.contains_key(&rank) {
            false => Some((Some(rank), restarts[rank])),
            true if restarts[rank] < going_on.max_restarts => Some((None, restarts[rank] + 1)),
            true => None,
        });
        nodes.push((node.agent, node.host.clone(), places.collect()));
    }
    let left = nodes.iter().flat_map(|(_, _, places)| places);
    let left = left.filter(|(before, _)| before.is_some()).count();
    nodes.retain(|(_, _, places)| !places.is_empty());
    for (agent, member) in &changes.come {
        if nodes.len() < allowed.most {
            nodes.push((*agent, member.host.clone(), vec![(None, 0); member.devices]));
        }
    }
    let least = going_on.min_ranks.max(1);
    let fits = |ranks: usize| going_on.fits.get(ranks).copied().unwrap_or(false);
    loop {
        let ranks = nodes.iter().map(|(_, _, places)| places.len()).sum();
        // Who leaves must not be the last to have the state.
        let has_state = left > 0 || changes.leaving.is_empty();
        if ranks < least || nodes.len() < allowed.least || !has_state {
            return Err(Refusal::TooFew(format!(
                "{left} of {} ranks are left, and the strategy, trainer.elastic.min_ranks = {} and --nnodes \
                 {allowed} need more",
                attempt.world_size(),
                going_on.min_ranks
            )));
        }
        if fits(ranks) {
            break;
        }
        let is_new = |(_, _, places): &(u64, String, Vec<Place>)| {
            places.iter().any(|(before, _)| before.is_none())
        };
        let node = nodes.iter().rposition(is_new).unwrap_or(nodes.len() - 1);
        let places = &mut nodes[node].2;
        let place = places.iter().rposition(|(before, _)| before.is_none());
        places.remove(place.unwrap_or(places.len() - 1));
        nodes.retain(|(_, _, places)| !places.is_empty());
    }
    let places: Vec<Place> = nodes.iter().flat_map(|(_, _, places)| places.clone()).collect();
    let members: Vec<Option<usize>> = places.iter().map(|(before, _)| *before).collect();
    let are_same = members.iter().copied().eq((0..attempt.world_size()).map(Some));
    if are_same && changes.coordinator.is_none() {
        return Err(Refusal::Unchanged);
    }
    let mut first_rank = 0;
    let place_node = |(agent, host, places): (u64, String, Vec<Place>)| {
        let joins = changes.come.iter().any(|(come, _)| *come == agent);
        let node = Node { agent, host, first_rank, devices: places.len(), joins };
        first_rank += node.devices;
        node
    };
    let before = attempt.generation.as_ref();
    let generation = Generation {
        number: before.map_or(0, |generation| generation.number) + 1,
        first_world_size: before
            .map_or(attempt.world_size(), |generation| generation.first_world_size),
        world_size_before: attempt.world_size(),
        members,
        cause: changes.cause(attempt),
        going_on: going_on.clone(),
    };
    let next = Attempt {
        number: attempt.number + 1,
        nodes: nodes.into_iter().map(place_node).collect(),
        generation: Some(generation),
        ..attempt.clone()
    };
    Ok((next, places.into_iter().map(|(_, restarts)| restarts).collect()))
}

impl Changes {
    /// Whether a rank, a node or the store was lost.
    pub(super) fn is_loss(&self) -> bool {
        !self.lost.is_empty() || !self.gone.is_empty() || self.coordinator.is_some()
    }

    /// Whether an agent's ranks are taken out of the job.
    fn takes_out(&self, agent: u64) -> bool {
        self.gone.contains_key(&agent) || self.leaving.contains(&agent)
    }

    /// What ends the present generation: a lost rank, node or coordinator, or a node that leaves
    /// or joins.
    pub(super) fn cause(&self, attempt: &Attempt) -> Cause {
        if let Some((&rank, Loss { how, .. })) = self.lost.first_key_value() {
            let node = attempt.node_name(attempt.place_of_rank(rank));
            return Cause::Rank { rank, node, how: how.clone() };
        }
        for (place, node) in attempt.nodes.iter().enumerate() {
            if let Some(how) = self.gone.get(&node.agent) {
                let (first_rank, node) = (node.first_rank, attempt.node_name(place));
                return Cause::Node { first_rank, node, how: how.clone() };
            }
        }
        let world_size_before = attempt.world_size();
        if let Some(host) = &self.coordinator {
            return Cause::Coordinator { host: host.clone(), world_size_before };
        }
        let leaves = |node: &Node| self.leaving.contains(&node.agent);
        if let Some(place) = attempt.nodes.iter().position(leaves) {
            let (first_rank, node) = (attempt.nodes[place].first_rank, attempt.node_name(place));
            return Cause::Left { first_rank, node };
        }
        let host = self.come.first().map(|(_, member)| member.host.clone()).unwrap_or_default();
        Cause::Joined { host, world_size_before }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn attempt(devices: &[usize]) -> Attempt {
        let mut first_rank = 0;
        let node = |(agent, &devices): (usize, &usize)| {
            let (agent, host) = (agent as u64, format!("h{agent}"));
            let node = Node { agent, host, first_rank, devices, joins: false };
            first_rank += devices;
            node
        };
        let nodes = devices.iter().enumerate().map(node).collect();
        let (id, log_name) = ("job".to_owned(), "job".to_owned());
        let store = ("127.0.0.1".to_owned(), 1);
        Attempt { id, log_name, number: 3, restarts: 0, nodes, store, generation: None }
    }

    fn going_on(max_restarts: u64, multiple: usize) -> GoingOn {
        let fits = (0..=64).map(|ranks: usize| ranks > 0 && ranks.is_multiple_of(multiple));
        let join_timeout = Duration::from_secs(1);
        GoingOn { min_ranks: 1, max_restarts, join_timeout, fits: fits.collect(), work: None }
    }

    fn member(devices: usize) -> Member {
        let host = "new".to_owned();
        Member { host, devices, node_rank: None, nodes: (1, 4), max_restarts: 0 }
    }

    fn lost(ranks: &[usize]) -> BTreeMap<usize, Loss> {
        let loss = Loss { how: "was killed".to_owned(), code: 137 };
        ranks.iter().map(|rank| (*rank, loss.clone())).collect()
    }

    fn gone(agents: &[u64]) -> BTreeMap<u64, String> {
        agents.iter().map(|agent| (*agent, "is silent".to_owned())).collect()
    }

    const UP_TO_FOUR: Nodes = Nodes { least: 1, most: 4 };

    fn members(next: Result<(Attempt, Vec<u64>), Refusal>) -> Vec<Option<usize>> {
        next.unwrap().0.generation.unwrap().members
    }

    #[test]
    fn lost_ranks_are_replaced_or_left_out() {
        let changes = Changes { lost: lost(&[1, 2]), ..Changes::default() };
        let next = |restarts: [u64; 4], multiple| {
            super::next(&attempt(&[2, 2]), &changes, &restarts, &going_on(1, multiple), UP_TO_FOUR)
        };
        let (attempt, restarts) = next([0; 4], 1).unwrap();
        assert_eq!((attempt.number, restarts), (4, vec![0, 1, 1, 0]));
        let generation = attempt.generation.unwrap();
        assert_eq!(generation.members, [Some(0), None, None, Some(3)]);
        assert_eq!((generation.number, generation.first_world_size), (1, 4));
        assert_eq!(generation.cause.to_string(), "rank 1 on node 0 (h0) was killed");
        assert_eq!(members(next([0, 1, 0, 0], 1)), [Some(0), None, Some(3)]);
        assert_eq!(members(next([0, 1, 0, 0], 2)), [Some(0), Some(3)], "no new process is alone");
    }

    #[test]
    fn nodes_come_and_go() {
        let next = |changes: &Changes| {
            super::next(&attempt(&[2, 2]), changes, &[0; 4], &going_on(1, 1), UP_TO_FOUR)
        };
        let come = vec![(7, member(3))];
        let swap = Changes { gone: gone(&[0]), come, ..Changes::default() };
        let (attempt, _) = next(&swap).unwrap();
        assert_eq!(attempt.nodes.iter().map(|node| node.joins).collect::<Vec<_>>(), [false, true]);
        assert_eq!(attempt.nodes[1].agent, 7);
        assert_eq!((attempt.nodes[1].first_rank, attempt.nodes[1].devices), (2, 3));
        let generation = attempt.generation.unwrap();
        assert_eq!(generation.members, [Some(2), Some(3), None, None, None]);
        assert_eq!(generation.cause.to_string(), "node 0 (h0) is silent");
        let come = Changes { come: vec![(7, member(3))], ..Changes::default() };
        let cause = next(&come).unwrap().0.generation.unwrap().cause;
        assert_eq!((cause.rank(), cause.to_string()), (4, "new joins the job".to_owned()));
        let all = Changes { gone: gone(&[0, 1]), come: vec![(7, member(3))], ..swap };
        // All processes of the generation before are lost.
        assert_eq!(members(next(&all)), [None, None, None]);
        let replaced = Changes { coordinator: Some("h9".to_owned()), ..Changes::default() };
        let generation = next(&replaced).unwrap().0.generation.unwrap();
        assert_eq!(generation.members, [0, 1, 2, 3].map(Some), "for the sake of the store");
        assert_eq!(
            (generation.cause.rank(), generation.cause.to_string()),
            (4, "the agent that coordinated the job, on h9, was lost".to_owned())
        );
        let leaves = Changes { leaving: BTreeSet::from([1]), ..Changes::default() };
        let generation = next(&leaves).unwrap().0.generation.unwrap();
        assert_eq!(generation.members, [Some(0), Some(1)]);
        assert_eq!(generation.cause.to_string(), "node 1 (h1) leaves the job, as it was asked to");
        let last = Changes { gone: gone(&[0]), come: vec![(7, member(3))], ..leaves };
        assert!(matches!(next(&last), Err(Refusal::TooFew(_))), "nobody else has the state");
        let none = Changes { come: Vec::new(), ..all };
        assert!(matches!(next(&none), Err(Refusal::TooFew(_))));
        assert_eq!(next(&Changes::default()), Err(Refusal::Unchanged));
    }

    #[test]
    fn too_few_are_refused() {
        let changes = Changes { gone: gone(&[1]), ..Changes::default() };
        let next = |least, multiple| {
            let allowed = Nodes { least, most: 2 };
            super::next(&attempt(&[2, 2]), &changes, &[0; 4], &going_on(1, multiple), allowed)
        };
        assert!(next(1, 2).is_ok());
        for refused in [next(2, 2), next(1, 4)] {
            let Err(Refusal::TooFew(why)) = refused else { panic!("{refused:?}") };
            assert!(why.starts_with("2 of 4 ranks are left"), "{why}");
        }
    }

    proptest! {
        #[test]
        fn members_are_kept_once_and_in_order(
            devices in prop::collection::vec(1_usize..4, 1..5),
            lost_ranks in prop::collection::btree_set(0_usize..12, 0..6),
            gone_agents in prop::collection::btree_set(0_u64..4, 0..3),
            leaving_agents in prop::collection::btree_set(0_u64..4, 0..3),
            come in 0_usize..3,
            (max_restarts, multiple) in (0_u64..3, 1_usize..4),
        ) {
            let attempt = attempt(&devices);
            let world_size = attempt.world_size();
            let lost_ranks: Vec<usize> =
                lost_ranks.into_iter().filter(|rank| *rank < world_size).collect();
            let changes = Changes {
                lost: lost(&lost_ranks),
                gone: gone(&gone_agents.into_iter().collect::<Vec<_>>()),
                leaving: leaving_agents.clone(),
                come: (0..come).map(|i| (10 + i as u64, member(2))).collect(),
                coordinator: None,
            };
            let going_on = going_on(max_restarts, multiple);
            if let Ok((next, restarts)) =
                super::next(&attempt, &changes, &vec![1; world_size], &going_on, UP_TO_FOUR)
            {
                let members = next.generation.as_ref().unwrap().members.clone();
                prop_assert_eq!(members.len(), next.world_size());
                prop_assert_eq!(members.len(), restarts.len());
                prop_assert!(members.len().is_multiple_of(multiple));
                prop_assert!(next.nodes.len() <= UP_TO_FOUR.most);
                let kept: Vec<usize> = members.iter().copied().flatten().collect();
                prop_assert!(leaving_agents.is_empty() || !kept.is_empty());
                prop_assert!(kept.is_sorted_by(|a, b| a < b));
                for node in &next.nodes {
                    prop_assert!(!changes.takes_out(node.agent));
                    let before = attempt.nodes.iter().find(|before| before.agent == node.agent);
                    let ranks = node.first_rank..node.first_rank + node.devices;
                    for old in members[ranks].iter().copied().flatten() {
                        prop_assert!(!changes.lost.contains_key(&old));
                        let before = before.expect("only its own agent keeps a process");
                        prop_assert!((before.first_rank..before.first_rank + before.devices).contains(&old));
                    }
                }
            }
        }
    }
}
