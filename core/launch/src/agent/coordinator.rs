//! The coordinator: chooses the agents of each attempt and decides what follows its end. Runs on a
//! thread of an agent that hosts a seat of the rendezvous.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::board::{keys, read, write_for_all};
use super::endpoint::Connected;
use super::generation::{self, Changes, Refusal};
use super::members::Members;
use super::options::AgentOptions;
use super::plan::{Attempt, Cause, End, Generation, Losses, Member, Node, Over, Stop, nodes};
use super::seats::{Decision, Seats, TermStore};
use super::stores;
use crate::Result;
use crate::link::{AgentLink, GoingOn};
use fulgurite_error::{counted, print_message};
use fulgurite_store::JobKey;
use signal_hook::consts::SIGTERM;

const POLL: Duration = Duration::from_millis(100);
/// Time that agents have to report the end of their ranks, beyond the ranks' own time to end.
const ENDING: Duration = Duration::from_secs(30);
/// Number of the last generations whose stores stay open.
const KEPT_STORES: usize = 3;
/// How long agents are waited for that are asked to leave with another one: if all are, the job
/// ends.
const LEAVE_TOGETHER: Duration = Duration::from_secs(1);
/// Time after which the coordinator says how many nodes are there.
const SAYS_THAT_IT_WAITS: Duration = Duration::from_secs(5);
/// How long a new agent must be there before an elastic job takes it in.
const SETTLED: Duration = Duration::from_secs(1);

struct Coordinator {
    seats: Arc<Seats>,
    store: TermStore,
    options: AgentOptions,
    members: Members,
    /// This agent, and its host.
    own: (u64, String),
    /// This host's address, and the job's secret.
    address: IpAddr,
    secret: String,
    decided: Option<Decision>,
    /// The host of the coordinator before, whose store the ranks use if the job is elastic.
    lost_coordinator: Option<String>,
    /// Since when an agent asks to leave.
    leaving: Option<Instant>,
}

/// Waits until this agent wins the seats, and then coordinates the job to its end. `own` is the
/// agent and its host.
///
/// # Errors
/// If the agents' store is gone, and with it this agent; or if the others may go on without this
/// coordinator.
pub(super) fn coordinate(
    seats: Arc<Seats>,
    connected: Connected,
    (address, secret): (&str, &str),
    options: AgentOptions,
    own: (u64, String),
) -> Result<()> {
    let Some((store, before)) = seats.win()? else { return Ok(()) };
    let mut coordinator = Coordinator {
        seats,
        members: Members::new(store.clone(), connected, options.clone()),
        store,
        options,
        own,
        address: address.parse().unwrap_or(Ipv4Addr::LOCALHOST.into()),
        secret: secret.to_owned(),
        decided: None,
        lost_coordinator: None,
        leaving: None,
    };
    let attempt = before.map(|before| coordinator.take_over(before)).transpose()?;
    coordinator.run(attempt)
}

impl Coordinator {
    /// Goes on in the place of a coordinator that is lost.
    ///
    /// # Errors
    /// As [`Seats::decide`].
    fn take_over(&mut self, before: Decision) -> Result<(Attempt, Vec<u64>)> {
        let (_, host) = &before.coordinator;
        print_message(&format!(
            "warning: the agent that coordinated the job, on {host}, is lost. This agent coordinates it now"
        ));
        self.members.take_over(&before);
        self.lost_coordinator = Some(host.clone());
        let attempt = (before.attempt.clone(), before.restarts.clone());
        // So that the next coordinator knows whom it replaces.
        let decision = Decision { coordinator: self.own.clone(), ..before };
        self.decided = Some(decision.clone());
        self.seats.decide(decision)?;
        Ok(attempt)
    }

