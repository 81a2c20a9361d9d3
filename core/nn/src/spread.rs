//! Work of equal parts for the threads that compute, which stay awake for the next.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// How long a thread without work looks for some before it sleeps. Chosen by measurement: a step of
/// the benchmark `tiny` on two threads took 21.9 ms without looking, 21.6 with 30 µs of it, and 20.6
/// with this.
const LOOKS_FOR: Duration = Duration::from_millis(1);

/// How long it keeps its core to itself meanwhile; then others that want it are let in.
const KEEPS_CORE_FOR: Duration = Duration::from_micros(100);

/// Calls `part` with every number below `parts`, on the threads of rayon's current pool, and returns
/// when all calls have: the first on this thread, which, if it is one of the pool's, takes others where
/// no thread is free.
///
/// Rayon's own loops let a thread sleep some microseconds after its work is done.
pub(super) fn spread(parts: usize, part: impl Fn(usize) + Sync) {
    // A part that this thread takes itself must leave nothing behind that it would look for.
    let _looking = Looking::begin();
    let left = AtomicUsize::new(parts.saturating_sub(1));
    let (part, left) = (&part, &left);
    rayon::in_place_scope(|scope| {
        for i in 1..parts {
            scope.spawn(move |_| {
                part(i);
                left.fetch_sub(1, Ordering::Release);
                stay_awake();
            });
        }
        if parts > 0 {
            part(0);
        }
        look(|| left.load(Ordering::Acquire) == 0);
        // What is left, if anything, the scope waits for asleep.
    });
}

thread_local! {
    /// Whether this thread looks for work, or will when it is done with what it does.
    static LOOKS: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread looks for work, or did before.
struct Looking {
    before: bool,
}

impl Looking {
    fn begin() -> Self {
        Self { before: LOOKS.replace(true) }
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKS.set(self.before);
    }
}

/// Has this thread, one of a pool's, look for more work when it is done with what it does.
fn stay_awake() {
    let thread = rayon::current_thread_index();
    if LOOKS.get() {
        return;
    }
    rayon::spawn(move || {
        // Another thread may have taken this, such as one that waits for its own parts.
        if rayon::current_thread_index() == thread && !LOOKS.get() {
            let _looking = Looking::begin();
            look(|| false);
        }
    });
}

/// Does the pool's work until `done`, or until there has been none for [`LOOKS_FOR`].
fn look(done: impl Fn() -> bool) {
    let mut idle_since = Instant::now();
    while !done() {
        if rayon::yield_now() == Some(rayon::Yield::Executed) {
            idle_since = Instant::now();
            continue;
        }
        match idle_since.elapsed() {
            idle if idle > LOOKS_FOR => return,
            idle if idle > KEEPS_CORE_FOR => yield_now(),
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
        spread(parts, |i| {
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
    fn a_part_that_the_caller_takes_leaves_nothing_for_it_to_look_for() {
        let pool = pool(1);
        pool.install(|| {
            spread(2, |_| {});
            assert!(!LOOKS.get(), "as before");
            // What is left in the pool's queue, this thread would do now.
            assert_ne!(rayon::yield_now(), Some(rayon::Yield::Executed));
        });
    }

    #[test]
    fn parts_may_have_parts() {
        pool(3).install(|| spread(4, |_| assert_eq!(calls(4), [1; 4])));
    }

    #[test]
    fn a_long_part_is_waited_for_and_a_panic_passed_on() {
        let pool = pool(2);
        let done = AtomicBool::new(false);
        pool.install(|| {
            spread(2, |i| {
                if i == 1 {
                    std::thread::sleep(10 * LOOKS_FOR);
                    done.store(true, Ordering::Relaxed);
                }
            });
        });
        assert!(done.into_inner());
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.install(|| spread(2, |i| assert_ne!(i, 1, "the second part")));
        }));
        assert!(failed.is_err());
    }
}
