//! The parent process of the ranks: starts them, waits for them, and ends all when one fails.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::failure::PEER_FAILED_EXIT_CODE;
use super::launcher::threads_per_rank;
use super::orphans::Orphans;
use super::rank::RankInfo;
use super::rank_env::RankEnv;
use super::rank_process::{self, Escalation};
use super::signals::{self, SecondSignal};
use crate::environment::Variables;
use crate::{Error, Result};
use fulgurite_error::{advice, output, print_message};
use fulgurite_store::{JobKey, LostRankPolicy, Patience, StoreServer};

/// The variable for the number of rayon's threads, which candle uses too.
pub(super) const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";
/// Interval between checks on the ranks.
const POLL_INTERVAL: Duration = Duration::from_millis(15);
/// Time that ranks have to stop on their own after a failure, before SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
/// How long to wait for a failure that a rank knows and this process does not know yet.
const CAUSE_GRACE: Duration = Duration::from_secs(3);

/// Runs this program again as `devices` ranks and, when they have ended, ends this process.
///
/// # Errors
/// If a rank cannot be started; the ranks started before are killed.
pub(super) fn supervise(devices: usize, started: f64, variables: &Variables) -> Result<Infallible> {
    signals::handle(SecondSignal::Ignore)?;
    let orphans = Orphans::adopt();
    let secret = JobKey::random_secret()?;
    let env = |rank, port| RankEnv {
        supervisor: std::process::id().cast_signed(),
        secret: secret.clone(),
        started,
        info: RankInfo {
            rank,
            world_size: devices,
            local_rank: rank,
            local_world_size: devices,
            node_rank: 0,
        },
        port,
    };
    let address = (Ipv4Addr::LOCALHOST, 0).into();
    let key = env(0, 0).key();
    let server = StoreServer::bind(address, key, devices, LostRankPolicy::ParentReports)?;
    let mut ranks = Ranks {
        ranks: Vec::new(),
        orphans,
        server,
        stopped_by_unknown: None,
        failed: None,
        interrupted: None,
        killed: false,
    };
    for rank in 0..devices {
        let env = env(rank, ranks.server.address().port());
        match start(&env, variables) {
            Ok(process) => ranks.ranks.push(Rank { process, end: None, description: None }),
            Err(error) => {
                ranks.signal_all(Signal::KILL);
                ranks.ranks.iter_mut().for_each(|rank| drop(rank.process.wait()));
                return Err(error);
            }
        }
    }
    let code = ranks.run();
    let hurry = ranks.killed || ranks.failed.is_some();
    drop(ranks);
    match hurry {
        true => output::flush_briefly(),
        false => output::flush(),
    }
    std::process::exit(code)
}

fn start(env: &RankEnv, variables: &Variables) -> Result<Child> {
    let RankInfo { rank, world_size, .. } = env.info;
    let fail = |what: &str, e: std::io::Error| {
        let advice = advice(&e);
        Error::Launch(format!("cannot start rank {rank} of {world_size}: {what}: {e}{advice}"))
    };
    let program = std::env::current_exe().map_err(|e| fail("finding this program's file", e))?;
    let mut command = Command::new(&program);
    command.args(std::env::args_os().skip(1));
    env.set(&mut command);
    if !variables.is_set(THREADS_VARIABLE) {
        command.env(THREADS_VARIABLE, threads_per_rank(world_size).to_string());
    }
    // Only rank 0 may read the terminal.
    if rank > 0 {
        command.stdin(Stdio::null());
    }
    command.spawn().map_err(|e| fail(&format!("running {}", program.display()), e))
}

struct Ranks {
    ranks: Vec<Rank>,
    orphans: Orphans,
    server: StoreServer,
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
    end: Option<ExitStatus>,
    /// Description of the rank's end, if it is a failure that the rank did not report itself:
    /// `was killed by signal 9`.
    description: Option<String>,
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
            for rank in 0..self.ranks.len() {
                self.poll_rank(rank);
            }
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
                if !failure_known {
                    let patience = || (rank, Patience::new(CAUSE_GRACE));
                    self.stopped_by_unknown.get_or_insert_with(patience);
                }
                return;
            }
            (None, Some(signal)) if asked_to_end && signals::is_handled(signal) => return,
            _ => rank_process::describe(end),
        };
        // The rank's own report says more; and after a first failure other ranks end because of it.
        if !failure_known {
            self.server.fail(rank, &format!("it {description}"));
            this.description = Some(description);
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

/// Whether an exit code belongs to an interrupted rank.
fn is_interruption(code: i32) -> bool {
    signals::is_handled(code - 128)
}
