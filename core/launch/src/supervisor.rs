//! The parent process of the ranks: starts them, waits for them, and ends all when one fails.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::elastic::{Elastic, Invitation};
use super::failure::PEER_FAILED_EXIT_CODE;
use super::job_memory::JobMemory;
use super::launcher::threads_per_rank;
use super::orphans::Orphans;
use super::rank::RankInfo;
use super::rank_env::RankEnv;
use super::rank_process::{self, Escalation};
use super::signals::{self, SecondSignal};
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_error::{advice, counted, output, print_message};
use fulgurite_store::{JobKey, LostRankPolicy, Patience, StoreServer};

/// The variable for the number of rayon's threads, which candle uses too.
pub(super) const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";
/// Interval between checks on the ranks.
const POLL_INTERVAL: Duration = Duration::from_millis(15);
/// Time that ranks have to stop on their own after a failure, before SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
/// How long to wait for a failure that a rank knows and this process does not know yet.
const CAUSE_GRACE: Duration = Duration::from_secs(3);
/// How long a rank of an elastic job may be stopped (SIGSTOP) while this process runs.
const STOPPED_GRACE: Duration = Duration::from_secs(2);

/// Runs this program again as `devices` ranks and, when they have ended, ends this process.
///
/// # Errors
/// If a rank cannot be started; the ranks started before are killed.
pub(super) fn supervise(
    devices: usize,
    started: f64,
    variables: &Variables,
    elastic: Option<Elastic>,
) -> Result<Infallible> {
    signals::handle(SecondSignal::Ignore)?;
    let orphans = Orphans::adopt();
    let job = Job {
        secret: JobKey::random_secret()?,
        started,
        variables: variables.clone(),
        first_world_size: devices,
    };
    let server = job.host_store(0, devices)?;
    let memory = elastic.is_some().then(|| JobMemory::new(started));
    let mut ranks = Ranks {
        ranks: Vec::new(),
        orphans,
        job,
        generation: 0,
        elastic,
        joining: None,
        server,
        earlier: Vec::new(),
        stopped_by_unknown: None,
        failed: None,
        interrupted: None,
        killed: false,
    };
    for rank in 0..devices {
        let port = ranks.server.address().port();
        match ranks.job.start(rank, devices, 0, port) {
            Ok(process) => ranks.ranks.push(Rank::new(process, 0)),
            Err(error) => {
                ranks.signal_all(Signal::KILL);
                ranks.ranks.iter_mut().for_each(|rank| drop(rank.process.wait()));
                return Err(error);
            }
        }
    }
    let code = ranks.run();
    let hurry = ranks.killed || ranks.failed.is_some();
    drop((ranks, memory));
    match hurry {
        true => output::flush_briefly(),
        false => output::flush(),
    }
    std::process::exit(code)
}

/// What every rank of the job is started with.
struct Job {
    secret: String,
    started: f64,
    variables: Variables,
    first_world_size: usize,
}

impl Job {
    fn env(&self, info: RankInfo, generation: u64, port: u16) -> RankEnv {
        let supervisor = std::process::id().cast_signed();
        let (secret, started) = (self.secret.clone(), self.started);
        let first_world_size = self.first_world_size;
        RankEnv { supervisor, secret, started, info, generation, first_world_size, port }
    }

    /// Hosts the store of a generation.
    fn host_store(&self, generation: u64, world_size: usize) -> Result<StoreServer> {
        let key = self.env(RankInfo::ALONE, generation, 0).key();
        let address = (Ipv4Addr::LOCALHOST, 0).into();
        StoreServer::bind(address, key, world_size, LostRankPolicy::ParentReports)
    }

