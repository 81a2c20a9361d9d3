//! The threads that a rank computes with.

use std::sync::Mutex;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::supervisor::THREADS_VARIABLE;

/// The number of compute threads that `RAYON_NUM_THREADS` asks for.
pub(super) fn configured_threads() -> Option<usize> {
    std::env::var(THREADS_VARIABLE).ok()?.parse().ok().filter(|&n| n > 0)
}

/// Makes a pool of `threads` threads, of which the calling thread is one, for the parallel work of
/// the calling thread. Work too small to share stays on it. Other threads keep rayon's global pool,
/// so that they do not wait for this one.
///
/// Has no effect on a thread that is in a pool already.
pub(super) fn install_compute_pool(threads: usize) {
    // A pool must live as long as its threads.
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
            install_compute_pool(1);
            install_compute_pool(1); // has no effect the second time
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
