//! The coordinator: chooses the agents of each attempt and decides what follows its end. Runs on a
//! thread of the agent that hosts the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::{keys, read, write};
use super::options::{AgentOptions, Nodes};
use super::plan::{Attempt, End, Member, Over, nodes};
use crate::Result;
use fulgurite_error::{counted, print_message};
use fulgurite_store::{JobKey, Store};

const POLL: Duration = Duration::from_millis(100);
/// Time that agents have to report the end of their ranks, beyond the ranks' own time to end.
const ENDING: Duration = Duration::from_secs(30);
/// Time without a heartbeat after which an agent loses its node rank to a newly joined one: several
/// heartbeats.
const YIELDS: Duration = Duration::from_secs(5);

/// An agent that has joined.
struct Known {
    member: Member,
    /// Its last heartbeat, and when it was received.
    beat: u64,
    heard: Instant,
    refused: bool,
}

/// An agent whose node rank is held by another agent, which may be gone.
struct Contender {
    member: Member,
    /// The agent that holds the node rank, and its heartbeat when this agent joined.
    rival: u64,
    beats: u64,
}

pub(super) struct Coordinator {
    store: Arc<dyn Store>,
    options: AgentOptions,
    agents: BTreeMap<u64, Known>,
    contenders: BTreeMap<u64, Contender>,
}

impl Coordinator {
    pub(super) fn new(store: Arc<dyn Store>, options: AgentOptions) -> Self {
        Self { store, options, agents: BTreeMap::new(), contenders: BTreeMap::new() }
    }

    /// Runs the job's attempts. An error means that the store, and with it this agent, is gone.
    pub(super) fn run(&mut self) -> Result<()> {
        // Unique, so that nothing left by an earlier job of the same name is resumed.
        let random =
            || -> Result<String> { Ok(JobKey::random_secret()?.chars().take(12).collect()) };
        let (id, log_name) = match self.options.id.clone() {
            Some(id) => (id.clone(), format!("{id}_{}", random()?)),
            None => random().map(|id| (id.clone(), id))?,
        };
        let mut restarts = 0;
        for number in 1.. {
            let gathered = self.gather(number == 1)?;
            let agents = match gathered {
                Ok(agents) => agents,
                Err(message) => return self.over(1, Some(message)),
            };
            let nodes = nodes(&agents, self.options.nodes.most);
            let attempt =
                Attempt { id: id.clone(), log_name: log_name.clone(), number, restarts, nodes };
            write(&*self.store, keys::ATTEMPT, &attempt)?;
            let (message, code) = match self.watch(&attempt)? {
                End::Well => return self.over(0, None),
                End::Interrupted(signal) => return self.over(128 + signal, None),
                End::Failed { message, code } => (message, code),
                End::Stopped => ("ranks ended, and none has said why".to_owned(), 1),
            };
            if restarts == self.options.max_restarts {
                return self.over(code, Some(message));
            }
            restarts += 1;
            let left = self.options.max_restarts - restarts;
            let left = counted(left, "restart");
            print_message(&format!("the job starts again ({left} left)"));
        }
        Ok(())
    }

    fn over(&self, code: i32, message: Option<String>) -> Result<()> {
        write(&*self.store, keys::OVER, &Over { code, message })
    }

    /// Records newly joined agents and heartbeats.
    fn look(&mut self) -> Result<()> {
        let come = self.store.add(keys::AGENTS, 0)?.unsigned_abs();
        for agent in 0..come {
            if let Some(known) = self.agents.get_mut(&agent) {
                if let Some(beat) = read(&*self.store, &keys::beat(agent))
                    && beat != known.beat
                {
                    (known.beat, known.heard) = (beat, Instant::now());
                }
            } else if let Some(member) = read::<Member>(&*self.store, &keys::member(agent)) {
                self.admit(agent, member)?;
            }
        }
        Ok(())
    }

