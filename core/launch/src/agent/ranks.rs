//! The ranks of one node in one attempt.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use super::logs::Output;
use super::options::AgentOptions;
use super::plan::{Attempt, End, Loss, Losses, Node, Stop};
use super::stores::Stores;
use crate::failure::PEER_FAILED_EXIT_CODE;
use crate::job_secret::JOB_KEY_VARIABLE;
use crate::launcher::threads_per_rank;
use crate::link::{AgentLink, GoingOn};
use crate::orphans::Orphans;
use crate::rank_env::AGENT_VARIABLE;
use crate::rank_process::{self, Escalation};
use crate::signals;
use crate::supervisor::THREADS_VARIABLE;
use crate::{Error, Result};
use fulgurite_error::{advice, print_message};
use fulgurite_store::Patience;

/// Time that ranks have to stop on their own after a failure, before SIGTERM.
const GRACE: Duration = Duration::from_secs(3);
/// Time that ranks have to stop before SIGKILL, if a signal asked them to end before the failure.
const GRACE_ONCE_ASKED: Duration = Duration::from_secs(2);
/// How long a rank of an elastic job may be stopped (SIGSTOP) while this process runs.
const STOPPED_GRACE: Duration = Duration::from_secs(2);
/// How long to wait for the last lines of ended ranks.
const COPY_GRACE: Duration = Duration::from_secs(2);

pub(super) struct Ranks {
    ranks: Vec<Rank>,
    stores: Stores,
    /// How long a later generation still waits for its ranks; `None` once all have come.
    joining: Option<Patience>,
    orphans: Orphans,
    /// This node, for messages: `node 1 (host)`.
    node: String,
    /// Description and exit code of this node's first failed rank.
    failed: Option<(String, i32)>,
    /// Set once the ranks must end.
    ending: Option<Escalation>,
    /// The first signal that asked the ranks to end.
    interrupted: Option<i32>,
    /// Whether the node was asked to leave the job.
    leaves: bool,
}

struct Rank {
    rank: usize,
    process: Child,
    copies: Vec<JoinHandle<()>>,
    /// Its stderr file, if stderr is not on the terminal.
    log: Option<PathBuf>,
    end: Option<ExitStatus>,
    /// Whether this agent killed it.
    killed: bool,
    /// Since when the process is stopped.
    stopped: Option<Patience>,
    /// How the process was lost, in an elastic job that may go on without it. The loss may come
    /// just before the next generation, which counts on the process.
    lost: Option<Loss>,
}

/// What the ranks of a node are started with.
pub(super) struct Start<'a> {
    pub(super) options: &'a AgentOptions,
    pub(super) attempt: &'a Attempt,
    /// The node's place.
    pub(super) place: usize,
    /// Where the ranks meet.
    pub(super) address: &'a (String, u16),
    pub(super) secret: &'a str,
    /// When the agent started, in seconds since 1970.
    pub(super) started: f64,
    /// Whether a failure to write the ranks' output was reported.
    pub(super) said: &'a Arc<AtomicBool>,
}

impl Ranks {
    /// Starts the ranks of a node.
    ///
    /// # Errors
    /// If a rank cannot be started; the ranks started before are ended.
    pub(super) fn start(start: &Start<'_>, orphans: &Orphans) -> Result<Self> {
        let node = start.node();
        let stores = Stores::new(start)?;
        let mut ranks = Self {
            ranks: Vec::new(),
            stores,
            // Running ranks wait for a node that is taken in.
            joining: start
                .attempt
                .generation
                .as_ref()
                .map(|it| it.going_on.join_timeout)
                .map(Patience::new),
            orphans: orphans.clone(),
            node: start.attempt.node_name(start.place),
            failed: None,
            ending: None,
            interrupted: None,
            leaves: false,
        };
        for rank in node.first_rank..node.first_rank + node.devices {
            match start.rank(rank, ranks.stores.own_port()) {
                Ok(rank) => ranks.ranks.push(rank),
                Err(error) => {
                    ranks.kill();
                    return Err(error);
                }
            }
        }
        Ok(ranks)
    }

