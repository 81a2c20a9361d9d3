//! All interleavings of an elastic job on few nodes: losses, agents that are late, a coordinator
//! that decides early. The program decides on generations and invitations; agents and processes are
//! modelled.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use super::generation::{self, Changes, Refusal};
use super::options::Nodes;
use super::plan::{Attempt, Loss, Member, Node};
use crate::elastic::Invitation;
use crate::link::GoingOn;

/// A mistake of the protocol that the checker must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// An agent forgets a loss that it has noticed just before the next generation.
    LossForgotten,
    /// The coordinator decides again before all agents have begun the present generation.
    DecidesEarly,
    /// The coordinator ends the job for a lost agent while others have yet to begin the present
    /// generation.
    GivesUp,
}

#[derive(Debug, Clone, PartialEq)]
struct Process {
    agent: u64,
    alive: bool,
    /// Whether its agent has noticed its end, which it does once.
    end_noticed: bool,
    /// The attempt and the rank that it knows.
    attempt: u64,
    rank: usize,
}

/// An agent's view.
#[derive(Debug, Clone, PartialEq)]
struct Agent {
    alive: bool,
    /// The attempt that its ranks belong to; 0 for one that waits.
    attempt: u64,
    /// The process of each of its ranks, by the rank in that attempt.
    processes: BTreeMap<usize, usize>,
    /// Ranks whose loss was noticed in that attempt.
    noticed: BTreeSet<usize>,
    invitations: BTreeMap<u64, Invitation>,
}

#[derive(Debug, Clone, PartialEq)]
struct World {
    attempt: Attempt,
    restarts: Vec<u64>,
    agents: BTreeMap<u64, Agent>,
    processes: Vec<Process>,
    /// What agents have told of the present attempt: the ranks that are lost.
    told: BTreeMap<u64, BTreeSet<usize>>,
    kills_left: usize,
    joins_left: usize,
    /// Whether the job has failed, because too few are left.
    failed: bool,
}

const ALLOWED: Nodes = Nodes { least: 1, most: 2 };

fn going_on() -> GoingOn {
    let join_timeout = Duration::from_secs(1);
    GoingOn { min_ranks: 1, max_restarts: 1, join_timeout, fits: vec![true; 9], work: None }
}

fn member(devices: usize) -> Member {
    Member { host: "h".to_owned(), devices, node_rank: None, nodes: (1, 2), max_restarts: 0 }
}

impl World {
    fn new(devices: &[usize], kills_left: usize, joins_left: usize) -> Self {
        let (mut first_rank, mut nodes, mut processes) = (0, Vec::new(), Vec::new());
        let mut agents = BTreeMap::new();
        for (agent, &devices) in devices.iter().enumerate() {
            let agent = agent as u64;
            nodes.push(Node { agent, host: "h".to_owned(), first_rank, devices, joins: false });
            let ranks = first_rank..first_rank + devices;
            processes.extend(ranks.clone().map(|rank| Process::new(agent, 1, rank)));
            agents.insert(agent, Agent::new(1, ranks.map(|rank| (rank, rank)).collect()));
            first_rank += devices;
        }
        let (id, log_name, store) = ("job".to_owned(), "job".to_owned(), ("h".to_owned(), 1));
        let attempt =
            Attempt { id, log_name, number: 1, restarts: 0, nodes, store, generation: None };
        Self {
            restarts: vec![0; attempt.world_size()],
            attempt,
            agents,
            processes,
            told: BTreeMap::new(),
            kills_left,
            joins_left,
            failed: false,
        }
    }