    /// Admits an agent, refuses it, or lets it wait until the holder of its node rank shows life or
    /// not.
    fn admit(&mut self, agent: u64, member: Member) -> Result<()> {
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
            if !lives && known.heard.elapsed() < YIELDS {
                return Ok(());
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
        self.agents.insert(agent, Known { member, beat: 0, heard: Instant::now(), refused: false });
        refusal.map_or(Ok(()), |why| self.refuse(agent, &why))
    }

    fn refuse(&mut self, agent: u64, why: &str) -> Result<()> {
        if let Some(known) = self.agents.get_mut(&agent) {
            known.refused = true;
        }
        write(&*self.store, &keys::refused(agent), &why)
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
        let has_it = |known: &Known| known.member.node_rank == Some(node_rank) && self.lives(known);
        self.agents.iter().find(|(_, known)| has_it(known)).map(|(agent, _)| *agent)
    }

    fn lives(&self, known: &Known) -> bool {
        !known.refused && known.heard.elapsed() < self.options.keep_alive
    }

    /// Returns the agents of the next attempt once there are enough, or the error message after a
    /// timeout.
    fn gather(&mut self, first: bool) -> Result<std::result::Result<Vec<(u64, Member)>, String>> {
        let (began, mut enough) = (Instant::now(), None::<Instant>);
        let (least, most) = (self.options.nodes.least, self.options.nodes.most);
        loop {
            self.look()?;
            let alive: Vec<(u64, Member)> = self
                .agents
                .iter()
                .filter(|(_, known)| self.lives(known))
                .map(|(agent, known)| (*agent, known.member.clone()))
                .collect();
            if alive.len() >= most {
                return Ok(Ok(alive));
            }
            if alive.len() < least {
                enough = None;
            } else if enough.get_or_insert_with(Instant::now).elapsed() >= self.options.last_call {
                return Ok(Ok(alive));
            }
            if enough.is_none() && began.elapsed() >= self.options.join_timeout {
                let hosts: Vec<&str> = alive.iter().map(|(_, one)| one.host.as_str()).collect();
                let hosts = if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") };
                let again = if first { "" } else { " again" };
                return Ok(Err(format!(
                    "after {:?} there are {} of {least} nodes{again}: {hosts}. Start the same command on the \
                     others, with the same --rdzv-endpoint and --rdzv-id",
                    self.options.join_timeout,
                    alive.len()
                )));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until the ranks of an attempt have ended on all nodes. Returns their end.
    fn watch(&mut self, attempt: &Attempt) -> Result<End> {
        let mut verdict = None::<End>;
        let mut stopped_at = None::<Instant>;
        loop {
            self.look()?;
            let (mut running, mut interrupted, mut all_well) = (0, None, true);
            for (place, node) in attempt.nodes.iter().enumerate() {
                let failing = keys::failing(attempt.number, node.agent);
                if verdict.is_none()
                    && let Some((message, code)) = read(&*self.store, &failing)
                {
                    verdict = Some(End::Failed { message, code });
                }
                let end: Option<End> = read(&*self.store, &keys::end(attempt.number, node.agent));
                let lost = self.agents.get(&node.agent).is_none_or(|known| !self.lives(known));
                match (end, &verdict) {
                    (Some(End::Failed { message, code }), None) => {
                        verdict = Some(End::Failed { message, code });
                    }
                    (Some(End::Interrupted(signal)), _) => interrupted = Some(signal),
                    (Some(End::Stopped), _) => all_well = false,
                    (Some(_), _) => {}
                    (None, None) if lost => {
                        let replaced =
                            self.agents.get(&node.agent).is_some_and(|known| known.refused);
                        let silent = if replaced { YIELDS } else { self.options.keep_alive };
                        let message = format!(
                            "node {place} ({}) has not been heard of for {silent:?}: it is down, or cut off, \
                             or its agent was killed",
                            node.host
                        );
                        verdict = Some(End::Failed { message, code: 1 });
                    }
                    (None, Some(_)) if lost => {}
                    (None, _) => running += 1,
                }
            }
            if let (Some(End::Failed { message, .. }), None) = (&verdict, stopped_at) {
                write(&*self.store, &keys::stop(attempt.number), message)?;
                stopped_at = Some(Instant::now());
            }
            // Does not wait for a live agent that does not report the end of its ranks.
            let overdue = stopped_at.is_some_and(|at| at.elapsed() > ENDING);
            if running == 0 || overdue {
                if verdict.is_none() && interrupted.is_none() && all_well {
                    return Ok(End::Well);
                }
                // An interruption takes precedence over the ranks' end.
                let asked = || read(&*self.store, &keys::interrupt(attempt.number));
                return Ok(match (interrupted.or_else(asked), verdict) {
                    (Some(signal), _) => End::Interrupted(signal),
                    (None, Some(failed)) => failed,
                    (None, None) => End::Stopped,
                });
            }
            std::thread::sleep(POLL);
        }
    }
}
