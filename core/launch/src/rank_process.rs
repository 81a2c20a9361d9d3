//! How the process of a rank ended, in words and as an exit code, and how it is made to end.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, waitid};

use crate::signals;
use fulgurite_store::Patience;

/// How long ranks have from SIGTERM to SIGKILL.
const TERM_GRACE: Duration = Duration::from_secs(2);

/// Whether a process has ended, which nobody has waited for yet: its number is its own until then.
pub(super) fn has_ended(process: &Child) -> bool {
    let looks = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(Pid::from_child(process)), looks), Ok(None))
}

/// How a process ended that has; an exit code of 1 where SIGCHLD is ignored, so that nobody knows.
pub(super) fn end_of(process: &mut Child) -> ExitStatus {
    process.wait().unwrap_or(ExitStatus::from_raw(1 << 8))
}

/// The exit code, or 128 + the signal.
pub(super) fn exit_code(end: ExitStatus) -> i32 {
    end.code().or(end.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

/// An end that is a failure, as in `rank 3 was killed by signal 9 (SIGKILL)`.
pub(super) fn describe(end: ExitStatus) -> String {
    match (end.code(), end.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => {
            format!("was killed by {}{}", signals::describe(signal), signals::explain(signal))
        }
        (None, None) => format!("ended: {end}"),
    }
}

/// Signals for ranks that do not end by themselves: SIGTERM, then SIGKILL.
pub(super) struct Escalation {
    patience: Patience,
    sent: u8,
}

impl Escalation {
    /// The first signal is due after `grace`.
    pub(super) fn after(grace: Duration) -> Self {
        Self { patience: Patience::new(grace), sent: 0 }
    }

    /// SIGKILL is due after `grace`: for ranks that have had another signal.
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

    /// Whether none was due so far.
    pub(super) fn none_sent(&self) -> bool {
        self.sent == 0
    }
}
