//! The agents of a job as its coordinator knows them: who has come, shows life, or is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::board::{keys, read, write_for_all};
use super::endpoint::{CONNECTS_AGAIN, Connected};
use super::options::{AgentOptions, Nodes};
use super::plan::{Attempt, Member};
use super::seats::{Decision, TermStore};
use crate::Result;
use fulgurite_store::Store as _;

/// Time without a heartbeat after which an agent loses its node rank to a newly joined one: several
/// heartbeats.
const YIELDS: Duration = Duration::from_secs(5);
/// How often a host may be lost in an elastic job that still takes it in again.
const MAX_HOST_LOSSES: u64 = 3;

/// An agent that has joined.
struct Known {
    member: Member,
    /// Its place in the order of joining.
    order: usize,
    since: Instant,
    /// Its last heartbeat, and when it was received; `None` if it is the lost coordinator's.
    beat: u64,
    heard: Option<Instant>,
    refused: bool,
    /// Whether an elastic job goes on without its ranks. One of them was lost too often.
    left_out: bool,
}

impl Known {
    fn new(member: Member, order: usize, now: Instant) -> Self {
        let (heard, refused, left_out) = (Some(now), false, false);
        Self { member, order, since: now, beat: 0, heard, refused, left_out }
    }
}

/// An agent whose node rank is held by another agent, which may be gone.
struct Contender {
    member: Member,
    /// The agent that holds the node rank, and its heartbeat when this agent joined.
    rival: u64,
    beats: u64,
}

/// The agents of a job.
pub(super) struct Members {
    store: TermStore,
    connected: Connected,
    options: AgentOptions,
    agents: BTreeMap<u64, Known>,
    /// The comers that are admitted, or refused.
    admitted: BTreeSet<u64>,
    contenders: BTreeMap<u64, Contender>,
    /// How often an elastic job has lost each host.
    lost_hosts: BTreeMap<String, u64>,
    /// The agents that were lost when this one last [looked](Self::look), and the time after which
    /// they count as lost.
    silent: BTreeMap<u64, Duration>,
}

impl Members {
    pub(super) fn new(store: TermStore, connected: Connected, options: AgentOptions) -> Self {
        Self {
            store,
            connected,
            options,
            agents: BTreeMap::new(),
            admitted: BTreeSet::new(),
            contenders: BTreeMap::new(),
            lost_hosts: BTreeMap::new(),
            silent: BTreeMap::new(),
        }
    }

    /// Takes over the agents of a coordinator that is lost, and its own agent with it.
    pub(super) fn take_over(&mut self, before: &Decision) {
        let (lost, now) = (before.coordinator.0, Instant::now());
        for (order, (agent, member, left_out)) in before.agents.iter().enumerate() {
            let heard = (*agent != lost).then_some(now);
            let known =
                Known { heard, left_out: *left_out, ..Known::new(member.clone(), order, now) };
            self.agents.insert(*agent, known);
        }
        self.lost_hosts.clone_from(&before.lost_hosts);
    }

    /// The agents that are not refused, as in [`Decision::agents`].
    pub(super) fn listed(&self) -> Vec<(u64, Member, bool)> {
        let listed = self.those(|_, known| !known.refused).into_iter();
        let left_out = |agent: &u64| self.agents[agent].left_out;
        listed.map(|(agent, member)| (agent, member, left_out(&agent))).collect()
    }

    pub(super) fn lost_hosts(&self) -> &BTreeMap<String, u64> {
        &self.lost_hosts
    }

    /// Records newly joined agents, heartbeats, and lost agents. More agents count as lost only
    /// from the next look on, so all decisions of a round are about the same agents.
    pub(super) fn look(&mut self) -> Result<()> {
        let come = self.store.add(keys::AGENTS, 0)?.unsigned_abs();
        for number in (0..come).filter(|number| !self.admitted.contains(number)).collect::<Vec<_>>()
        {
            let Some((agent, member)) = read::<(u64, Member)>(&self.store, &keys::comer(number))
            else {
                continue;
            };
            let is_done = match self.agents.get_mut(&agent) {
                // The coordinator before has admitted it.
                Some(known) => {
                    known.heard = Some(Instant::now());
                    true
                }
                None => self.admit(agent, member)?,
            };
            if is_done {
                self.admitted.insert(number);
            }
        }
        for (agent, known) in &mut self.agents {
            if let Some(beat) = read(&self.store, &keys::beat(*agent))
                && beat != known.beat
            {
                (known.beat, known.heard) = (beat, Some(Instant::now()));
            }
        }
        let those = self.agents.iter();
        let silent = those.map(|(agent, known)| Some((*agent, self.time_of_loss(*agent, known)?)));
        self.silent = silent.flatten().collect();
        Ok(())
    }

    /// Admits an agent, refuses it, or lets it wait until the holder of its node rank shows life or
    /// not. Returns whether it has not to wait.
    fn admit(&mut self, agent: u64, member: Member) -> Result<bool> {
        let mut refusal = self.refusal(&member);
        if let (None, Some(rival)) = (&refusal, self.rival(&member)) {
            let known = &self.agents[&rival];
            let contender = self.contenders.entry(agent).or_insert_with(|| Contender {
                member: member.clone(),
                rival,
                beats: known.beat,
            });
            // One heartbeat may have been under way.
            let lives = contender.rival != rival || known.beat > contender.beats + 1;
            if !lives && known.heard.is_some_and(|heard| heard.elapsed() < YIELDS) {
                return Ok(false);
            }
            let node_rank = contender.member.node_rank.unwrap_or_default();
            if lives {
                refusal = Some(format!(
                    "this agent was told --node-rank {node_rank}, which another one on {} has",
                    known.member.host
                ));
            } else {
                self.refuse(
                    rival,
                    &format!(
                        "this agent was not heard of for {YIELDS:?}, and another one on {} has come with \
                         --node-rank {node_rank} in its place",
                        member.host
                    ),
                )?;
            }
        }
        self.contenders.remove(&agent);
        let order = self.agents.len();
        self.agents.insert(agent, Known::new(member, order, Instant::now()));
        if let Some(why) = refusal {
            self.refuse(agent, &why)?;
        }
        Ok(true)
    }