    /// Lets the ranks go on in the next generation of an elastic job. Starts new processes, ends
    /// processes without a place in it, and invites the others.
    ///
    /// # Errors
    /// If a rank cannot be started. The others wait then, and must be ended.
    pub(super) fn go_on(&mut self, start: &Start<'_>) -> Result<()> {
        let Some(generation) = &start.attempt.generation else { return Ok(()) };
        let node = start.node();
        let mut stores = Stores::new(start)?;
        let mut before = std::mem::take(&mut self.ranks);
        for rank in node.first_rank..node.first_rank + node.devices {
            let is_same = |process: &Rank| generation.members[rank] == Some(process.rank);
            let rank = match before.iter().position(is_same) {
                Some(at) => Ok(Rank { rank, ..before.remove(at) }),
                None => start.rank(rank, stores.own_port()),
            };
            match rank {
                Ok(rank) => self.ranks.push(rank),
                Err(error) => {
                    self.ranks.append(&mut before);
                    return Err(error);
                }
            }
        }
        for mut left_out in before.into_iter().filter(|rank| rank.end.is_none()) {
            signal_group(&left_out, Signal::KILL);
            let _ = left_out.process.wait();
        }
        stores.follow(std::mem::take(&mut self.stores), start, generation);
        self.stores = stores;
        self.node = start.attempt.node_name(start.place);
        let join_timeout = self.stores.going_on().map(|going_on| going_on.join_timeout);
        self.joining = join_timeout.map(Patience::new);
        Ok(())
    }

    /// How the job goes on after a loss, once its ranks have told it.
    pub(super) fn going_on(&mut self) -> Option<&GoingOn> {
        self.stores.going_on()
    }

    /// What this agent says of lost ranks.
    pub(super) fn losses(&self) -> Losses {
        let (mut ends, mut done, mut all_have_come) = (false, false, true);
        for (local_rank, rank) in self.ranks.iter().enumerate() {
            let by_itself = match rank.end {
                Some(end) => end.signal().is_none(),
                None => rank_process::has_exited(&rank.process),
            };
            ends |= by_itself || self.stores.has_left(local_rank);
            let is_well = rank.end.is_some_and(|end| end.code() == Some(0));
            done |= is_well && !self.stores.has_joined(local_rank);
            all_have_come &= self.stores.has_joined(local_rank);
        }
        let lost = self.ranks.iter().filter_map(|rank| Some((rank.rank, rank.lost.clone()?)));
        Losses { lost: lost.collect(), ends, done, all_have_come, leaves: self.leaves }
    }

    /// Whether ranks are lost, and it is not decided yet how the job goes on.
    fn waits_for_decision(&self) -> bool {
        self.ranks.iter().any(|rank| rank.lost.is_some())
            && self.ending.is_none()
            && self.interrupted.is_none()
    }

    /// Kills ranks of an elastic job that are stopped while this process runs, and ranks of a later
    /// generation that have not come in time.
    fn end_absent_ranks(&mut self) {
        if self.ending.is_some() || self.stores.going_on().is_none() {
            return;
        }
        let late = self.joining.as_mut().is_some_and(|patience| patience.slice().is_none());
        let mut all_have_come = true;
        for (local_rank, rank) in self.ranks.iter_mut().enumerate() {
            if rank.end.is_some() {
                continue;
            }
            let has_come = self.stores.has_joined(local_rank);
            all_have_come &= has_come;
            if !rank_process::is_stopped(&rank.process) {
                rank.stopped = None;
            } else {
                rank.stopped.get_or_insert_with(|| Patience::new(STOPPED_GRACE));
            }
            let stopped = rank.stopped.as_mut().is_some_and(|patience| patience.slice().is_none());
            if stopped || (late && !has_come) {
                signal_group(rank, Signal::KILL);
            }
        }
        if all_have_come {
            self.joining = None;
            self.stores.forget_earlier();
        }
    }

    /// Checks on the ranks. Returns their end once all have ended.
    pub(super) fn poll(&mut self) -> Option<End> {
        for i in 0..self.ranks.len() {
            self.poll_rank(i);
        }
        self.end_absent_ranks();
        if self.waits_for_decision() {
            let running = self.ranks.iter().filter(|rank| rank.end.is_none());
            self.orphans.reap(&running.map(group).collect::<Vec<_>>());
            return None;
        }
        if self.ranks.iter().any(|rank| rank.end.is_none()) {
            let running = self.ranks.iter().filter(|rank| rank.end.is_none());
            self.orphans.reap(&running.map(group).collect::<Vec<_>>());
            self.end_stragglers();
            return None;
        }
        self.end_orphans();
        // A process started by a rank may still hold its output open.
        let mut patience = Patience::new(COPY_GRACE);
        let copied = |rank: &Rank| rank.copies.iter().all(JoinHandle::is_finished);
        while !self.ranks.iter().all(copied) && patience.slice().is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some((message, code)) = &self.failed {
            // Takes precedence over an interruption: the ranks of other nodes must end too.
            return Some(End::Failed { message: message.clone(), code: *code });
        }
        let codes: Vec<i32> =
            self.ranks.iter().filter_map(|rank| rank.end).map(rank_process::exit_code).collect();
        // Ignores signals that this agent sent after a failure.
        let by_signal = |code: &&i32| signals::is_handled(**code - 128);
        let asked = self.interrupted.is_some() || self.ending.is_none();
        let interrupted = codes.iter().find(by_signal).filter(|_| asked).map(|code| code - 128);
        Some(match interrupted.or(self.interrupted) {
            _ if codes.iter().all(|&code| code == 0) => End::Well,
            // The ranks may have agreed on another signal than the first one.
            Some(signal) => End::Interrupted(signal),
            None => End::Stopped,
        })
    }