    /// All worlds that one event leads to.
    fn next(&self, fault: Fault) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            if next != *self {
                all.push(next);
            }
        };
        for process in 0..self.processes.len() {
            if self.kills_left > 0 && self.processes[process].alive {
                add(&|next| {
                    next.processes[process].alive = false;
                    next.kills_left -= 1;
                });
            }
            add(&|next| next.hear(process));
        }
        for &agent in self.agents.keys() {
            // The coordinator's agent stays.
            if agent > 0 && self.kills_left > 0 && self.agents[&agent].alive {
                add(&|next| next.kill_agent(agent));
            }
            add(&|next| next.notice(agent));
            add(&|next| next.tell(agent));
            add(&|next| next.follow(agent, fault));
        }
        if self.joins_left > 0 {
            add(&|next| {
                let number = next.agents.len() as u64;
                next.agents.insert(number, Agent::new(0, BTreeMap::new()));
                next.joins_left -= 1;
            });
        }
        add(&|next| next.decide(fault));
        all
    }

    fn kill_agent(&mut self, agent: u64) {
        self.kills_left -= 1;
        self.agents.get_mut(&agent).unwrap().alive = false;
        let own = self.processes.iter_mut().filter(|process| process.agent == agent);
        own.for_each(|process| process.alive = false);
    }

    /// An agent notices the ends of its processes.
    fn notice(&mut self, agent: u64) {
        let Some(this) = self.agents.get_mut(&agent).filter(|this| this.alive) else { return };
        for (rank, &process) in &this.processes {
            let process = &mut self.processes[process];
            if !process.alive && !std::mem::replace(&mut process.end_noticed, true) {
                this.noticed.insert(*rank);
            }
        }
    }

    /// An agent tells that its ranks belong to the present attempt, and which it has lost.
    fn tell(&mut self, agent: u64) {
        let this = &self.agents[&agent];
        if this.alive && this.attempt == self.attempt.number {
            self.told.insert(agent, this.noticed.clone());
        }
    }

    /// An agent begins the generation that follows its own, if that is the present attempt.
    fn follow(&mut self, agent: u64, fault: Fault) {
        let this = self.agents.get_mut(&agent).unwrap();
        let Some(generation) = &self.attempt.generation else { return };
        let number = self.attempt.number;
        // With a coordinator that decides early an agent may be further behind.
        let is_behind = this.attempt < number && (this.attempt + 1 == number || this.attempt == 0);
        let Some(place) = self.attempt.place(agent).filter(|_| this.alive && is_behind) else {
            return;
        };
        let node = &self.attempt.nodes[place];
        let mut kept = BTreeMap::new();
        for rank in node.first_rank..node.first_rank + node.devices {
            let process = match generation.members[rank] {
                Some(old) => this.processes[&old],
                None => {
                    self.processes.push(Process::new(agent, number, rank));
                    self.processes.len() - 1
                }
            };
            kept.insert(rank, process);
        }
        for (_, process) in std::mem::replace(&mut this.processes, kept) {
            if !this.processes.values().any(|kept| *kept == process) {
                self.processes[process].alive = false;
            }
        }
        let nodes = self.attempt.nodes.iter().map(|node| node.devices).collect();
        let invitation = Invitation::new(
            (generation.number, self.attempt.store.clone()),
            nodes,
            &generation.members,
            generation.world_size_before,
        );
        this.invitations.insert(number, invitation);
        let is_lost = |process: &usize| self.processes[*process].end_noticed;
        let lost = this.processes.iter().filter(|(_, process)| is_lost(process));
        this.noticed = match fault {
            Fault::LossForgotten => BTreeSet::new(),
            _ => lost.map(|(rank, _)| *rank).collect(),
        };
        this.attempt = number;
    }

    /// A process hears of the generation that follows the one that it knows.
    fn hear(&mut self, process: usize) {
        let this = &mut self.processes[process];
        let Some(invitation) = self.agents[&this.agent].invitations.get(&(this.attempt + 1)) else {
            return;
        };
        if this.alive {
            match invitation.rank_of(this.rank) {
                Some(rank) => (this.attempt, this.rank) = (this.attempt + 1, rank),
                None => this.alive = false,
            }
        }
    }

    /// The coordinator decides on the next generation. It may notice a silent agent at any time.
    fn decide(&mut self, fault: Fault) {
        if self.failed {
            return;
        }
        let mut changes = Changes::default();
        let mut all_have_begun = true;
        for node in &self.attempt.nodes {
            if !self.agents[&node.agent].alive {
                changes.gone.insert(node.agent, "is silent".to_owned());
                continue;
            }
            match self.told.get(&node.agent) {
                Some(lost) => {
                    let loss = Loss { how: "ended".to_owned(), code: 137 };
                    changes.lost.extend(lost.iter().map(|rank| (*rank, loss.clone())));
                }
                None if fault == Fault::DecidesEarly => {}
                None => all_have_begun = false,
            }
        }
        if !all_have_begun {
            self.failed = fault == Fault::GivesUp && !changes.gone.is_empty();
            return;
        }
        let waiting = self.agents.iter().filter(|(_, agent)| agent.alive && agent.attempt == 0);
        changes.come = waiting.map(|(agent, _)| (*agent, member(1))).collect();
        match generation::next(&self.attempt, &changes, &self.restarts, &going_on(), ALLOWED) {
            Ok((attempt, restarts)) => {
                (self.attempt, self.restarts) = (attempt, restarts);
                self.told.clear();
            }
            Err(Refusal::Unchanged) => {}
            Err(Refusal::Over | Refusal::TooFew(_)) => self.failed = true,
        }
    }

    /// # Errors
    /// If two processes have the same place in a generation, or if the job has failed although
    /// some are left. Also if nothing happens any more although ranks of the last generation are
    /// missing.
    fn check(&self, is_last: bool) -> Result<(), String> {
        let mut places = BTreeSet::new();
        for process in self.processes.iter().filter(|process| process.alive) {
            if !places.insert((process.attempt, process.rank)) {
                return Err(format!("two processes are rank {}", process.rank));
            }
        }
        if self.failed && !places.is_empty() {
            return Err(format!("the job has failed with {places:?}"));
        }
        if !is_last || self.failed {
            return Ok(());
        }
        let all = (0..self.attempt.world_size()).map(|rank| (self.attempt.number, rank));
        match places == all.collect() {
            true => Ok(()),
            false => Err(format!("the job stands still with {places:?}")),
        }
    }
}

