//! The signals that ask a process to end: Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and SIGHUP.

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use signal_hook::consts::{SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};

use super::process::PROCESS;
use crate::{Error, Result};

/// The signals that ask for an end, the most urgent first.
const SIGNALS: [i32; 4] = [SIGTERM, SIGUSR1, SIGHUP, SIGINT];

/// Flags of the received [`SIGNALS`]. One flag each, so that a later signal does not hide a more
/// urgent one.
#[derive(Debug, Default)]
pub(super) struct Arrived([Arc<AtomicBool>; SIGNALS.len()]);

impl Arrived {
    /// The most urgent received signal.
    fn most_urgent(&self) -> Option<i32> {
        let arrived = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        self.0.iter().position(arrived).map(|i| SIGNALS[i])
    }

    /// Returns the most urgent received signal and clears all.
    fn take(&self) -> Option<i32> {
        let arrived = self.0.each_ref().map(|flag| flag.swap(false, Ordering::Relaxed));
        arrived.into_iter().position(|arrived| arrived).map(|i| SIGNALS[i])
    }
}

/// The reason why a process was asked to end, the most urgent last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Interruption {
    /// Ctrl-C (SIGINT): the user ends the run.
    CtrlC,
    /// SIGHUP: the terminal was closed, or the connection to it broke. A process started to ignore
    /// SIGHUP (`nohup`) ignores it.
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

/// While one is alive, the job starts: training has not begun on any rank. A rank that then waits
/// for others (in the store, in a collective) and is asked to end gives up and tells the others,
/// which end too. Without one, only the program decides when it ends.
#[derive(Debug)]
pub struct Starting(());

