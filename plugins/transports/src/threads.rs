//! Ranks that are threads of this process.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use candle_core::{DType, Tensor};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_error::{Error, Result};

use crate::engine::{Board, Identity, MappedRegion, MemoryOwner, Rendezvous, Settings, connect};
use crate::memory::{self, Region, RegionLayout, SharedMemoryHandle};

/// Bytes of a rank's slot. Small, since tests have many groups with little data.
const CHUNK_BYTES: usize = 256 << 10;

/// Stack of a rank's thread. The backward of deep models recurses.
const STACK_BYTES: usize = 64 << 20;

/// Time that ranks of [`run_ranks`] wait for each other.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Makes process groups whose ranks are threads of this process.
#[derive(Debug)]
pub struct ThreadsGroup;

impl ThreadsGroup {
    /// Makes the handles of a group named `world`, one for each rank, in rank order. `timeout`
    /// limits how long a collective waits for its peers.
    ///
    /// As between processes, collectives access tensors from [`ProcessGroup::empty`] directly in
    /// programs whose allocator is a [`SharedMemory`](crate::SharedMemory). They copy other tensors
    /// through slots.
    ///
    /// # Errors
    /// If memory or threads cannot be allocated.
    pub fn create(world_size: usize, timeout: Duration) -> Result<Vec<Arc<dyn ProcessGroup>>> {
        Self::create_with(world_size, timeout, CHUNK_BYTES)
    }

    /// Like [`create`](Self::create), with slots of `chunk_bytes` for each rank, rounded up to
    /// whole cache lines.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    /// As [`create`](Self::create).
    pub fn create_with(
        world_size: usize,
        timeout: Duration,
        chunk_bytes: usize,
    ) -> Result<Vec<Arc<dyn ProcessGroup>>> {
        create(&Arc::default(), world_size, timeout, chunk_bytes)
    }
}

fn create(
    rendezvous: &Arc<ThreadRendezvous>,
    world_size: usize,
    timeout: Duration,
    chunk_bytes: usize,
) -> Result<Vec<Arc<dyn ProcessGroup>>> {
    (0..world_size)
        .map(|rank| {
            let identity = Identity {
                key: "world".to_owned(),
                name: "world".to_owned(),
                rank,
                global_ranks: (0..world_size).collect(),
            };
            connect(rendezvous.clone(), identity, Settings { timeout, chunk_bytes, spins: None })
        })
        .collect()
}

/// Runs `f` on one thread (with 64 MiB of stack) for each rank of a group of `world_size` ranks,
/// and returns the results in rank order. Ranks wait a minute for each other.
///
/// # Errors
/// The error of the rank that failed first; a panic counts as an error. It ends the waits of the
/// other ranks, in this group and all groups split from it.
pub fn run_ranks<T: Send>(
    world_size: usize,
    f: impl Fn(Arc<dyn ProcessGroup>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks_with(world_size, TIMEOUT, f)
}

/// Like [`run_ranks`], with another timeout.
///
/// # Errors
/// As [`run_ranks`].
pub fn run_ranks_with<T: Send>(
    world_size: usize,
    timeout: Duration,
    f: impl Fn(Arc<dyn ProcessGroup>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let rendezvous = Arc::<ThreadRendezvous>::default();
    let groups = create(&rendezvous, world_size, timeout, CHUNK_BYTES)?;
    let first = Mutex::new(None);
    let fail = |rank: usize, error: Error| {
        let mut first = first.lock().expect("no panic while failing");
        if first.is_none() {
            rendezvous.fail(rank, &error);
            *first = Some(error);
        }
    };
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let spawn = |(rank, group)| {
            let (f, fail) = (&f, &fail);
            let run = move || {
                // Call `fail` before dropping `f`'s handle of the group, even after a panic.
                // Otherwise the other ranks only learn that this rank has left, without the reason.
                let result = catch_unwind(AssertUnwindSafe(|| f(Arc::clone(&group))));
                let value = match result {
                    Ok(Ok(value)) => Some(value),
                    Ok(Err(error)) => {
                        fail(rank, error);
                        None
                    }
                    Err(panic) => {
                        let message = panic_message(&*panic);
                        fail(rank, Error::other(format!("rank {rank} panicked: {message}")));
                        None
                    }
                };
                drop::<Arc<dyn ProcessGroup>>(group);
                value
            };
            let name = format!("rank-{rank}");
            let builder = std::thread::Builder::new().name(name).stack_size(STACK_BYTES);
            match builder.spawn_scoped(scope, run) {
                Ok(handle) => Some(handle),
                Err(e) => {
                    fail(rank, Error::Launch(format!("starting a thread for rank {rank}: {e}")));
                    None
                }
            }
        };
        let handles: Vec<_> = groups.into_iter().enumerate().map(spawn).collect();
        handles.into_iter().map(|handle| handle?.join().ok()?).collect()
    });
    match first.into_inner().expect("no panic while failing") {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}

/// The rendezvous of threads of this process.
#[derive(Default)]
struct ThreadRendezvous {
    /// Regions that some ranks still lack, each with the number of ranks that have it.
    regions: Mutex<HashMap<String, (Arc<Region>, usize)>>,
    failure: Mutex<Option<(usize, String)>>,
    board: OnceLock<Arc<Board>>,
}

impl ThreadRendezvous {
    fn fail(&self, rank: usize, error: &Error) {
        let mut failure = self.failure.lock().expect("no panic while failing");
        failure.get_or_insert_with(|| (rank, error.to_string()));
    }
}

impl Rendezvous for ThreadRendezvous {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn region(
        &self,
        key: &str,
        _: Option<usize>,
        layout: RegionLayout,
        _: Duration,
    ) -> Result<MappedRegion> {
        let mut regions = self.regions.lock().expect("no panic while joining");
        let (region, taken) = match regions.remove(key) {
            Some(entry) => entry,
            None => {
                let region = Region::anonymous(layout)
                    .map_err(|e| Error::Launch(format!("reserving {} bytes: {e}", layout.len)))?;
                (Arc::new(region), 0)
            }
        };
        if taken + 1 < layout.size {
            regions.insert(key.to_owned(), (region.clone(), taken + 1));
        }
        Ok(MappedRegion { region, file: None })
    }

    fn board(&self, first: &Arc<Region>, global_ranks: &[usize]) -> Arc<Board> {
        self.board.get_or_init(|| Board::new(first, global_ranks)).clone()
    }

    fn must_meet(&self) -> bool {
        false
    }

    fn watch(&self, _: usize, _: u32) {}

    fn is_gone(&self, _: usize) -> bool {
        false
    }

    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>> {
        memory::empty_tensor(elements, dtype)
    }

    fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        memory::offset_of(bytes).map(|offset| offset as u64)
    }

    fn share(&self) -> Option<SharedMemoryHandle> {
        None
    }

    fn reach(&self, owner: MemoryOwner, offset: u64, len: usize) -> Result<*mut u8> {
        let offset_in_memory = usize::try_from(offset).ok();
        offset_in_memory.and_then(|offset| memory::at(offset, len)).ok_or_else(|| {
            Error::other(format!(
                "rank {} told of {len} bytes at byte {offset}, outside of the shared memory",
                owner.global_rank
            ))
        })
    }

    fn failure(&self) -> Option<(usize, String)> {
        self.failure.lock().expect("no panic while failing").clone()
    }

    fn gives_up(&self) -> bool {
        false
    }
}