impl Process {
    fn new(agent: u64, attempt: u64, rank: usize) -> Self {
        Self { agent, alive: true, end_noticed: false, attempt, rank }
    }
}

impl Agent {
    fn new(attempt: u64, processes: BTreeMap<usize, usize>) -> Self {
        let (noticed, invitations) = (BTreeSet::new(), BTreeMap::new());
        Self { alive: true, attempt, processes, noticed, invitations }
    }
}

/// Follows all interleavings. Returns their number of worlds.
///
/// # Errors
/// What is wrong in a world.
fn explore(start: World, fault: Fault) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        if !seen.insert(format!("{world:?}")) {
            continue;
        }
        let next = world.next(fault);
        // Kills and joins need not come; all else happens by itself.
        let is_last = next
            .iter()
            .all(|next| next.kills_left < world.kills_left || next.joins_left < world.joins_left);
        world.check(is_last).map_err(|why| format!("{why}: {world:#?}"))?;
        open.extend(next);
    }
    Ok(seen.len())
}

#[test]
fn all_ranks_meet_after_any_losses() {
    for (devices, kills, joins) in [(&[1, 1][..], 3, 1), (&[2, 1], 3, 0), (&[2, 2], 2, 1)] {
        let worlds = explore(World::new(devices, kills, joins), Fault::None);
        let worlds = worlds.unwrap_or_else(|why| panic!("{devices:?}: {why}"));
        eprintln!("{devices:?}, {kills} kills, {joins} joins: {worlds} worlds");
        assert!(worlds > 100);
    }
}

#[test]
fn planted_faults_are_found() {
    for fault in [Fault::LossForgotten, Fault::DecidesEarly, Fault::GivesUp] {
        let found = explore(World::new(&[1, 1], 2, 1), fault);
        assert!(found.is_err(), "{fault:?}");
    }
}
