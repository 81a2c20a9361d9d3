//! Pauses between tests in a wait for messages.

use std::time::{Duration, Instant};

/// Time after the last message in which a wait spins.
const SPIN: Duration = Duration::from_micros(20);
/// Time after [`SPIN`] in which the wait yields to other threads between tests. The time that the
/// bytes under way take at [`SLOW`] is added: MPI does not report parts of a message, and moves a
/// part of it in each test.
const YIELD: Duration = Duration::from_micros(200);
/// Bytes per microsecond.
const SLOW: usize = 2000;
/// First and longest sleep between later tests.
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LAST_SLEEP: Duration = Duration::from_micros(200);

/// The pause between two tests without any arrival.
pub(crate) struct Pause {
    since: Instant,
    sleep: Duration,
}

impl Pause {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, sleep: FIRST_SLEEP }
    }

    /// Starts again after an arrival.
    pub(crate) fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Pauses while `bytes` are under way.
    pub(crate) fn pause(&mut self, now: Instant, bytes: usize) {
        let waited = now.saturating_duration_since(self.since);
        if waited < SPIN {
            std::hint::spin_loop();
        } else if waited < SPIN + YIELD + Duration::from_micros((bytes / SLOW) as u64) {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.sleep);
            self.sleep = (self.sleep * 2).min(LAST_SLEEP);
        }
    }
}