    fn poll_rank(&mut self, i: usize) {
        let rank = &mut self.ranks[i];
        if rank.end.is_some() {
            return;
        }
        if !rank_process::has_ended(&rank.process) {
            return;
        }
        // Kills the processes that the rank left behind.
        signal_group(rank, Signal::KILL);
        let end = rank_process::end_of(&mut rank.process);
        rank.end = Some(end);
        let log = rank.log.as_ref().map(|path| format!("; see {}", path.display()));
        // If two ranks have ended since the last check, one may have caused the other's end.
        let killed = rank.killed;
        let (rank, ending) = (rank.rank, self.ending.is_some());
        let asked = ending || self.interrupted.is_some();
        match (end.code(), end.signal()) {
            (Some(0), _) => return,
            (Some(code), _) if signals::is_handled(code - 128) => return,
            (Some(code), _) if code == i32::from(PEER_FAILED_EXIT_CODE) => {
                // The failed rank is reported elsewhere; the rest of this node ends too.
                return self.stop();
            }
            (None, Some(signal)) if killed && signal == Signal::KILL.as_raw() => return,
            (None, Some(signal)) if asked && signals::is_handled(signal) => return,
            (None, Some(_)) if !asked && self.stores.going_on().is_some() => {
                let how = rank_process::describe(end) + &log.unwrap_or_default();
                self.ranks[i].lost = Some(Loss { how, code: rank_process::exit_code(end) });
                return;
            }
            _ => {}
        }
        if self.failed.is_none() {
            let (how, log) = (rank_process::describe(end), log.unwrap_or_default());
            let message = format!("rank {rank} on {} {how}{log}", self.node);
            print_message(&format!("error: {message}"));
            self.failed = Some((message, rank_process::exit_code(end)));
        }
        self.stop();
    }

    /// Description and exit code of the first failed rank.
    pub(super) fn failed(&self) -> Option<&(String, i32)> {
        self.failed.as_ref()
    }

    /// The first signal that asked the ranks to end.
    pub(super) fn interrupted(&self) -> Option<i32> {
        self.interrupted
    }

    /// Asks the ranks to end, unless they were asked before.
    pub(super) fn interrupt(&mut self, signal: i32) {
        if self.interrupted.is_none() {
            self.interrupted = Some(signal);
            self.signal(signals::forwarded(signal));
        }
    }

    /// Asks for a next generation without this node. Returns whether the job can have one, and has
    /// not been asked before.
    pub(super) fn leave(&mut self) -> bool {
        let asks = self.interrupted.is_none() && !self.leaves && self.going_on().is_some();
        self.leaves |= asks;
        asks
    }

    /// Whether the node was asked to leave the job.
    pub(super) fn leaves(&self) -> bool {
        self.leaves
    }

    /// Whether the ranks must end.
    pub(super) fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Makes the ranks end, because a rank has failed.
    pub(super) fn stop_after(&mut self, failure: &Stop) {
        self.stores.fail(failure);
        self.stop();
    }

    /// Makes the ranks end: first on their own, then by signals.
    pub(super) fn stop(&mut self) {
        let asked = self.interrupted.is_some();
        self.ending.get_or_insert_with(|| match asked {
            true => Escalation::to_kill_after(GRACE_ONCE_ASKED),
            false => Escalation::after(GRACE),
        });
    }

    fn end_stragglers(&mut self) {
        if let Some(signal) = self.ending.as_mut().and_then(Escalation::due) {
            self.signal(signal);
        }
    }

    /// Kills the ranks after a second request to end.
    pub(super) fn end_at_once(&mut self) {
        self.stop();
        self.signal(Signal::KILL);
    }

