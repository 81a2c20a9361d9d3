//! The threads that a rank computes with.

use std::sync::Mutex;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::supervisor::THREADS;

/// The number of compute threads that the user asks for.
pub(super) fn asked() -> Option<usize> {
    std::env::var(THREADS).ok()?.parse().ok().filter(|&n| n > 0)
}

/// Makes the calling thread one of the `threads` of a pool for its own parallel work. Work that is too
/// small to share stays on it, as all of it does if there is one thread. Other threads keep rayon's
/// global pool, so that they do not wait for this one.
///
/// Without effect on a thread that is in a pool already.
pub(super) fn compute_here(threads: usize) {
    // A pool that a running thread belongs to must live as long as that does.
    static POOLS: Mutex<Vec<ThreadPool>> = Mutex::new(Vec::new());
    if let Ok(pool) = ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build() {
        POOLS.lock().expect("no panic while a pool is kept").push(pool);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_computes_on_the_caller_and_others_are_not_held_up() {
        std::thread::spawn(|| {
            compute_here(1);
            compute_here(1); // the second time without effect
            let here = std::thread::current().id();
            let on = || std::thread::current().id();
            assert_eq!(rayon::join(on, on), (here, here));
            // Another thread's parallel work ends while this one waits for it.
            let other = std::thread::spawn(|| rayon::join(|| 1, || 2));
            assert_eq!(other.join().unwrap(), (1, 2));
        })
        .join()
        .unwrap();
    }
}
