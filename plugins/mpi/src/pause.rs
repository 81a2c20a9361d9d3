//! How a wait for messages spends its time.

use std::time::{Duration, Instant};

/// For how long after the last message a wait tests again at once.
const SPIN: Duration = Duration::from_micros(20);
/// For how long it then lets other threads run between tests, and as much longer as the bytes under way take at
/// [`SLOW`]: MPI does not say that a part of a message has come, and moves some of it in each test.
const YIELD: Duration = Duration::from_micros(200);
/// Bytes in a microsecond.
const SLOW: usize = 2000;
/// How long it sleeps between tests after that: first, and at most.
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LAST_SLEEP: Duration = Duration::from_micros(200);

/// Between two tests in which nothing came.
pub(crate) struct Pause {
    since: Instant,
    sleep: Duration,
}

impl Pause {
    pub(crate) fn new(now: Instant) -> Self {
        Self { since: now, sleep: FIRST_SLEEP }
    }

    /// Something has come.
    pub(crate) fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Pauses; `bytes` are under way.
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
