//! Sleeping until another rank has changed something.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::RankRecord;

/// Wakes a rank, or keeps it from falling asleep. To be called after the change that the rank waits
/// for.
pub(crate) fn notify(record: &RankRecord) {
    record.waker.fetch_add(1, Ordering::SeqCst);
    if record.asleep.load(Ordering::SeqCst) != 0 {
        wake(&record.waker);
    }
}

/// The futex word of a rank that is about to sleep. The rank calls `Waker::new`, checks what it
/// waits for, and calls `sleep`. A [`notify`] after the check makes `sleep` return.
pub(crate) struct Waker<'a> {
    record: &'a RankRecord,
    seen: u32,
}

impl<'a> Waker<'a> {
    pub(crate) fn new(record: &'a RankRecord) -> Self {
        let seen = record.waker.load(Ordering::SeqCst);
        record.asleep.store(1, Ordering::SeqCst);
        Self { record, seen }
    }

    /// Sleeps until the rank is notified, for `timeout` at most. May return early.
    pub(crate) fn sleep(self, timeout: Duration) {
        wait(&self.record.waker, self.seen, timeout);
    }
}

impl Drop for Waker<'_> {
    fn drop(&mut self) {
        self.record.asleep.store(0, Ordering::SeqCst);
    }
}

#[cfg(target_os = "linux")]
fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    use rustix::thread::futex;
    let timeout = futex::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Not `PRIVATE`: the word may be shared between processes. After any error (the word has
    // changed, a signal, the timeout) the caller checks again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

#[cfg(target_os = "linux")]
fn wake(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

#[cfg(not(target_os = "linux"))]
fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let start = std::time::Instant::now();
    while word.load(Ordering::SeqCst) == seen && start.elapsed() < timeout {
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(not(target_os = "linux"))]
fn wake(_word: &AtomicU32) {}
