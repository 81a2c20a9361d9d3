//! [`Patience`].

use std::time::{Duration, Instant};

/// A time limit that does not count the time while this process was suspended.
///
/// A job that was suspended (SIGSTOP) for an hour goes on as if nothing had happened. The caller
/// waits in slices and asks before each one. A slice that took far longer than its length means
/// that the process was stopped.
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
    /// A longer slice means that the process was stopped meanwhile.
    const STOPPED: Duration = Duration::from_secs(1);

    /// Starts waiting for `limit`.
    pub fn new(limit: Duration) -> Self {
        Self { limit, waited: Duration::ZERO, asked: Instant::now() }
    }

    /// Returns the time to wait before asking again; `None` once the limit has passed.
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
    fn overslept_slice_counts_once() {
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
