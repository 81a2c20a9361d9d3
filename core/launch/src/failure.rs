//! Reports the end of a rank: to the other ranks, then on the terminal.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::PanicHookInfo;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attempt::end_by;
use super::elastic::{Invitation, reason};
use super::panics::is_caught;
use super::process::PROCESS;
use super::rank::{Membership, RankInfo, membership};
use super::rank_env::{has_agent, is_parent, is_supervised};
use super::signals::{announced, ending_signal, interrupt_requested, interrupted_exit_code};
use crate::{Error, Result};
use fulgurite_error::{output, print_message};
use fulgurite_store::{Patience, Store};

/// The exit code of a rank that stopped because another rank failed.
pub const PEER_FAILED_EXIT_CODE: u8 = 79;
/// The exit code of a process that panicked.
pub const PANIC_EXIT_CODE: u8 = 101;

/// How long a rank with a failed collective waits for the cause.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the rank that hosts the store waits until the others know about the job's failure.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the rank that hosts the store waits for slower ranks.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Interval of its checks for an interruption.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The last call of a program's `main`: tells the other ranks about the end of this rank, prints
/// its error, waits until the [output](fulgurite_error::output) is written (only for some seconds
/// if it is not read), and returns the exit code. Every [`LaunchedRank`](super::LaunchedRank) must
/// be dropped before.
///
/// Printed text and exit code, by `result`:
///
/// - `Ok`: nothing, 0. Without a supervisor, rank 0 waits until all ranks are done.
/// - [`Error::Interrupted`]: `interrupted`, 128 + the signal. This is 130 for Ctrl-C, 143 for
///   SIGTERM, 138 for SIGUSR1 (on Linux) and 129 for SIGHUP.
/// - [`Error::Interrupted`], if the environment [requeues](crate::environment::Requeue) for it:
///   rank 0 also prints `requeued …`; the exit code is 0.
/// - An error in a job of one rank: `error: …`, 1.
/// - An error of this rank: `error: rank 1 failed: …`, printed by the supervisor if there is one,
///   1.
/// - An earlier failure of another rank: nothing if a supervisor prints that failure,
///   [`PEER_FAILED_EXIT_CODE`].
pub fn report_and_exit_code(result: Result<()>) -> ExitCode {
    let failed = !matches!(result, Ok(()) | Err(Error::Interrupted));
    let code = report(result);
    match failed {
        true => output::flush_briefly(),
        false => output::flush(),
    }
    ExitCode::from(code)
}

fn report(result: Result<()>) -> u8 {
    match (membership(), result) {
        (Some(membership), result) => membership.finish(result),
        (None, Ok(())) => 0,
        (None, Err(Error::Interrupted)) => {
            // The rank has not joined its job yet. A supervisor reports the interruption.
            if is_supervised() {
                return interrupted_exit_code();
            }
            print_message("interrupted");
            end_by(ending_signal())
        }
        (None, Err(error)) => {
            print_message(&format!("error: {error}"));
            1
        }
    }
}

impl Membership {
    fn finish(&self, result: Result<()>) -> u8 {
        match result {
            Ok(()) => {
                self.wait_for_others(FINISH_TIMEOUT);
                0
            }
            Err(Error::Interrupted) => {
                // While the job starts, the first rank asked to end decides for all.
                let first = self.client.failure().and_then(|(_, message)| announced(&message));
                self.print_interrupted();
                self.wait_for_others(NOTICE_TIMEOUT);
                end_by(first.unwrap_or_else(ending_signal))
            }
            Err(error) => {
                let cause = self.cause(&error);
                let code = match (&cause, error) {
                    (Some(peer), _) => match announced(&peer.1) {
                        Some(signal) => {
                            self.print_interrupted();
                            self.wait_until_notified();
                            return end_by(signal);
                        }
                        None => {
                            self.print_stopped_by(peer);
                            PEER_FAILED_EXIT_CODE
                        }
                    },
                    // A failure that names this rank.
                    (None, Error::PeerFailed { message, .. }) => {
                        self.report(&message);
                        1
                    }
                    (None, error) => {
                        self.report(&error.to_string());
                        1
                    }
                };
                self.wait_until_notified();
                code
            }
        }
    }

    /// Waits up to `within` for the failure of the job. Under an agent, its message comes first.
    /// The loss of the job's store alone is not a failure then: the ranks go on until their agent
    /// invites them to a generation with another store.
    fn wait_for_failure(&self, within: Duration) -> Option<(usize, String)> {
        let Some(to) = &self.link.agent else { return self.client.wait_for_failure(within) };
        if let Some(told) = to.client().failure() {
            return Some(told);
        }
        let begun = Instant::now();
        let failure = self.client.wait_for_failure(within)?;
        match self.client.has_lost_host() {
            true => to.client().wait_for_failure(within.saturating_sub(begun.elapsed())),
            false => Some(failure),
        }
    }

