//! Ctrl-C and SIGTERM.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{Error, Result};

/// The signals that ask for an end.
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

/// The signal that arrived last, 0 if none. In a rank it stays; the supervisor takes it.
static ARRIVED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Whether this process was asked to end, by Ctrl-C or SIGTERM: finish the step and stop, with
/// [`Error::Interrupted`] if the work is not done. Always false before
/// [`launch`](super::launch()).
///
/// Ranks learn it at different moments, so they must agree before they act on it
/// (`reduce_boolean_decision`), or one would leave the others waiting in a collective. After the
/// first true answer it stays true.
pub fn interrupt_requested() -> bool {
    ARRIVED.get().is_some_and(|signal| signal.load(Ordering::Relaxed) != 0)
}

/// The exit code of a process that a signal ended, as shells have it: 130 for Ctrl-C.
pub(super) fn interrupted_exit_code() -> u8 {
    let signal = ARRIVED.get().map_or(0, |signal| signal.load(Ordering::Relaxed));
    128 + u8::try_from(signal).ok().filter(|&s| s != 0).unwrap_or(SIGINT as u8)
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

/// `signal 9 (SIGKILL)`.
pub(super) fn describe(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("signal {signal} ({name})"),
        None => format!("signal {signal}"),
    }
}