impl Starting {
    /// Marks the job as starting, until dropped. Every rank must call it at the same place of its
    /// program.
    #[expect(clippy::new_without_default, reason = "a default does nothing")]
    pub fn new() -> Self {
        PROCESS.starting.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        PROCESS.starting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The message to the other ranks, if this process must give up its waiting.
pub(super) fn give_up() -> Option<String> {
    match PROCESS.starting.load(Ordering::Relaxed) {
        0 => None,
        _ => arrived().map(announcement),
    }
}

/// The words before the signal in an [`announcement`].
const ASKED_TO_END: &str = "it was asked to end before training had begun, by ";

/// The message in place of a failure from a rank that received `signal` while the job starts.
pub(super) fn announcement(signal: i32) -> String {
    format!("{ASKED_TO_END}{}", describe(signal))
}

/// Parses the signal of an [`announcement`].
pub(super) fn announced(message: &str) -> Option<i32> {
    let by = message.strip_prefix(ASKED_TO_END)?;
    SIGNALS.into_iter().find(|&signal| describe(signal) == by)
}

/// Sets the reason on which all ranks agreed to end. It determines the program's exit code, also on
/// a rank that received another signal or none. Every rank calls it with the same reason and then
/// ends with [`Error::Interrupted`]. The trainer does both itself.
pub fn agree_on(reason: Interruption) {
    PROCESS.agreed.store(reason.signal(), Ordering::Relaxed);
}

/// The most urgent reason why this process was asked to end; `None` if it was not. See
/// [`interrupt_requested`].
pub fn interruption() -> Option<Interruption> {
    arrived().map(Interruption::of)
}

fn arrived() -> Option<i32> {
    PROCESS.arrived.get()?.most_urgent()
}

/// Whether this process was asked to end, by Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP. The program then
/// finishes its step and stops, with [`Error::Interrupted`] if it is not done. Always false before
/// [`launch`](super::launch()). Once true it stays true.
///
/// Ranks learn of a signal at different times, so they must agree before one acts on it, for
/// example by an all-reduce of the answer. Otherwise the rank leaves the others waiting in a
/// collective. [`agree_on`] sets the exit code of all ranks.
pub fn interrupt_requested() -> bool {
    interruption().is_some()
}

/// Handles signals in a process that is neither a rank nor a supervisor, such as one that runs
/// others and [forwards](take_interruption) its signals. From then on no signal ends the process by
/// itself.
///
/// # Errors
/// If the handlers cannot be set.
pub fn notice_signals() -> Result<()> {
    handle(SecondSignal::Ignore)
}

/// Returns the most urgent reason why this process was asked to end since the last call, after
/// [`notice_signals`].
pub fn take_interruption() -> Option<Interruption> {
    take().map(Interruption::of)
}

/// The exit code that shells report for a process ended by a signal, such as 130 for Ctrl-C. Uses
/// the signal on which the ranks agreed, else the most urgent one that this process received.
pub(super) fn interrupted_exit_code() -> u8 {
    exit_code_of(ending_signal())
}

/// The signal on which the ranks agreed, else the most urgent one that this process received.
pub(super) fn ending_signal() -> i32 {
    match PROCESS.agreed.load(Ordering::Relaxed) {
        0 => arrived().unwrap_or(SIGINT),
        agreed => agreed,
    }
}

/// 128 + a signal.
pub(super) fn exit_code_of(signal: i32) -> u8 {
    128 + signal as u8
}

/// The effect of a second signal on a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SecondSignal {
    /// Ends the process at once: for a job of one process.
    Exit,
    /// Has no effect. For a rank, which may get a signal twice (from the terminal and its
    /// supervisor) and is killed by its supervisor. Also for the supervisor, which handles a second
    /// signal itself.
    Ignore,
}

/// Sets the signal handlers, once in a process.
pub(super) fn handle(second: SecondSignal) -> Result<()> {
    let mut result = Ok(());
    PROCESS.arrived.get_or_init(|| {
        let arrived = Arrived::default();
        result = register(&arrived, second);
        arrived
    });
    result.map_err(|e| Error::Launch(format!("cannot handle signals: {e}")))
}

fn register(arrived: &Arrived, second: SecondSignal) -> std::io::Result<()> {
    let once = Arc::new(AtomicBool::new(false));
    // With a handler, a write beyond the file-size limit is an error instead of ending the process.
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

/// Whether other signals may follow a signal for the same reason. SIGUSR1 announces another signal,
/// and a closing terminal sends SIGHUP both itself and through its shell. Such a signal never
/// counts as the second request to end, and the signal after it counts as the first.
pub(super) fn is_advance_notice(signal: i32) -> bool {
    signal == SIGUSR1 || signal == SIGHUP
}

/// Whether SIGHUP would end this process: false if it was started to ignore SIGHUP, or the system
/// does not report it.
fn hang_up_ends_this_process() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (SIGHUP - 1) & 1 == 0)
}

/// Returns the most urgent signal received since the last call. For the supervisor, which treats a
/// second signal differently from the first.
pub(super) fn take() -> Option<i32> {
    PROCESS.arrived.get()?.take()
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

/// Whether `signal` is handled here.
pub(super) fn is_handled(signal: i32) -> bool {
    SIGNALS.contains(&signal)
}

/// Explains a signal that ended a process, as a clause to append.
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

/// Describes the end of an external program.
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
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn the_most_urgent_signal_counts() {
        let reasons = SIGNALS.map(Interruption::of);
        assert!(reasons.is_sorted_by(|a, b| a > b), "{reasons:?}");
        // Every subset of the signals, received in any order.
        for set in 1..1 << SIGNALS.len() {
            let arrived = Arrived::default();
            assert_eq!((arrived.most_urgent(), arrived.take()), (None, None));
            let sent = |i: &usize| set & (1 << i) != 0;
            let sent: Vec<usize> = (0..SIGNALS.len()).filter(sent).collect();
            for &i in sent.iter().rev() {
                arrived.0[i].store(true, Ordering::Relaxed);
            }
            let expected = sent.iter().map(|&i| Interruption::of(SIGNALS[i])).max();
            // It stays until it is taken; then all signals are cleared, and another may come.
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
        assert_says!(announcement(SIGTERM), "it was asked … before training … signal 15 (SIGTERM)");
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
