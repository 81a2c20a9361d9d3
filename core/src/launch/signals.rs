//! Ctrl-C, SIGTERM and SIGUSR1.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

use crate::{Error, Result};

/// The signals that ask for an end.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGUSR1];

/// The signal that arrived last, 0 if none. In a rank it stays; the supervisor takes it.
static ARRIVED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

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
    fn of(signal: i32) -> Option<Self> {
        match signal {
            0 => None,
            SIGTERM => Some(Self::Termination),
            SIGUSR1 => Some(Self::Preemption),
            _ => Some(Self::CtrlC),
        }
    }
}

/// Why this process was asked to end; `None` if it was not. See [`interrupt_requested`].
pub fn interruption() -> Option<Interruption> {
    Interruption::of(arrived())
}

fn arrived() -> i32 {
    ARRIVED.get().map_or(0, |signal| signal.load(Ordering::Relaxed)) as i32
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
    128 + u8::try_from(arrived()).ok().filter(|&s| s != 0).unwrap_or(SIGINT as u8)
}

/// What a second signal does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Second {
    /// Ends the process at once. For a process on its own.
    Ends,
    /// Nothing. For a rank, which may get one signal twice (from the terminal, and from whoever
    /// started it), and whom its parent will kill if need be.
    IsIgnored,
}

/// Sets the handlers, once in a process.
pub(super) fn handle(second: Second) -> Result<()> {
    let mut result = Ok(());
    ARRIVED.get_or_init(|| {
        let arrived = Arc::new(AtomicUsize::new(0));
        result = register(&arrived, second);
        arrived
    });
    result.map_err(|e| Error::Launch(format!("cannot handle signals: {e}")))
}

fn register(arrived: &Arc<AtomicUsize>, second: Second) -> std::io::Result<()> {
    let once = Arc::new(AtomicBool::new(false));
    for signal in SIGNALS {
        if second == Second::Ends {
            // Before the handler that sets the flag, so that the first signal does not end it.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, once.clone())?;
            signal_hook::flag::register(signal, once.clone())?;
        }
        signal_hook::flag::register_usize(signal, arrived.clone(), signal as usize)?;
    }
    Ok(())
}

/// The signal that arrived since the last call. For the supervisor, which counts them.
pub(super) fn take() -> Option<i32> {
    let signal = ARRIVED.get()?.swap(0, Ordering::Relaxed);
    i32::try_from(signal).ok().filter(|&signal| signal != 0)
}

/// How the supervisor passes on a signal that asks for an end.
pub(super) fn to_pass_on(signal: i32) -> Signal {
    match Interruption::of(signal) {
        Some(Interruption::Termination) => Signal::TERM,
        Some(Interruption::Preemption) => Signal::USR1,
        _ => Signal::INT,
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