    /// Starts a rank of a generation, whose store has this port.
    fn start(&self, rank: usize, world_size: usize, generation: u64, port: u16) -> Result<Child> {
        let fail = |what: &str, e: std::io::Error| {
            let advice = advice(&e);
            Error::Launch(format!("cannot start rank {rank} of {world_size}: {what}: {e}{advice}"))
        };
        let program =
            std::env::current_exe().map_err(|e| fail("finding this program's file", e))?;
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1));
        let info = RankInfo {
            rank,
            world_size,
            local_rank: rank,
            local_world_size: world_size,
            node_rank: 0,
        };
        self.env(info, generation, port).set(&mut command);
        if !self.variables.is_set(THREADS_VARIABLE) {
            command.env(THREADS_VARIABLE, threads_per_rank(world_size).to_string());
        }
        // Only rank 0 may read the terminal.
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        command.spawn().map_err(|e| fail(&format!("running {}", program.display()), e))
    }
}

struct Ranks {
    /// The ranks of the present generation.
    ranks: Vec<Rank>,
    orphans: Orphans,
    job: Job,
    generation: u64,
    elastic: Option<Elastic>,
    /// How long a later generation still waits for its ranks; `None` once all have come.
    joining: Option<Patience>,
    /// The store of the present generation.
    server: StoreServer,
    /// The stores of generations whose ranks may not have read yet that they are over.
    earlier: Vec<StoreServer>,
    /// The first rank that ended because of another rank's failure while no failure was known, and
    /// how long to wait for the failure.
    stopped_by_unknown: Option<(usize, Patience)>,
    /// The job's failure, once it is printed.
    failed: Option<Failed>,
    /// The first signal that asked the ranks to end.
    interrupted: Option<i32>,
    /// Whether a second signal was received.
    killed: bool,
}

struct Rank {
    process: Child,
    /// How often a process of this rank was replaced.
    restarts: u64,
    /// Since when the process is stopped.
    stopped: Option<Patience>,
    end: Option<ExitStatus>,
    /// Description of the rank's end, if it is a failure that the rank did not report itself:
    /// `was killed by signal 9`.
    description: Option<String>,
}

impl Rank {
    fn new(process: Child, restarts: u64) -> Self {
        Self { process, restarts, stopped: None, end: None, description: None }
    }
}

struct Failed {
    rank: usize,
    /// For ranks that do not end on their own.
    escalation: Escalation,
}

impl Ranks {
    /// Waits until all ranks have ended and returns the exit code.
    fn run(&mut self) -> i32 {
        loop {
            self.handle_signals();
            let generation = self.generation;
            for rank in 0..self.ranks.len() {
                self.poll_rank(rank);
                // The ranks have other numbers now.
                if self.generation != generation {
                    break;
                }
            }
            self.end_stopped_ranks();
            self.end_absent_ranks();
            let ranks = self.ranks.iter().filter(|rank| rank.end.is_none());
            self.orphans
                .reap(&ranks.map(|rank| Pid::from_child(&rank.process)).collect::<Vec<_>>());
            self.settle_cause();
            self.print_failure();
            if self.ranks.iter().all(|rank| rank.end.is_some()) {
                break;
            }
            self.kill_stragglers();
            std::thread::sleep(POLL_INTERVAL);
        }
        self.orphans.end(&[], self.killed);
        self.print_other_failures();
        self.exit_code()
    }

    fn handle_signals(&mut self) {
        let Some(signal) = signals::take() else { return };
        let before = self.interrupted;
        if before.is_some() && signals::is_advance_notice(signal) {
            return;
        }
        if before.is_some_and(|before| !signals::is_advance_notice(before)) {
            self.killed = true;
            self.signal_all(Signal::KILL);
            return;
        }
        self.interrupted = Some(signal);
        let joined = (0..self.ranks.len()).all(|rank| self.server.has_joined(rank));
        print_message(if joined {
            "interrupted: the ranks finish their step; interrupt again to end them at once"
        } else {
            "interrupted while the ranks start: they end; interrupt again to end them at once"
        });
        // A terminal signals all processes, `kill` only this one. Ranks ignore duplicates.
        self.signal_all(signals::forwarded(signal));
    }