    /// Returns the failure of another rank that caused `error`, if there is one.
    fn cause(&self, error: &Error) -> Option<(usize, String)> {
        if let Some(peer) = self.peer_failure() {
            return Some(peer);
        }
        let noticed = match error {
            Error::PeerFailed { rank, message } if *rank != self.info.rank => {
                Some((*rank, message.clone()))
            }
            Error::Collective { .. } => None,
            _ => return None,
        };
        // A collective fails as soon as a peer ends or reports its error. The store learns the
        // cause a moment later, and knows more about it.
        let known = self.client.wait_for_failure(CAUSE_TIMEOUT);
        if let Some(peer) = known.filter(|(rank, _)| *rank != self.info.rank) {
            return Some(peer);
        }
        if let Some((rank, message)) = &noticed {
            self.client.report_noticed(*rank, message);
        }
        noticed
    }

    /// Reports this rank's own failure to the store. Prints it if no supervisor will.
    fn report(&self, message: &str) {
        let told = self.client.report_failure(message).is_ok();
        if !(told && self.supervisor_prints()) {
            print_message(&format!("error: rank {} failed: {message}", self.info.rank));
        }
    }

    fn print_interrupted(&self) {
        if self.link.supervisor.is_none() && self.info.rank == 0 {
            print_message("interrupted");
        }
    }

    fn print_stopped_by(&self, (rank, message): &(usize, String)) {
        // With an agent, only one rank prints a failure on another node.
        let RankInfo { rank: own, local_rank, local_world_size, .. } = self.info;
        let local = own - local_rank..own - local_rank + local_world_size;
        let agent_says = has_agent() && (local_rank > 0 || local.contains(rank));
        if !self.supervisor_prints() && !agent_says {
            print_message(&format!(
                "error: rank {own} stops, because rank {rank} failed: {}",
                reason(message)
            ));
        }
    }

    fn supervisor_prints(&self) -> bool {
        self.link.supervisor.as_ref().is_some_and(|env| is_parent(env.supervisor))
    }

    /// Announces that this rank leaves. On the rank that hosts the store, waits until the others
    /// have ended; Ctrl-C ends the wait.
    fn wait_for_others(&self, timeout: Duration) {
        self.set_left(true);
        let Some(server) = &self.server else { return };
        let (mut patience, interrupted) = (Patience::new(timeout), interrupt_requested());
        while let Some(rest) = patience.slice()
            && !server.wait_for_others(self.info.rank, rest.min(POLL_INTERVAL))
            && interrupt_requested() == interrupted
        {}
        self.wait_until_notified();
    }

    /// On the rank that hosts the store, waits until the others know about the job's failure, if
    /// any.
    fn wait_until_notified(&self) {
        if let Some(server) = &self.server
            && !server.failures().is_empty()
        {
            server.wait_until_notified(self.info.rank, NOTICE_TIMEOUT);
        }
    }

    /// Sets a panic hook that reports this rank's failure and ends the process: a rank that lost
    /// one of its threads would leave the others waiting.
    pub(super) fn end_on_panic(&'static self) {
        std::panic::set_hook(Box::new(move |info| {
            if is_caught() {
                return;
            }
            if PROCESS.panicked.swap(true, Ordering::SeqCst) {
                // Another thread already ends the process.
                loop {
                    std::thread::park();
                }
            }
            // The supervisor prints the message; only this process has the backtrace.
            let backtrace = Backtrace::capture();
            if backtrace.status() == BacktraceStatus::Captured {
                print_message(&format!("{}\n{backtrace}", describe(info)));
            }
            let code = match self.peer_failure() {
                Some(peer) => {
                    self.print_stopped_by(&peer);
                    PEER_FAILED_EXIT_CODE
                }
                None => {
                    self.report(&describe(info));
                    PANIC_EXIT_CODE
                }
            };
            self.wait_until_notified();
            output::flush_briefly();
            std::process::exit(code.into());
        }));
    }
}

/// Waits for the failure of this process's job, in its present generation.
///
/// A rank hears of a failure in its next collective. A thread with this watch hears of it also
/// while the rank does something else.
pub struct FailureWatch(&'static Membership);

/// The failure of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFailure {
    /// The rank that failed.
    pub rank: usize,
    /// What the failed rank, or another about it, has reported.
    pub message: String,
    /// Whether ranks may go on in a next generation.
    pub goes_on: bool,
}

impl FailureWatch {
    /// Returns `None` unless this process has joined a job of several ranks.
    pub fn new() -> Option<Self> {
        membership().map(Self)
    }

    /// Waits up to `within` until the job has failed.
    pub fn wait(&self, within: Duration) -> Option<JobFailure> {
        let (rank, message) = self.0.wait_for_failure(within)?;
        let goes_on = Invitation::read(&message).is_some();
        Some(JobFailure { rank, message, goes_on })
    }
}

/// Formats a panic: `panicked at src/main.rs:3:5: message`, with the thread's name unless it is
/// main.
fn describe(info: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let thread = match thread.name() {
        Some("main") => String::new(),
        Some(name) => format!("thread `{name}` "),
        None => "a thread without a name ".to_owned(),
    };
    let location = info.location().map(|location| format!(" at {location}")).unwrap_or_default();
    format!("{thread}panicked{location}: {}", payload(info.payload()))
}

pub(crate) fn payload(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(message), _) => message,
        (None, Some(message)) => message,
        (None, None) => "a value that is no message",
    }
}