    /// Signals the ranks that have not ended.
    fn signal(&mut self, signal: Signal) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.end.is_none()) {
            rank.killed |= signal == Signal::KILL && !rank_process::has_ended(&rank.process);
            signal_group(rank, signal);
        }
    }

    /// Kills all ranks.
    pub(super) fn kill(&mut self) {
        if self.ranks.iter().all(|rank| rank.end.is_some()) {
            return;
        }
        self.signal(Signal::KILL);
        for rank in self.ranks.iter_mut().filter(|rank| rank.end.is_none()) {
            rank.end = rank.process.wait().ok();
        }
        self.end_orphans();
    }

    /// Ends processes that ranks have left behind, once the ranks have ended.
    fn end_orphans(&self) {
        let groups: Vec<Pid> = self.ranks.iter().map(group).collect();
        self.orphans.end(&groups, self.ranks.iter().any(|rank| rank.killed));
    }
}

impl Start<'_> {
    fn node(&self) -> &Node {
        &self.attempt.nodes[self.place]
    }

    /// This agent's link to its ranks in an elastic job. `port` is that of the agent's own store.
    pub(super) fn link(&self, port: u16) -> AgentLink {
        let Self { options, attempt, .. } = self;
        let generation = attempt.generation.as_ref();
        AgentLink {
            agent: std::process::id().cast_signed(),
            id: attempt.id.clone(),
            attempt: attempt.number,
            started: self.started,
            generation: generation.map_or(0, |generation| generation.number),
            first_world_size: generation
                .map_or(attempt.world_size(), |generation| generation.first_world_size),
            most_ranks: attempt.world_size().max(options.nodes.most * options.devices),
            store: attempt.store.clone(),
            port,
            keep_alive: match options.endpoints.len() {
                // A single host is not lost without its ranks.
                0 => Duration::ZERO,
                1 => options.keep_alive,
                // The coordinator may be lost too, at any time before the host's loss is noticed.
                _ => 4 * options.keep_alive,
            },
            work: generation.and_then(|generation| generation.going_on.work.clone()),
        }
    }

    /// Starts a rank. `port` is the agent's, as for [`link`](Self::link).
    fn rank(&self, rank: usize, port: u16) -> Result<Rank> {
        let Self { options, attempt, place, address, secret, .. } = self;
        let node = self.node();
        let output = Output::new(options, attempt, rank, self.said)?;
        let mut command = Command::new(&options.program);
        command.args(&options.arguments);
        let (link_name, link) = self.link(port).variable();
        for (name, value) in [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", attempt.world_size().to_string()),
            ("LOCAL_RANK", (rank - node.first_rank).to_string()),
            ("LOCAL_WORLD_SIZE", node.devices.to_string()),
            ("GROUP_RANK", place.to_string()),
            ("NODE_RANK", place.to_string()),
            ("GROUP_WORLD_SIZE", attempt.nodes.len().to_string()),
            ("MASTER_ADDR", address.0.clone()),
            ("MASTER_PORT", address.1.to_string()),
            ("TORCHELASTIC_RUN_ID", attempt.id.clone()),
            ("TORCHELASTIC_RESTART_COUNT", attempt.restarts.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", options.max_restarts.to_string()),
            (JOB_KEY_VARIABLE, (*secret).to_owned()),
            (AGENT_VARIABLE, std::process::id().to_string()),
            (link_name, link),
        ] {
            command.env(name, value);
        }
        command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
        if std::env::var_os(THREADS_VARIABLE).is_none() {
            command.env(THREADS_VARIABLE, threads_per_rank(node.devices).to_string());
        }
        output.set(&mut command);
        // A process group per rank, so that its child processes end with it. It cannot read the
        // terminal.
        let started = command.process_group(0).stdin(Stdio::null()).spawn();
        let log = output.hidden();
        let started = started.and_then(|mut process| match output.copy(&mut process) {
            Ok(copies) => Ok(Rank {
                rank,
                process,
                copies,
                log,
                end: None,
                killed: false,
                stopped: None,
                lost: None,
            }),
            Err(error) => {
                let _ = kill_process_group(Pid::from_child(&process), Signal::KILL);
                let _ = process.wait();
                Err(error)
            }
        });
        started.map_err(|error| {
            let program = options.program.to_string_lossy();
            let advice = advice(&error);
            Error::Launch(format!(
                "rank {rank} cannot be started: running `{program}`: {error}{advice}"
            ))
        })
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A rank's process, which leads its process group.
fn group(rank: &Rank) -> Pid {
    Pid::from_child(&rank.process)
}

fn signal_group(rank: &Rank, signal: Signal) {
    let _ = kill_process_group(group(rank), signal);
}