    /// Records the end of a rank, and notifies the other ranks if it is a failure.
    fn poll_rank(&mut self, rank: usize) {
        let this = &mut self.ranks[rank];
        if this.end.is_some() {
            return;
        }
        if !rank_process::has_ended(&this.process) {
            return;
        }
        let end = rank_process::end_of(&mut this.process);
        this.end = Some(end);
        // Read after the rank has ended, so that its own report is included.
        let failure_known = !self.server.failures().is_empty();
        let joined = self.server.has_joined(rank);
        if self.killed {
            return;
        }
        let asked_to_end = self.interrupted.is_some();
        let description = match (end.code(), end.signal()) {
            // A failure, since the other ranks wait for it to join.
            (Some(0), _) if !joined => "ended before it had launched".to_owned(),
            (Some(0), _) => return,
            // Other ranks wait for it to join. It was ended by a signal before its handlers were
            // set.
            (Some(code), _) if is_interruption(code) && !joined => {
                return self.announce(rank, code - 128);
            }
            (None, Some(signal)) if signals::is_handled(signal) && !joined => {
                return self.announce(rank, signal);
            }
            (Some(code), _) if is_interruption(code) => return,
            (Some(code), _) if code == i32::from(PEER_FAILED_EXIT_CODE) => {
                if !failure_known && self.generation > 0 && !joined {
                    let description = "ended instead of going on in the next generation";
                    self.server.fail(rank, &format!("it {description}"));
                    this.description = Some(description.to_owned());
                } else if !failure_known {
                    let patience = || (rank, Patience::new(CAUSE_GRACE));
                    self.stopped_by_unknown.get_or_insert_with(patience);
                }
                return;
            }
            (None, Some(signal)) if asked_to_end && signals::is_handled(signal) => return,
            _ => rank_process::describe(end),
        };
        if !failure_known && end.signal().is_some() && self.go_on_without(rank, &description) {
            return;
        }
        // The rank's own report says more; and after a first failure other ranks end because of it.
        if !failure_known {
            let this = &mut self.ranks[rank];
            self.server.fail(rank, &format!("it {description}"));
            this.description = Some(description);
        }
    }

    /// Begins the next generation after the process of `lost` was ended by a signal. Returns
    /// whether the job goes on.
    fn go_on_without(&mut self, lost: usize, description: &str) -> bool {
        let Some(elastic) = &self.elastic else { return false };
        let all = 0..self.ranks.len();
        // A rank that has left, or has ended by itself, is done with the training.
        let ends = all.clone().any(|rank| {
            let by_itself = match self.ranks[rank].end {
                Some(end) => end.signal().is_none(),
                None => rank_process::has_exited(&self.ranks[rank].process),
            };
            self.server.has_left(rank) || by_itself
        });
        if self.interrupted.is_some() || ends {
            return false;
        }
        let is_gone = |rank: &Rank| rank.end.is_some() || rank_process::has_ended(&rank.process);
        let mut members: Vec<usize> = Vec::new();
        for rank in all {
            let this = &self.ranks[rank];
            if !is_gone(this) || this.restarts < elastic.max_restarts {
                members.push(rank);
            }
        }
        // A strategy may need another number of ranks. New processes are left out before others.
        while members.len() >= elastic.min_ranks.max(1) && !(elastic.fits)(members.len()) {
            let new = members.iter().rposition(|&rank| is_gone(&self.ranks[rank]));
            members.remove(new.unwrap_or(members.len() - 1));
        }
        if members.len() < elastic.min_ranks.max(1) {
            let left = self.ranks.iter().filter(|rank| !is_gone(rank)).count();
            print_message(&format!(
                "warning: rank {lost} {description}, and the job cannot go on: {} left, and the strategy and \
                 trainer.elastic.min_ranks = {} need more",
                counted(left as u64, "rank"),
                elastic.min_ranks
            ));
            return false;
        }
        match self.begin_generation(&members, lost, description) {
            Ok(begun) => begun,
            Err(error) => {
                print_message(&format!("error: the job cannot go on without rank {lost}: {error}"));
                false
            }
        }
    }