    /// Runs the job's attempts. `begun` is the attempt of a coordinator before, if there was one.
    fn run(&mut self, mut begun: Option<(Attempt, Vec<u64>)>) -> Result<()> {
        if let Some(over) = self.decided.as_ref().and_then(|decided| decided.over.clone()) {
            return write_for_all(&self.store, keys::OVER, &over);
        }
        // Unique, so that nothing left by an earlier job of the same name is resumed.
        let random =
            || -> Result<String> { Ok(JobKey::random_secret()?.chars().take(12).collect()) };
        let (id, log_name) = match (&begun, self.options.id.clone()) {
            (Some((attempt, _)), _) => (attempt.id.clone(), attempt.log_name.clone()),
            (None, Some(id)) => (id.clone(), format!("{id}_{}", random()?)),
            (None, None) => random().map(|id| (id.clone(), id))?,
        };
        let (mut restarts, mut number) = (0, 1);
        loop {
            let (last, end) = match begun.take() {
                Some((attempt, of_ranks)) => {
                    restarts = attempt.restarts;
                    self.watch_generations(attempt, of_ranks, true)?
                }
                None => {
                    let agents = match self.gather(number == 1)? {
                        Ok(agents) => agents,
                        Err(message) => return self.over(1, Some(message)),
                    };
                    let nodes = nodes(&agents, self.options.nodes.most);
                    let (id, log_name) = (id.clone(), log_name.clone());
                    let (store, generation) = ((String::new(), 0), None);
                    let attempt =
                        Attempt { id, log_name, number, restarts, nodes, store, generation };
                    let of_ranks = vec![0; attempt.world_size()];
                    self.watch_generations(attempt, of_ranks, false)?
                }
            };
            number = last + 1;
            let (message, code) = match end {
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
    }

    /// Runs an attempt and the generations after it. Returns the number of the last one, and its
    /// end. `restarts` has the number of new processes of each rank; `has_begun` is true if an
    /// earlier coordinator has decided on the attempt.
    fn watch_generations(
        &mut self,
        mut attempt: Attempt,
        mut restarts: Vec<u64>,
        mut has_begun: bool,
    ) -> Result<(u64, End)> {
        // A process that starts slowly may still look for the store of an earlier generation.
        let mut stores = VecDeque::new();
        loop {
            if !std::mem::take(&mut has_begun) {
                self.lost_coordinator = None;
                let key = AgentLink::job_key_of(&self.secret, &attempt.id, attempt.number);
                let store = stores::bind(self.address, key, attempt.world_size())?;
                attempt.store = (self.address.to_string(), store.address().port());
                stores.push_back(store);
                stores.drain(..stores.len().saturating_sub(KEPT_STORES));
                self.decide(&attempt, &restarts)?;
            }
            write_for_all(&self.store, keys::ATTEMPT, &attempt)?;
            match self.watch(&attempt, &restarts)? {
                Watched::End(end) => return Ok((attempt.number, end)),
                Watched::GoesOn(next, next_restarts) => {
                    say_going_on(&next);
                    (attempt, restarts) = (*next, next_restarts);
                }
            }
        }
    }

    /// Decides on an attempt, before any agent hears of it.
    fn decide(&mut self, attempt: &Attempt, restarts: &[u64]) -> Result<()> {
        let decision = Decision {
            attempt: attempt.clone(),
            restarts: restarts.to_vec(),
            agents: self.members.listed(),
            lost_hosts: self.members.lost_hosts().clone(),
            coordinator: self.own.clone(),
            over: None,
        };
        self.decided = Some(decision.clone());
        self.seats.decide(decision)
    }

    fn over(&self, code: i32, message: Option<String>) -> Result<()> {
        let over = Over { code, message };
        if let Some(decided) = self.decided.clone() {
            self.seats.decide(Decision { over: Some(over.clone()), ..decided })?;
        }
        write_for_all(&self.store, keys::OVER, &over)
    }

    /// Records what agents have said, as long as this one coordinates the job.
    fn look(&mut self) -> Result<()> {
        self.seats.check()?;
        self.members.look()
    }

    /// Returns the agents of the next attempt once there are enough, or the error message after a
    /// timeout.
    fn gather(&mut self, first: bool) -> Result<std::result::Result<Vec<(u64, Member)>, String>> {
        let (began, mut enough, mut said) = (Instant::now(), None::<Instant>, None);
        let (least, most) = (self.options.nodes.least, self.options.nodes.most);
        loop {
            self.look()?;
            let alive = self.members.alive();
            let again = if first { "" } else { " again" };
            let hosts = || match alive.is_empty() {
                true => "none".to_owned(),
                false => alive.iter().map(|(_, one)| &*one.host).collect::<Vec<_>>().join(", "),
            };
            if alive.len() >= most {
                return Ok(Ok(alive));
            }
            if alive.len() < least {
                enough = None;
            } else if enough.get_or_insert_with(Instant::now).elapsed() >= self.options.last_call {
                return Ok(Ok(alive));
            }
            if enough.is_none() && began.elapsed() >= self.options.join_timeout {
                return Ok(Err(format!(
                    "after {:?} there are {} of {least} nodes{again}: {}. Start the same command on the others, \
                     with the same --rdzv-endpoint and --rdzv-id",
                    self.options.join_timeout,
                    alive.len(),
                    hosts()
                )));
            }
            let waits = enough.is_none() && began.elapsed() >= SAYS_THAT_IT_WAITS;
            if waits && said != Some(alive.len()) {
                said = Some(alive.len());
                print_message(&format!(
                    "{} of {least} nodes are there{again}: {}. The job waits for the others, for {} s more at most",
                    alive.len(),
                    hosts(),
                    self.options.join_timeout.saturating_sub(began.elapsed()).as_secs()
                ));
            }
            std::thread::sleep(POLL);
        }
    }

    /// Returns what has changed in an attempt of an elastic job, and whether it may go on. It may
    /// not if a rank is done with the training, or if the job was asked to end.
    fn changes(&mut self, attempt: &Attempt) -> (Changes, bool) {
        let coordinator = self.lost_coordinator.clone();
        let (mut changes, mut may_go_on) = (Changes { coordinator, ..Changes::default() }, true);
        for node in &attempt.nodes {
            let losses = keys::losses(attempt.number, node.agent);
            let losses: Losses = read(&self.store, &losses).unwrap_or_default();
            if let Some(why) = self.failed_to_come(attempt, node) {
                changes.gone.insert(node.agent, format!("cannot join: {why}"));
                continue;
            }
            let has_ended: Option<End> = read(&self.store, &keys::end(attempt.number, node.agent));
            may_go_on &= !losses.ends && has_ended.is_none();
            changes.lost.extend(losses.lost);
            if losses.leaves {
                changes.leaving.insert(node.agent);
            }
            if let Some(silent) = self.members.silent_for(node.agent) {
                changes.gone.insert(node.agent, format!("was not heard of for {silent:?}"));
            }
        }
        let asked: Option<i32> = read(&self.store, &keys::interrupt(attempt.number));
        may_go_on &= asked.is_none();
        match changes.leaving.is_empty() {
            true => self.leaving = None,
            false if self.leaving.get_or_insert_with(Instant::now).elapsed() >= LEAVE_TOGETHER => {}
            false => changes.leaving.clear(),
        }
        // After a loss all agents that are there are needed at once.
        let is_loss = changes.is_loss() || !changes.leaving.is_empty();
        let settled = if is_loss { Duration::ZERO } else { SETTLED };
        changes.come = self.members.comers(attempt, settled);
        (changes, may_go_on)
    }

    /// The failure of a node that was to be taken in, whose ranks have not all come. The job goes
    /// on without it.
    fn failed_to_come(&self, attempt: &Attempt, node: &Node) -> Option<String> {
        if !node.joins {
            return None;
        }
        let (number, agent) = (attempt.number, node.agent);
        let losses: Option<Losses> = read(&self.store, &keys::losses(number, agent));
        if losses.is_some_and(|losses| losses.all_have_come) {
            return None;
        }
        let failing = read::<(String, i32)>(&self.store, &keys::failing(number, agent));
        match (failing, read(&self.store, &keys::end(number, agent))) {
            (Some((message, _)), _) | (None, Some(End::Failed { message, .. })) => Some(message),
            _ => None,
        }
    }

    /// Whether an agent has told that its ranks of an attempt fail, or have ended.
    fn has_failed(&self, attempt: &Attempt, node: &Node) -> bool {
        let (number, agent) = (attempt.number, node.agent);
        read::<(String, i32)>(&self.store, &keys::failing(number, agent)).is_some()
            || read::<End>(&self.store, &keys::end(number, agent)).is_some()
    }

    /// Whether a rank has ended well that was to go on in this generation.
    fn is_done(&self, attempt: &Attempt) -> bool {
        attempt.generation.is_some()
            && attempt.nodes.iter().any(|node| {
                let losses = keys::losses(attempt.number, node.agent);
                read::<Losses>(&self.store, &losses).is_some_and(|losses| losses.done)
            })
    }

    /// Whether this coordinator knows from all agents of an attempt what they told the one before,
    /// unless they are lost. An agent's first heartbeat comes after that.
    fn all_have_told(&self, attempt: &Attempt) -> bool {
        attempt.nodes.iter().all(|node| {
            self.members.has_told(node.agent) || self.members.silent_for(node.agent).is_some()
        })
    }

    /// Returns how an elastic job goes on after what has changed.
    fn next_generation(&mut self, attempt: &Attempt, restarts: &[u64]) -> Result<Next> {
        // What follows is said in ranks of this attempt, so all agents must have begun it.
        let mut all_told = Vec::new();
        for node in &attempt.nodes {
            let key = keys::going_on(attempt.number, node.agent);
            match read::<GoingOn>(&self.store, &key) {
                Some(told) => all_told.push(told),
                None if self.members.silent_for(node.agent).is_some() => {}
                None if self.failed_to_come(attempt, node).is_some() => {}
                // A loss that is known already must not pass for the end of the job.
                None if attempt.generation.is_some() && !self.has_failed(attempt, node) => {
                    return Ok(Next::Later);
                }
                None => return Ok(Next::Nothing),
            }
        }
        // Only the agent of rank 0 knows of its work. All agents may be gone before they tell it.
        let before = attempt.generation.as_ref().map(|generation| &generation.going_on);
        let known = all_told.iter().find(|told| told.work.is_some()).or(all_told.first());
        let Some(going_on) = known.or(before).cloned() else { return Ok(Next::Nothing) };
        let (mut changes, may_go_on) = self.changes(attempt);
        let is_wanted = !changes.come.is_empty() || !changes.leaving.is_empty();
        let is_due = changes.is_loss() || is_wanted && may_go_on;
        if !is_due {
            return Ok(Next::Nothing);
        }
        let allowed = self.options.nodes;
        let cannot_join =
            attempt.nodes.iter().any(|node| self.failed_to_come(attempt, node).is_some());
        let next = |changes: &Changes| match may_go_on {
            true => generation::next(attempt, changes, restarts, &going_on, allowed),
            false => Err(Refusal::Over),
        };
        let mut result = next(&changes);
        if let Err(Refusal::TooFew(why)) = &result
            && !changes.leaving.is_empty()
        {
            if !changes.is_loss() {
                return Ok(Next::Ends(format!("{}: {why}", changes.cause(attempt))));
            }
            // The losses come first. Who leaves may be the last to have the state.
            changes.leaving.clear();
            result = next(&changes);
        }
        let why = match result {
            Ok(next) => {
                let is_out = |rank: usize| {
                    changes.lost.contains_key(&rank) && restarts[rank] >= going_on.max_restarts
                };
                self.note_lost_nodes(attempt, &changes, &next.0, &is_out)?;
                return Ok(Next::Generation(Box::new(next.0), next.1));
            }
            // An agent that has come may be admitted soon.
            Err(Refusal::TooFew(_)) if self.members.is_to_admit() => return Ok(Next::Later),
            Err(Refusal::TooFew(why)) => format!(", and the job cannot go on: {why}"),
            // A node that is lost once the job is over is noticed below.
            Err(_) if changes.lost.is_empty() && !cannot_join => return Ok(Next::Nothing),
            Err(Refusal::Unchanged | Refusal::Over) => String::new(),
        };
        let cause = changes.cause(attempt);
        let code = changes.lost.first_key_value().map_or(1, |(_, loss)| loss.code);
        Ok(Next::Failed { message: format!("{cause}{why}"), rank: cause.rank(), code })
    }

    /// Notes hosts that are lost. Notes agents that leave, or are left out with a rank that was
    /// lost too often (`is_out`): these are not taken in again.
    fn note_lost_nodes(
        &mut self,
        before: &Attempt,
        changes: &Changes,
        next: &Attempt,
        is_out: &dyn Fn(usize) -> bool,
    ) -> Result<()> {
        for node in before.nodes.iter().filter(|node| next.place(node.agent).is_none()) {
            if let Some(why) = self.failed_to_come(before, node) {
                self.members
                    .refuse(node.agent, &format!("the job goes on without this node: {why}"))?;
                continue;
            }
            let mut ranks = node.first_rank..node.first_rank + node.devices;
            if changes.leaving.contains(&node.agent) {
                self.members.leave_out(node.agent);
            } else if changes.gone.contains_key(&node.agent) {
                self.members.note_lost_host(node.agent);
            } else if ranks.any(is_out) {
                self.members.leave_out(node.agent);
            }
        }
        Ok(())
    }

    /// Waits until the ranks of an attempt have ended on all nodes, or an elastic job goes on
    /// without some of them. `restarts` has the number of new processes of each rank.
    fn watch(&mut self, attempt: &Attempt, restarts: &[u64]) -> Result<Watched> {
        let mut verdict = None::<End>;
        let mut failed_rank = None;
        let (mut stopped_at, mut is_done) = (None::<Instant>, false);
        loop {
            self.look()?;
            if !self.all_have_told(attempt) {
                std::thread::sleep(POLL);
                continue;
            }
            if verdict.is_none() {
                match self.next_generation(attempt, restarts)? {
                    Next::Nothing => {}
                    Next::Later => {
                        std::thread::sleep(POLL);
                        continue;
                    }
                    Next::Generation(next, restarts) => {
                        return Ok(Watched::GoesOn(next, restarts));
                    }
                    Next::Ends(why) => {
                        print_message(&format!("the job ends, because {why}"));
                        let key = keys::interrupt(attempt.number);
                        write_for_all(&self.store, &key, &SIGTERM)?;
                    }
                    Next::Failed { message, rank, code } => {
                        failed_rank = Some(rank);
                        verdict = Some(End::Failed { message, code });
                    }
                }
            }
            let (mut running, mut interrupted, mut all_well) = (0, None, true);
            for (place, node) in attempt.nodes.iter().enumerate() {
                let failing = read(&self.store, &keys::failing(attempt.number, node.agent));
                let end: Option<End> = read(&self.store, &keys::end(attempt.number, node.agent));
                // It may have failed since the question above.
                if verdict.is_none() && self.failed_to_come(attempt, node).is_some() {
                    running += 1;
                    continue;
                }
                if let (None, Some((message, code))) = (&verdict, failing) {
                    failed_rank = Some(node.first_rank);
                    verdict = Some(End::Failed { message, code });
                }
                let silent = self.members.silent_for(node.agent);
                match (end, &verdict) {
                    (Some(End::Failed { message, code }), None) => {
                        failed_rank = Some(node.first_rank);
                        verdict = Some(End::Failed { message, code });
                    }
                    (Some(End::Interrupted(signal)), _) => interrupted = Some(signal),
                    (Some(End::Stopped), _) => all_well = false,
                    (Some(_), _) => {}
                    (None, None) if let Some(silent) = silent => {
                        let message = format!(
                            "node {place} ({}) has not been heard of for {silent:?}: it is down, or cut off, \
                             or its agent was killed",
                            node.host
                        );
                        failed_rank = Some(node.first_rank);
                        verdict = Some(End::Failed { message, code: 1 });
                    }
                    (None, Some(_)) if silent.is_some() => {}
                    (None, _) => running += 1,
                }
            }
            if let (Some(End::Failed { message, .. }), None) = (&verdict, stopped_at) {
                let stop = Stop { message: message.clone(), rank: failed_rank, is_done: false };
                write_for_all(&self.store, &keys::stop(attempt.number), &stop)?;
                stopped_at = Some(Instant::now());
            }
            // Some ranks had reached the end of the training when the others were invited.
            if verdict.is_none() && !is_done && self.is_done(attempt) {
                is_done = true;
                let rank = Some(attempt.world_size());
                let message = "the training has ended without the last generation".to_owned();
                let stop = Stop { message, rank, is_done };
                write_for_all(&self.store, &keys::stop(attempt.number), &stop)?;
                stopped_at = Some(Instant::now());
            }
            // Does not wait for a live agent that does not report the end of its ranks.
            let overdue = stopped_at.is_some_and(|at| at.elapsed() > ENDING);
            if running == 0 || overdue {
                if verdict.is_none() && interrupted.is_none() && (all_well || is_done) {
                    return Ok(Watched::End(End::Well));
                }
                // An interruption takes precedence over the ranks' end.
                let asked = || read(&self.store, &keys::interrupt(attempt.number));
                return Ok(Watched::End(match (interrupted.or_else(asked), verdict) {
                    (Some(signal), _) => End::Interrupted(signal),
                    (None, Some(failed)) => failed,
                    (None, None) => End::Stopped,
                }));
            }
            std::thread::sleep(POLL);
        }
    }
}

/// How an elastic job goes on.
enum Next {
    /// As before.
    Nothing,
    /// It cannot be said yet: an agent has not begun this generation, or is not admitted.
    Later,
    /// In this generation, with the number of new processes of each of its ranks.
    Generation(Box<Attempt>, Vec<u64>),
    /// Not: a node was asked to leave, and cannot be spared.
    Ends(String),
    /// Not: this rank's loss ends it.
    Failed { message: String, rank: usize, code: i32 },
}

/// What follows an attempt.
enum Watched {
    End(End),
    /// The next generation, and the number of new processes of each of its ranks.
    GoesOn(Box<Attempt>, Vec<u64>),
}

/// Prints why and how the job goes on.
fn say_going_on(next: &Attempt) {
    let Some(Generation { number, members, cause, .. }) = &next.generation else { return };
    let new = match members.iter().filter(|before| before.is_none()).count() {
        0 => String::new(),
        1 => ", of which 1 is new".to_owned(),
        new => format!(", of which {new} are new"),
    };
    let is_wanted = matches!(cause, Cause::Joined { .. } | Cause::Left { .. });
    let warning = if is_wanted { "" } else { "warning: " };
    print_message(&format!(
        "{warning}{cause}. The job goes on: generation {number} has {} on {}{new}",
        counted(next.world_size() as u64, "rank"),
        counted(next.nodes.len() as u64, "node")
    ));
}
