//! Ctrl-C, SIGTERM and SIGUSR1.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

use crate::{Error, Result};

/// The signals that ask for an end, the most urgent first.
const SIGNALS: [i32; 3] = [SIGTERM, SIGUSR1, SIGINT];

/// The signals that have arrived. In a rank they stay set; the supervisor takes them.
static ARRIVED: OnceLock<Arrived> = OnceLock::new();

/// Which of [`SIGNALS`] have arrived. One that comes later must not make a more urgent one forgotten.
#[derive(Debug, Default)]
struct Arrived([Arc<AtomicBool>; SIGNALS.len()]);

impl Arrived {
    /// The most urgent one.
    fn most_urgent(&self) -> Option<i32> {
        let arrived = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        self.0.iter().position(arrived).map(|i| SIGNALS[i])
    }

    /// The most urgent one, and forgets all.
    fn take(&self) -> Option<i32> {
        let arrived = self.0.each_ref().map(|flag| flag.swap(false, Ordering::Relaxed));
        arrived.into_iter().position(|arrived| arrived).map(|i| SIGNALS[i])
    }
}

/// Why a process was asked to end, the most urgent last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Interruption {
    /// By Ctrl-C (SIGINT): somebody has seen enough.
    CtrlC,
    /// By SIGUSR1: a scheduler such as Slurm (`--signal=USR1@90`) will take the machine soon.
    Preemption,
    /// By SIGTERM: a scheduler is about to take the machine.
    Termination,
}

impl Interruption {
    fn of(signal: i32) -> Self {
        match signal {
            SIGTERM => Self::Termination,
            SIGUSR1 => Self::Preemption,
            _ => Self::CtrlC,
        }
    }
}

/// Why this process was asked to end, the most urgent reason if there were several; `None` if it was
/// not. See [`interrupt_requested`].
pub fn interruption() -> Option<Interruption> {
    arrived().map(Interruption::of)
}

fn arrived() -> Option<i32> {
    ARRIVED.get()?.most_urgent()
}

/// Whether this process was asked to end, by Ctrl-C, SIGTERM or SIGUSR1: finish the step and stop, with
/// [`Error::Interrupted`] if the work is not done. Always false before
/// [`launch`](super::launch()).
///
/// Ranks learn it at different moments, so they must agree before they act on it
/// (`reduce_boolean_decision`), or one would leave the others waiting in a collective. After the
/// first true answer it stays true.
pub fn interrupt_requested() -> bool {
    interruption().is_some()
}

/// The exit code of a process that a signal ended, as shells have it: 130 for Ctrl-C.
pub(super) fn interrupted_exit_code() -> u8 {
    128 + arrived().unwrap_or(SIGINT) as u8
}

/// What a second signal does to this process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SecondSignal {
    /// It ends the process at once. For a process without others.
    Exit,
    /// Nothing. For a rank, which may get one signal twice (from the terminal and from its parent),
    /// and which its parent kills if it must.
    Ignore,
}

/// Sets the handlers, once in a process.
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
    for (signal, flag) in SIGNALS.into_iter().zip(&arrived.0) {
        if second == SecondSignal::Exit && !is_notice(signal) {
            // Registered before the handler that sets the flag, so that the first signal does not end
            // the process.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, once.clone())?;
            signal_hook::flag::register(signal, once.clone())?;
        }
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(())
}

/// Whether a signal only announces that another signal will ask for an end. The other one is then the
/// first request and not the second.
pub(super) fn is_notice(signal: i32) -> bool {
    signal == SIGUSR1
}

/// The most urgent signal that arrived since the last call. For the supervisor, to which each is a
/// request of its own.
pub(super) fn take() -> Option<i32> {
    ARRIVED.get()?.take()
}

/// The signal that the supervisor sends its ranks when it gets `signal`.
pub(super) fn forwarded(signal: i32) -> Signal {
    match Interruption::of(signal) {
        Interruption::Termination => Signal::TERM,
        Interruption::Preemption => Signal::USR1,
        Interruption::CtrlC => Signal::INT,
    }
}

/// Whether a process ended because of one of these signals.
pub(super) fn asks_to_end(signal: i32) -> bool {
    SIGNALS.contains(&signal)
}

/// `signal 9 (SIGKILL)`.
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
            arrived.0[2].store(true, Ordering::Relaxed);
            assert_eq!(arrived.take(), Some(SIGINT));
        }
    }

    #[test]
    fn a_handler_sets_the_flag_of_its_signal() {
        let arrived = Arrived::default();
        register(&arrived, SecondSignal::Ignore).unwrap();
        for signal in [SIGTERM, SIGINT, SIGUSR1] {
            signal_hook::low_level::raise(signal).unwrap();
            assert_eq!(arrived.most_urgent(), Some(SIGTERM));
        }
        assert_eq!(arrived.take(), Some(SIGTERM));
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        assert_eq!(arrived.take(), Some(SIGUSR1));
    }
}
