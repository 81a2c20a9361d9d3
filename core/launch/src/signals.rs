//! The signals that ask a process to end: Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and SIGHUP.

use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::process::Signal;
use signal_hook::consts::{SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};

use crate::{Error, Result};

/// The signals that ask for an end, the most urgent first.
const SIGNALS: [i32; 4] = [SIGTERM, SIGUSR1, SIGHUP, SIGINT];

/// The signals that have arrived. In a rank they stay set; the supervisor [takes](take) them.
static ARRIVED: OnceLock<Arrived> = OnceLock::new();

/// Which of [`SIGNALS`] have arrived: a flag each, so that a later one does not hide a more urgent
/// one.
#[derive(Debug, Default)]
struct Arrived([Arc<AtomicBool>; SIGNALS.len()]);

impl Arrived {
    /// The most urgent signal that has arrived.
    fn most_urgent(&self) -> Option<i32> {
        let arrived = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        self.0.iter().position(arrived).map(|i| SIGNALS[i])
    }

    /// The most urgent signal that has arrived; clears all.
    fn take(&self) -> Option<i32> {
        let arrived = self.0.each_ref().map(|flag| flag.swap(false, Ordering::Relaxed));
        arrived.into_iter().position(|arrived| arrived).map(|i| SIGNALS[i])
    }
}

/// The signal that the ranks agreed to end for; 0 if they have not.
static AGREED: AtomicI32 = AtomicI32::new(0);

/// Number of [`Starting`]s that live.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Why a process was asked to end, the most urgent last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Interruption {
    /// Ctrl-C (SIGINT): a person ends the run.
    CtrlC,
    /// SIGHUP: the terminal was closed, or the connection to it broke. A process that was started to ignore it
    /// (`nohup`) does.
    HangUp,
    /// SIGUSR1: a scheduler announces that it will take the machine, such as Slurm with
    /// `--signal=USR1@90`.
    Preemption,
    /// SIGTERM: a scheduler is about to take the machine.
    Termination,
}

impl Interruption {
    fn of(signal: i32) -> Self {
        match signal {
            SIGTERM => Self::Termination,
            SIGUSR1 => Self::Preemption,
            SIGHUP => Self::HangUp,
            _ => Self::CtrlC,
        }
    }

    pub(super) fn signal(self) -> i32 {
        match self {
            Self::Termination => SIGTERM,
            Self::Preemption => SIGUSR1,
            Self::HangUp => SIGHUP,
            Self::CtrlC => SIGINT,
        }
    }
}

/// While one lives, the job starts: training has not begun on any rank. A rank that waits for others
/// (in the store, in a collective) and is asked to end then gives up and tells the others, which end too.
/// Without one, only the program decides when it ends.
#[derive(Debug)]
pub struct Starting(());

