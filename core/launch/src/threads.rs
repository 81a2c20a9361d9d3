//! The compute threads of a rank.

use std::panic::resume_unwind;

use rayon::ThreadPoolBuilder;

use super::process::PROCESS;
use super::supervisor::THREADS_VARIABLE;

/// The number of compute threads that `RAYON_NUM_THREADS` requests.
pub(super) fn configured_threads() -> Option<usize> {
    std::env::var(THREADS_VARIABLE).ok()?.parse().ok().filter(|&n| n > 0)
}

/// The number of this host's `local` ranks that share the cores of this process. If this process's
/// parent, the launcher's daemon, may use more cores, the launcher has bound each rank to its own
/// (`mpirun --bind-to`, `srun --cpus-per-task`).
pub(super) fn ranks_on_same_cores(local: usize) -> usize {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::thread::sched_getaffinity;
        let count = |process| sched_getaffinity(process).map(|set| set.count() as usize);
        if let (Ok(own), Ok(all)) = (count(None), count(rustix::process::getppid())) {
            return sharing(local, own, all);
        }
    }
    local
}

/// Like [`ranks_on_same_cores`], for ranks that have `own` of `all` cores each.
#[cfg(any(test, target_os = "linux", target_os = "android"))]
fn sharing(local: usize, own: usize, all: usize) -> usize {
    match own < all {
        // Bound to a socket, for example, which several ranks share.
        true => local.saturating_mul(own).div_ceil(all).clamp(1, local.max(1)),
        false => local,
    }
}

/// Makes a pool of `threads` threads, including the calling thread, for its parallel work. Work too
/// small to share stays on the calling thread. Other threads keep rayon's global pool, so that they
/// do not wait for this thread.
///
/// Has no effect on a thread that is already in a pool.
pub(super) fn install_compute_pool(threads: usize) {
    if let Ok(pool) = ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build() {
        PROCESS.compute_pools.lock().expect("no panic while a pool is kept").push(pool);
    }
}

/// The stack of a thread that runs a rank. Backward recurses along the graph, so a long graph needs
/// a deep stack. Address space, not memory: a page takes memory at its first use.
pub const RANK_STACK_BYTES: usize = 256 << 20;

/// Runs `f` on a thread of its own, which has as many compute threads as this one, and waits for
/// it. Thread-local buffers, such as those for products, start empty for `f`.
///
/// # Errors
/// If the thread cannot be started.
///
/// # Panics
/// If `f` does.
pub fn on_own_threads<R: Send>(name: String, f: impl FnOnce() -> R + Send) -> std::io::Result<R> {
    let threads = rayon::current_num_threads();
    let run = move || {
        let pool = ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build();
        let result = f();
        drop(pool);
        result
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name).stack_size(RANK_STACK_BYTES);
        Ok(thread.spawn_scoped(scope, run)?.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_threads_are_as_many() {
        let own = || (std::thread::current().id(), rayon::current_num_threads());
        let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let (here, there) =
            pool.install(|| (own(), on_own_threads("own".to_owned(), own).unwrap()));
        assert_ne!(there.0, here.0);
        assert_eq!(there.1, 3);
    }

    #[test]
    fn bound_ranks_do_not_share_their_cores() {
        for ((local, own, all), expected) in [
            ((4, 64, 64), 4), // not bound
            ((4, 8, 8), 4),   // a container
            ((2, 1, 64), 1),  // --bind-to core
            ((8, 8, 64), 1),  // --cpus-per-task=8
            ((8, 32, 64), 4), // --bind-to socket
            ((3, 32, 64), 2),
            ((1, 1, 64), 1),
        ] {
            assert_eq!(sharing(local, own, all), expected, "{local} ranks, {own} of {all}");
        }
    }

    #[test]
    fn one_thread_computes_on_the_caller() {
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
