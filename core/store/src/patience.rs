//! [`Patience`].

use std::time::{Duration, Instant};

/// A limit on how long something is waited for, in which time does not count while this process did not
/// run: a job that was suspended (SIGSTOP) for an hour goes on as if it had not been.
///
/// Whoever waits does so in slices and asks before each, so that a slice which took far longer than it was
/// to take tells that the process was stopped.
///
/// ```
/// use std::time::Duration;
/// use fulgurite_store::Patience;
///
/// let mut patience = Patience::new(Duration::from_millis(20));
/// while let Some(slice) = patience.slice() {
///     std::thread::sleep(slice);
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Patience {
    limit: Duration,
    waited: Duration,
    asked: Instant,
}

impl Patience {
    /// The longest slice.
    pub const SLICE: Duration = Duration::from_millis(500);
    /// A slice that took longer than this was not waited through but slept through.
    const STOPPED: Duration = Duration::from_secs(1);

    /// Patience for `limit`, from now on.
    pub fn new(limit: Duration) -> Self {
        Self { limit, waited: Duration::ZERO, asked: Instant::now() }
    }

    /// How long to wait before asking again; `None` once the limit has passed.
    pub fn slice(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.count(now - self.asked);
        self.asked = now;
        let left = self.limit.saturating_sub(self.waited);
        (!left.is_zero()).then(|| left.min(Self::SLICE))
    }

    fn count(&mut self, took: Duration) {
        self.waited += if took > Self::STOPPED { Self::SLICE } else { took };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_was_slept_through_counts_as_one() {
        let secs = Duration::from_secs;
        let mut patience = Patience::new(secs(3));
        assert_eq!(patience.slice(), Some(Patience::SLICE));
        patience.count(secs(3600));
        for _ in 0..2 {
            patience.count(secs(1));
        }
        assert!(patience.slice().is_some_and(|left| left <= Patience::SLICE));
        patience.count(secs(1));
        assert_eq!(patience.slice(), None);
        assert_eq!(Patience::new(Duration::ZERO).slice(), None);
    }
}