impl Starting {
    /// Says that the job starts, until this is dropped. Every rank does it at the same place of its
    /// program.
    #[expect(clippy::new_without_default, reason = "a default does nothing")]
    pub fn new() -> Self {
        STARTING.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        STARTING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether this process is to give up what it waits for: what to tell the other ranks.
pub(super) fn give_up() -> Option<String> {
    match STARTING.load(Ordering::Relaxed) {
        0 => None,
        _ => arrived().map(announcement),
    }
}

/// The words before the signal in an [`announcement`].
const ASKED_TO_END: &str = "it was asked to end before training had begun, by ";

/// What is told in place of a failure of a rank that ends while the job starts, for it got `signal`.
pub(super) fn announcement(signal: i32) -> String {
    format!("{ASKED_TO_END}{}", describe(signal))
}

/// The signal of an [`announcement`].
pub(super) fn announced(message: &str) -> Option<i32> {
    let by = message.strip_prefix(ASKED_TO_END)?;
    SIGNALS.into_iter().find(|&signal| describe(signal) == by)
}

/// Sets why all ranks end, once they have agreed on it: the program's exit code follows from it, on a rank
/// that got another signal or none too. Every rank calls it with the same reason, and then ends with
/// [`Error::Interrupted`]. The trainer does so by itself.
pub fn agree_on(reason: Interruption) {
    AGREED.store(reason.signal(), Ordering::Relaxed);
}

/// The most urgent reason why this process was asked to end; `None` if it was not. See
/// [`interrupt_requested`].
pub fn interruption() -> Option<Interruption> {
    arrived().map(Interruption::of)
}

fn arrived() -> Option<i32> {
    ARRIVED.get()?.most_urgent()
}

/// Whether this process was asked to end, by Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP. The program then finishes
/// its step and stops, with [`Error::Interrupted`] if it is not done. Always false before
/// [`launch`](super::launch()).
///
/// Ranks learn of a signal at different times, so they must agree (with an all-reduce of the
/// answer) before one acts on it, or it leaves the others waiting in a collective; [`agree_on`] sets the
/// exit code of them all. Once true it stays true.
pub fn interrupt_requested() -> bool {
    interruption().is_some()
}

/// Notices signals from here on in a process that is neither a rank nor their supervisor, such as one that runs others
/// and [forwards](take_interruption) what it is told. No signal ends it by itself any more.
///
/// # Errors
/// If the handlers cannot be set.
pub fn notice_signals() -> Result<()> {
    handle(SecondSignal::Ignore)
}

/// The most urgent reason why this process was asked to end since the last call, after
/// [`notice_signals`].
pub fn take_interruption() -> Option<Interruption> {
    take().map(Interruption::of)
}

/// The exit code that shells give a process which a signal has ended: 130 for Ctrl-C. The signal is the one
/// that the ranks agreed on, else the most urgent that this process got.
pub(super) fn interrupted_exit_code() -> u8 {
    exit_code_of(ending_signal())
}

/// The signal that the ranks agreed to end for, else the most urgent that this process got.
pub(super) fn ending_signal() -> i32 {
    match AGREED.load(Ordering::Relaxed) {
        0 => arrived().unwrap_or(SIGINT),
        agreed => agreed,
    }
}

/// 128 + a signal.
pub(super) fn exit_code_of(signal: i32) -> u8 {
    128 + signal as u8
}

/// What a second signal does to a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SecondSignal {
    /// It ends the process at once: for a job of one process.
    Exit,
    /// Nothing: for a rank, which may get the same signal twice (from the terminal and from its
    /// supervisor) and is killed by its supervisor, and for the supervisor, which handles a second
    /// signal itself.
    Ignore,
}

/// Sets the signal handlers, once in a process.
pub(super) fn handle(second: SecondSignal) -> Result<()> {
    let mut result = Ok(());
    ARRIVED.get_or_init(|| {
        let arrived = Arrived::default();
        result = register(&arrived, second);
        arrived
    });
    result.map_err(|e| Error::Launch(format!("cannot handle signals: {e}")))
}

fn register(arrived: &Arrived, second: SecondSignal) -> std::io::Result<()> {
    let once = Arc::new(AtomicBool::new(false));
    // With a handler, a write beyond the limit on the size of files is an error instead of the end.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    for (signal, flag) in SIGNALS.into_iter().zip(&arrived.0) {
        if signal == SIGHUP && !hang_up_ends_this_process() {
            continue;
        }
        if second == SecondSignal::Exit && !is_advance_notice(signal) {
            // Registered before the handler that sets `once`, so that the first signal does not end
            // the process.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, once.clone())?;
            signal_hook::flag::register(signal, once.clone())?;
        }
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}

/// Whether other signals may follow a signal for the same reason. SIGUSR1 announces one. A terminal that closes
/// sends SIGHUP by itself and through its shell. Such a signal never counts as the second request to end, and the
/// signal after it counts as the first.
pub(super) fn is_advance_notice(signal: i32) -> bool {
    signal == SIGUSR1 || signal == SIGHUP
}

/// Whether SIGHUP would end this process: not if it was started to ignore it, or the system does not say.
fn hang_up_ends_this_process() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 0)
}