    /// Refuses an agent, which then ends.
    pub(super) fn refuse(&mut self, agent: u64, why: &str) -> Result<()> {
        if let Some(known) = self.agents.get_mut(&agent) {
            known.refused = true;
        }
        write_for_all(&self.store, &keys::refused(agent), &why)
    }

    /// Returns the reason to refuse an agent, if any.
    fn refusal(&self, member: &Member) -> Option<String> {
        let told = Nodes { least: member.nodes.0, most: member.nodes.1 };
        if told != self.options.nodes {
            return Some(format!(
                "this agent was told --nnodes {told}, the one that hosts the rendezvous {}; they must be \
                 told the same",
                self.options.nodes
            ));
        }
        let (told, own) = (member.max_restarts, self.options.max_restarts);
        (told != own).then(|| {
            format!(
                "this agent was told --max-restarts {told}, the one that hosts the rendezvous {own}; they must \
                 be told the same"
            )
        })
    }

    /// The agent with the same node rank that is alive, as far as is known.
    fn rival(&self, member: &Member) -> Option<u64> {
        let node_rank = member.node_rank?;
        let has_it =
            |known: &Known| known.member.devices > 0 && known.member.node_rank == Some(node_rank);
        self.agents
            .iter()
            .find(|(agent, known)| has_it(known) && self.lives(**agent, known))
            .map(|(agent, _)| *agent)
    }

    fn is_cut_off(&self, agent: u64, known: &Known) -> bool {
        self.connected.is_cut_off(agent, known.since)
    }

    fn lives(&self, agent: u64, known: &Known) -> bool {
        let is_heard = |within: Duration| known.heard.is_some_and(|heard| heard.elapsed() < within);
        // A heartbeat that has come meanwhile counts more than the end of a connection.
        let is_there = is_heard(CONNECTS_AGAIN) || !self.is_cut_off(agent, known);
        !known.refused && is_heard(self.options.keep_alive) && is_there
    }

    /// Whether an agent has come that may be admitted soon.
    pub(super) fn is_to_admit(&self) -> bool {
        !self.contenders.is_empty()
    }

    /// The agents that are alive and start ranks, in the order of joining.
    pub(super) fn alive(&self) -> Vec<(u64, Member)> {
        self.those(|agent, known| self.lives(*agent, known) && known.member.devices > 0)
    }

    /// The agents that an elastic job may take in, in the order of joining. They must have been
    /// there for `settled`.
    pub(super) fn comers(&self, attempt: &Attempt, settled: Duration) -> Vec<(u64, Member)> {
        self.those(|agent, known| {
            attempt.place(*agent).is_none()
                && self.lives(*agent, known)
                && known.member.devices > 0
                && !known.left_out
                && known.since.elapsed() >= settled
                && self.lost_hosts.get(&known.member.host).copied().unwrap_or(0) <= MAX_HOST_LOSSES
        })
    }

    /// The agents for which `is_one` is true, in the order of joining.
    fn those(&self, is_one: impl Fn(&u64, &Known) -> bool) -> Vec<(u64, Member)> {
        let mut ones: Vec<_> =
            self.agents.iter().filter(|(agent, known)| is_one(agent, known)).collect();
        ones.sort_by_key(|(_, known)| known.order);
        ones.into_iter().map(|(agent, known)| (*agent, known.member.clone())).collect()
    }

    /// Returns the time after which an agent counts as lost, if it was when this one last looked.
    pub(super) fn silent_for(&self, agent: u64) -> Option<Duration> {
        match self.agents.contains_key(&agent) {
            true => self.silent.get(&agent).copied(),
            false => Some(self.options.keep_alive),
        }
    }

    fn time_of_loss(&self, agent: u64, known: &Known) -> Option<Duration> {
        match () {
            () if self.lives(agent, known) => None,
            () if known.refused => Some(YIELDS),
            () if self.is_cut_off(agent, known) => Some(CONNECTS_AGAIN),
            () => Some(self.options.keep_alive),
        }
    }

    /// Whether an agent's first heartbeat has come, before which it tells what it has told an
    /// earlier coordinator.
    pub(super) fn has_told(&self, agent: u64) -> bool {
        self.agents.get(&agent).is_some_and(|known| known.beat > 0)
    }

    /// Notes that an elastic job has lost the host of an agent.
    pub(super) fn note_lost_host(&mut self, agent: u64) {
        if let Some(known) = self.agents.get(&agent) {
            *self.lost_hosts.entry(known.member.host.clone()).or_default() += 1;
        }
    }

    /// Notes that an elastic job goes on without an agent's ranks, and does not take it in again.
    pub(super) fn leave_out(&mut self, agent: u64) {
        if let Some(known) = self.agents.get_mut(&agent) {
            known.left_out = true;
        }
    }
}
