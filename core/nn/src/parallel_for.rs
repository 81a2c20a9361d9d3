//! A parallel loop for kernels whose threads stay awake for the next loop.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// The time that a thread without work spins before it sleeps. Chosen by measurement: a step of the
/// benchmark `tiny` on two threads took 21.9 ms without spinning, 21.6 with 30 µs, and 20.6 with
/// this value.
const SPIN_FOR: Duration = Duration::from_millis(1);

/// The time that a spinning thread keeps its core. After that it yields the core to other threads
/// each time it finds no work.
const KEEP_CORE_FOR: Duration = Duration::from_micros(100);

/// Calls `part` with every number below `parts` on the threads of rayon's current pool, and returns
/// when all calls have returned. Part 0 runs on the calling thread. That thread also takes other
/// parts if it belongs to the pool and no other thread is free.
///
/// Unlike in rayon's own loops, threads do not sleep within microseconds after their work.
pub(super) fn parallel_for(parts: usize, part: impl Fn(usize) + Sync) {
    // While this thread runs a part from the queue, it must not `linger` afterwards.
    let _spinning = Spinning::begin();
    let left = AtomicUsize::new(parts.saturating_sub(1));
    let (part, left) = (&part, &left);
    rayon::in_place_scope(|scope| {
        for i in 1..parts {
            scope.spawn(move |_| {
                part(i);
                left.fetch_sub(1, Ordering::Release);
                linger();
            });
        }
        if parts > 0 {
            part(0);
        }
        spin_for_work(|| left.load(Ordering::Acquire) == 0);
        // The end of the scope waits, asleep, for the remaining parts.
    });
}

thread_local! {
    /// Whether [`spin_for_work`] runs on this thread, or will run after the thread's present work.
    /// A property of the thread, not of the execution context.
    static SPINS: Cell<bool> = const { Cell::new(false) };
}

/// Sets [`SPINS`] until it is dropped.
struct Spinning {
    before: bool,
}

impl Spinning {
    fn begin() -> Self {
        Self { before: SPINS.replace(true) }
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        SPINS.set(self.before);
    }
}

/// Makes this pool thread spin for more work after its present work, unless it will do so anyway.
fn linger() {
    let thread = rayon::current_thread_index();
    if SPINS.get() {
        return;
    }
    rayon::spawn(move || {
        // Another thread may have taken this task, for instance one that waits for its own parts.
        if rayon::current_thread_index() == thread && !SPINS.get() {
            let _spinning = Spinning::begin();
            spin_for_work(|| false);
        }
    });
}

/// Runs the pool's work until `done`, or until no work has come for [`SPIN_FOR`].
fn spin_for_work(done: impl Fn() -> bool) {
    let mut idle_since = Instant::now();
    while !done() {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            idle_since = Instant::now();
            continue;
        }
        match idle_since.elapsed() {
            idle if idle > SPIN_FOR => return,
            idle if idle > KEEP_CORE_FOR => yield_now(),
            _ => (0..16).for_each(|_| spin_loop()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    fn calls(parts: usize) -> Vec<usize> {
        let calls: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
        parallel_for(parts, |i| {
            calls[i].fetch_add(1, Ordering::Relaxed);
        });
        calls.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_part_is_done_once_when_it_returns() {
        for threads in 1..4 {
            let pool = pool(threads);
            for parts in [0, 1, 2, 3, 17] {
                assert_eq!(pool.install(|| calls(parts)), vec![1; parts]);
            }
        }
        assert_eq!(calls(5), [1; 5], "from a thread of no pool");
    }

    #[test]
    fn a_part_that_the_caller_takes_does_not_linger() {
        let pool = pool(1);
        pool.install(|| {
            parallel_for(2, |_| {});
            assert!(!SPINS.get(), "as before");
            // A lingering task would be in the pool's queue, and this thread would run it now.
            assert_ne!(rayon::yield_now(), Some(rayon::Yield::Executed));
        });
    }

    #[test]
    fn parts_may_have_parts() {
        pool(3).install(|| parallel_for(4, |_| assert_eq!(calls(4), [1; 4])));
    }

    #[test]
    fn waits_for_long_parts_and_passes_on_panics() {
        let pool = pool(2);
        let done = AtomicBool::new(false);
        pool.install(|| {
            parallel_for(2, |i| {
                if i == 1 {
                    std::thread::sleep(10 * SPIN_FOR);
                    done.store(true, Ordering::Relaxed);
                }
            });
        });
        assert!(done.into_inner());
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.install(|| parallel_for(2, |i| assert_ne!(i, 1, "the second part")));
        }));
        assert!(failed.is_err());
    }
}