    /// Begins the next generation with these ranks of the present one. Ranks that have ended are
    /// replaced by new processes. Returns false if a rank has reported an error of its own first.
    fn begin_generation(
        &mut self,
        members: &[usize],
        lost: usize,
        description: &str,
    ) -> Result<bool> {
        let (generation, world_size) = (self.generation + 1, members.len());
        let server = self.job.host_store(generation, world_size)?;
        let port = server.address().port();
        let mut started = Vec::new();
        for (rank, &old) in members.iter().enumerate() {
            let this = &self.ranks[old];
            if this.end.is_none() && !rank_process::has_ended(&this.process) {
                continue;
            }
            match self.job.start(rank, world_size, generation, port) {
                Ok(process) => started.push((rank, Rank::new(process, this.restarts + 1))),
                Err(error) => {
                    started.into_iter().for_each(|(_, new): (usize, Rank)| end(new.process));
                    return Err(error);
                }
            }
        }
        let new: Vec<usize> = started.iter().map(|(rank, _)| *rank).collect();
        let stays = |(rank, &old): (usize, &usize)| (!new.contains(&rank)).then_some(old);
        let olds: Vec<Option<usize>> = members.iter().enumerate().map(stays).collect();
        let store = ("127.0.0.1".to_owned(), port);
        let invitation =
            Invitation::new((generation, store), vec![world_size], &olds, self.ranks.len());
        let message = invitation.message(description);
        self.server.fail(lost, &message);
        if self.server.failures().first().is_none_or(|(_, first)| *first != message) {
            started.into_iter().for_each(|(_, new)| end(new.process));
            return Ok(false);
        }
        print_message(&format!(
            "warning: rank {lost} {description}. The job goes on: generation {generation} has {}{}",
            counted(world_size as u64, "rank"),
            match new.len() {
                0 => String::new(),
                1 => format!(", of which rank {} is a new process", new[0]),
                _ => format!(", of which ranks {new:?} are new processes"),
            }
        ));
        let mut before: Vec<Option<Rank>> =
            std::mem::take(&mut self.ranks).into_iter().map(Some).collect();
        let mut started = started.into_iter().peekable();
        for (rank, &old) in members.iter().enumerate() {
            let next = match started.next_if(|(new, _)| *new == rank) {
                Some((_, new)) => new,
                None => before[old].take().expect("each rank has one place in a generation"),
            };
            self.ranks.push(next);
        }
        // Most have ended, but not a rank for which the strategy has no place.
        before.into_iter().flatten().for_each(|left_out| end(left_out.process));
        self.generation = generation;
        self.earlier.push(std::mem::replace(&mut self.server, server));
        self.joining = self.elastic.as_ref().map(|elastic| Patience::new(elastic.join_timeout));
        self.stopped_by_unknown = None;
        Ok(true)
    }

    /// Kills ranks of a later generation that have not come in time.
    fn end_absent_ranks(&mut self) {
        let Some(patience) = &mut self.joining else { return };
        let has_joined = |rank: &usize| self.server.has_joined(*rank);
        if (0..self.ranks.len()).all(|rank| has_joined(&rank)) {
            self.joining = None;
            self.earlier.clear();
        } else if patience.slice().is_none() {
            let absent = (0..self.ranks.len()).filter(|rank| !has_joined(rank));
            absent.for_each(|rank| self.kill_rank(rank));
        }
    }

    /// Kills ranks that are stopped while this process runs: they keep the others waiting. A
    /// terminal stops this process too (Ctrl-Z).
    fn end_stopped_ranks(&mut self) {
        if self.elastic.is_none() || self.failed.is_some() {
            return;
        }
        let mut late = Vec::new();
        for (number, rank) in self.ranks.iter_mut().enumerate() {
            if rank.end.is_some() || !rank_process::is_stopped(&rank.process) {
                rank.stopped = None;
                continue;
            }
            let patience = rank.stopped.get_or_insert_with(|| Patience::new(STOPPED_GRACE));
            if patience.slice().is_none() {
                late.push(number);
            }
        }
        late.into_iter().for_each(|rank| self.kill_rank(rank));
    }

    fn kill_rank(&self, rank: usize) {
        let process = &self.ranks[rank].process;
        if self.ranks[rank].end.is_none() {
            let _ = kill_process(Pid::from_child(process), Signal::KILL);
        }
    }

