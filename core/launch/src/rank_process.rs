//! The end of a rank's process: its description, its exit code, and the signals that cause it.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

use crate::signals;
use fulgurite_store::Patience;

/// Time that ranks have from SIGTERM to SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// Returns whether a process has ended, without reaping it: its process id is not reused until
/// then.
pub(super) fn has_ended(process: &Child) -> bool {
    let looks = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(Pid::from_child(process)), looks), Ok(None))
}

/// Returns whether a process has ended by itself, not by a signal, without reaping it.
pub(super) fn has_exited(process: &Child) -> bool {
    let looks = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let end = waitid(WaitId::Pid(Pid::from_child(process)), looks);
    end.is_ok_and(|end| end.is_some_and(|end| end.exited()))
}

/// Returns whether a process is stopped (by SIGSTOP, not by a debugger). Linux only.
pub(super) fn is_stopped(process: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('T'))
}

/// Reaps an ended process. Returns exit code 1 if SIGCHLD is ignored and the status is unknown.
pub(super) fn end_of(process: &mut Child) -> ExitStatus {
    process.wait().unwrap_or(ExitStatus::from_raw(1 << 8))
}

/// Returns the exit code, or 128 + the signal.
pub(super) fn exit_code(end: ExitStatus) -> i32 {
    end.code().or(end.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

/// Describes an end that is a failure, as in `rank 3 was killed by signal 9 (SIGKILL)`.
pub(super) fn describe(end: ExitStatus) -> String {
    match (end.code(), end.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => {
            format!("was killed by {}{}", signals::describe(signal), signals::explain(signal))
        }
        (None, None) => format!("ended: {end}"),
    }
}

/// Signals for ranks that do not end on their own: SIGTERM, then SIGKILL.
pub(super) struct Escalation {
    patience: Patience,
    sent: u8,
}

impl Escalation {
    /// Sends the first signal after `grace`.
    pub(super) fn after(grace: Duration) -> Self {
        Self { patience: Patience::new(grace), sent: 0 }
    }

    /// Sends SIGKILL after `grace`: for ranks that have already received another signal.
    pub(super) fn to_kill_after(grace: Duration) -> Self {
        Self { patience: Patience::new(grace), sent: 1 }
    }

    /// The signal to send now, if one is due.
    pub(super) fn due(&mut self) -> Option<Signal> {
        if self.patience.slice().is_some() {
            return None;
        }
        self.patience = Patience::new(TERM_GRACE);
        self.sent = self.sent.saturating_add(1);
        Some(if self.sent == 1 { Signal::TERM } else { Signal::KILL })
    }

    /// Whether no signal has been due so far.
    pub(super) fn none_sent(&self) -> bool {
        self.sent == 0
    }
}
