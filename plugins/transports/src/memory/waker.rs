//! Sleeping until another rank has made a change.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::RankRecord;

/// Wakes a rank, or keeps it from falling asleep. Call it after the change that the rank waits for.
pub(crate) fn notify(record: &RankRecord) {
    notify_at(&record.waker, &record.asleep);
}

fn notify_at<W: Word>(waker: &W, asleep: &W) {
    waker.increment();
    if asleep.get() != 0 {
        waker.wake();
    }
}

/// The futex word of a rank that is about to sleep. The rank calls `Waker::new`, checks its
/// condition, and calls `sleep`. A [`notify`] after the check makes `sleep` return.
pub(crate) struct Waker<'a, W: Word = AtomicU32> {
    waker: &'a W,
    asleep: &'a W,
    seen: u32,
}

impl<'a> Waker<'a> {
    pub(crate) fn new(record: &'a RankRecord) -> Self {
        Self::at(&record.waker, &record.asleep)
    }
}

impl<'a, W: Word> Waker<'a, W> {
    fn at(waker: &'a W, asleep: &'a W) -> Self {
        let seen = waker.get();
        asleep.set(1);
        Self { waker, asleep, seen }
    }

    /// Sleeps until the rank is notified, for at most `timeout`. May return early.
    pub(crate) fn sleep(self, timeout: Duration) {
        self.waker.wait(self.seen, timeout);
    }
}

impl<W: Word> Drop for Waker<'_, W> {
    fn drop(&mut self) {
        self.asleep.set(0);
    }
}

/// A word in shared memory, and a thread that sleeps until it changes. All operations are in one
/// order.
pub(crate) trait Word {
    fn get(&self) -> u32;
    fn set(&self, value: u32);
    fn increment(&self);
    /// Sleeps while the word is `seen`. May return early.
    fn wait(&self, seen: u32, timeout: Duration);
    /// Wakes a thread that sleeps on the word.
    fn wake(&self);
}

impl Word for AtomicU32 {
    fn get(&self) -> u32 {
        self.load(Ordering::SeqCst)
    }

    fn set(&self, value: u32) {
        self.store(value, Ordering::SeqCst);
    }

    fn increment(&self) {
        self.fetch_add(1, Ordering::SeqCst);
    }

    fn wait(&self, seen: u32, timeout: Duration) {
        wait(self, seen, timeout);
    }

    fn wake(&self) {
        wake(self);
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    use rustix::thread::futex;
    let timeout = futex::Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Not `PRIVATE`, as the word may be shared between processes. After any error (the word has
    // changed, a signal, the timeout) the caller checks again.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
}

#[cfg(all(target_os = "linux", not(miri)))]
fn wake(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

// Miri supports futexes, but not with the types that rustix uses.
#[cfg(any(not(target_os = "linux"), miri))]
fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let start = std::time::Instant::now();
    while word.load(Ordering::SeqCst) == seen && start.elapsed() < timeout {
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(any(not(target_os = "linux"), miri))]
fn wake(_word: &AtomicU32) {}

/// Tests of all orders of a rank that falls asleep and a rank that notifies it
/// (`--features interleavings`).
#[cfg(all(test, feature = "interleavings"))]
mod interleavings {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU32;
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// A word with a futex like the kernel's, which reads the word under the lock that wakers take.
    #[derive(Default)]
    struct Model {
        word: AtomicU32,
        lock: Mutex<()>,
        woken: Condvar,
    }

    impl Word for Model {
        fn get(&self) -> u32 {
            self.word.load(Ordering::SeqCst)
        }

        fn set(&self, value: u32) {
            self.word.store(value, Ordering::SeqCst);
        }

        fn increment(&self) {
            self.word.fetch_add(1, Ordering::SeqCst);
        }

        /// Without a time limit: a lost wake is a deadlock, which loom finds.
        fn wait(&self, seen: u32, _: Duration) {
            let guard = self.lock.lock().unwrap();
            if self.word.fetch_add(0, Ordering::SeqCst) == seen {
                drop(self.woken.wait(guard).unwrap());
            }
        }

        fn wake(&self) {
            let _guard = self.lock.lock().unwrap();
            self.woken.notify_one();
        }
    }

    #[derive(Default)]
    struct Rank {
        waker: Model,
        asleep: Model,
        arrived: AtomicU32,
    }

    /// Models a barrier: a rank waits until `others` have arrived, each of which notifies it.
    fn check(others: u32) {
        let mut model = loom::model::Builder::new();
        // Limits the number of preemptions, as there are too many orders.
        model.preemption_bound = Some(3);
        model.check(move || {
            let rank = Arc::new(Rank::default());
            let threads: Vec<_> = (0..others)
                .map(|_| {
                    let rank = rank.clone();
                    thread::spawn(move || {
                        rank.arrived.fetch_add(1, Ordering::AcqRel);
                        notify_at(&rank.waker, &rank.asleep);
                    })
                })
                .collect();
            loop {
                let waker = Waker::at(&rank.waker, &rank.asleep);
                if rank.arrived.load(Ordering::Acquire) == others {
                    break;
                }
                waker.sleep(Duration::MAX);
            }
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    #[test]
    fn no_notification_is_lost() {
        check(1);
        check(2);
    }
}