/// The most urgent signal that has arrived since the last call. For the supervisor, which handles a
/// second signal otherwise than the first.
pub(super) fn take() -> Option<i32> {
    ARRIVED.get()?.take()
}

/// The signal that the supervisor sends to its ranks when it receives `signal`.
pub(super) fn forwarded(signal: i32) -> Signal {
    match Interruption::of(signal) {
        Interruption::Termination => Signal::TERM,
        Interruption::Preemption => Signal::USR1,
        Interruption::HangUp => Signal::HUP,
        Interruption::CtrlC => Signal::INT,
    }
}

/// Whether `signal` is one of those handled here.
pub(super) fn is_handled(signal: i32) -> bool {
    SIGNALS.contains(&signal)
}

/// What a signal that ended a process may mean: a clause to append.
pub(super) fn explain(signal: i32) -> &'static str {
    match signal {
        SIGABRT => {
            ". If an allocation has failed (its message is above), there is too little memory, or its \
             limit is too low (ulimit -v, or the container's)"
        }
        SIGBUS => {
            ". There may be no memory left for what ranks share, or a file that it maps has shrunk"
        }
        _ => "",
    }
}

/// How a program of somebody else ended.
pub(super) fn explain_exit(status: std::process::ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => describe(signal),
        (None, None) => "no exit code".to_owned(),
    }
}

/// Number and name: `signal 9 (SIGKILL)`.
pub(super) fn describe(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_urgent_signal_counts_in_whatever_order_they_come() {
        let reasons = SIGNALS.map(Interruption::of);
        assert!(reasons.is_sorted_by(|a, b| a > b), "{reasons:?}");
        // Each set of signals: all that were sent, in no order.
        for set in 1..1 << SIGNALS.len() {
            let arrived = Arrived::default();
            assert_eq!((arrived.most_urgent(), arrived.take()), (None, None));
            let sent = |i: &usize| set & (1 << i) != 0;
            let sent: Vec<usize> = (0..SIGNALS.len()).filter(sent).collect();
            for &i in sent.iter().rev() {
                arrived.0[i].store(true, Ordering::Relaxed);
            }
            let expected = sent.iter().map(|&i| Interruption::of(SIGNALS[i])).max();
            // It stays until it is taken; then they are all gone, and another may come.
            for _ in 0..2 {
                assert_eq!(arrived.most_urgent().map(Interruption::of), expected);
            }
            assert_eq!(arrived.take().map(Interruption::of), expected);
            assert_eq!((arrived.most_urgent(), arrived.take()), (None, None));
            arrived.0[3].store(true, Ordering::Relaxed);
            assert_eq!(arrived.take(), Some(SIGINT));
        }
    }

    #[test]
    fn an_announcement_says_which_signal_came() {
        for signal in SIGNALS {
            assert_eq!(announced(&announcement(signal)), Some(signal));
            assert_eq!(Interruption::of(signal).signal(), signal);
        }
        insta::assert_snapshot!(announcement(SIGTERM), @"it was asked to end before training had begun, by signal 15 (SIGTERM)");
        assert_eq!(announced("the disk is full"), None);
    }

    #[test]
    fn a_handler_sets_the_flag_of_its_signal() {
        let arrived = Arrived::default();
        register(&arrived, SecondSignal::Ignore).unwrap();
        for signal in [SIGTERM, SIGHUP, SIGINT, SIGUSR1] {
            signal_hook::low_level::raise(signal).unwrap();
            assert_eq!(arrived.most_urgent(), Some(SIGTERM));
        }
        assert_eq!(arrived.take(), Some(SIGTERM));
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        assert_eq!(arrived.take(), Some(SIGUSR1));
    }
}