    /// Tells the other ranks that `rank` was asked to end and has not joined.
    fn announce(&self, rank: usize, signal: i32) {
        if self.server.failures().is_empty() {
            self.server.fail(rank, &signals::announcement(signal));
        }
    }

    /// Reports a failure if a rank has ended because of one that did not become known in time.
    fn settle_cause(&mut self) {
        let all_ended = self.ranks.iter().all(|rank| rank.end.is_some());
        let Some((stopped, patience)) = &mut self.stopped_by_unknown else { return };
        if !self.server.failures().is_empty() || (patience.slice().is_some() && !all_ended) {
            return;
        }
        let stopped = *stopped;
        match self.server.noticed() {
            Some((rank, message)) => self.server.fail(rank, &message),
            None => {
                let description = format!(
                    "ended with exit code {PEER_FAILED_EXIT_CODE}, as after the failure of another \
                     rank, which has not said why it failed"
                );
                self.server.fail(stopped, &description);
                self.ranks[stopped].description = Some(description);
            }
        }
    }

    /// Prints the job's first failure, once.
    fn print_failure(&mut self) {
        if self.failed.is_some() {
            return;
        }
        let Some((rank, message)) = self.server.failures().into_iter().next() else { return };
        let description = self.ranks.get(rank).and_then(|rank| rank.description.as_ref());
        if let Some(why) = self.server.broken() {
            print_message(&format!("error: the supervisor cannot go on: {why}"));
        } else if let Some(signal) = signals::announced(&message) {
            if self.interrupted.is_none() {
                self.interrupted = Some(signal);
                print_message(&format!("interrupted: rank {rank}: {message}"));
            }
        } else if let Some(description) = description {
            print_message(&format!("error: rank {rank} {description}"));
        } else {
            print_message(&format!("error: rank {rank} failed: {message}"));
        }
        self.failed = Some(Failed { rank, escalation: Escalation::after(GRACE) });
    }

    /// Prints the other failures that ranks have reported, each message once.
    fn print_other_failures(&self) {
        let mut printed = Vec::new();
        for (rank, message) in self.server.failures() {
            if !printed.is_empty() && !printed.contains(&message) {
                print_message(&format!("error: rank {rank} failed too: {message}"));
            }
            printed.push(message);
        }
    }

    /// Signals ranks that do not end on their own after a failure.
    fn kill_stragglers(&mut self) {
        let Some(failed) = &mut self.failed else { return };
        if let Some(signal) = failed.escalation.due() {
            self.signal_all(signal);
        }
    }

    /// Signals the ranks that have not ended. Their process ids cannot be reused, because only this
    /// process waits for them.
    fn signal_all(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.end.is_none()) {
            let _ = kill_process(Pid::from_child(&rank.process), signal);
        }
    }

    fn exit_code(&self) -> i32 {
        let codes = || self.ranks.iter().map(|rank| rank.end.map_or(1, rank_process::exit_code));
        if let Some(signal) = self.interrupted {
            // The ranks may have agreed on another signal, received by one of them, or may have
            // been done.
            let agreed = codes().find(|&code| is_interruption(code));
            return match agreed {
                Some(code) if !self.killed && self.failed.is_none() => code,
                None if codes().all(|code| code == 0) => 0,
                _ => 128 + signal,
            };
        }
        if self.server.broken().is_some() {
            return 1;
        }
        match &self.failed {
            // 1 if the rank reported a failure and then exited with 0, or was ended by a signal of
            // this process.
            Some(Failed { rank, escalation }) => match codes().nth(*rank) {
                Some(code) if code != 0 && escalation.none_sent() => code,
                _ => 1,
            },
            // Without a failure, a code other than 0 belongs to a rank that alone was interrupted.
            None => codes().find(|code| *code != 0).unwrap_or(0),
        }
    }
}

/// Kills a process, if it has not ended, and reaps it.
fn end(mut process: Child) {
    let _ = process.kill();
    let _ = process.wait();
}

/// Whether an exit code belongs to an interrupted rank.
fn is_interruption(code: i32) -> bool {
    signals::is_handled(code - 128)
}
