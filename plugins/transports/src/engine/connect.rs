//! Groups over memory that their ranks share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Tensor};
use fulgurite_engine::collective::ProcessGroup;
use fulgurite_error::Result;

use super::group::{Group, Identity, Medium};
use super::queue::{Completion, Job, P2pTask, Queue, Task};
use super::rendezvous::{MappedRegion, Rendezvous};
use super::wait::{Failure, Shared};
use super::worker::Worker;
use crate::memory::RegionLayout;

/// Settings of a group, which groups split from it inherit.
pub(crate) struct Settings {
    pub(crate) timeout: Duration,
    pub(crate) chunk_bytes: usize,
    /// Whether a waiting rank spins before it sleeps. By default it does if each rank has a core.
    pub(crate) spins: Option<bool>,
}

/// Makes this rank's handle of a group. Collective, unless the rendezvous says otherwise.
pub(crate) fn connect(
    rendezvous: Arc<dyn Rendezvous>,
    identity: Identity,
    settings: Settings,
) -> Result<Arc<dyn ProcessGroup>> {
    if let Some(alone) = identity.alone() {
        return Ok(alone);
    }
    let Settings { timeout, chunk_bytes, spins } = settings;
    let layout = RegionLayout::new(identity.size(), chunk_bytes);
    let leader = (identity.rank != 0).then_some(identity.global_ranks[0]);
    let MappedRegion { region, file } =
        rendezvous.region(&identity.key, leader, layout, timeout)?;
    let record = region.record(identity.rank);
    record.pid.store(std::process::id(), Ordering::SeqCst);
    if let Some(share) = rendezvous.share() {
        record.memory.fd.store(share.fd, Ordering::SeqCst);
        record.memory.len.store(share.len as u64, Ordering::SeqCst);
        record.memory.nonce.store(share.nonce, Ordering::SeqCst);
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shared = Arc::new(Shared {
        board: rendezvous.board(&region, &identity.global_ranks),
        spins: spins.unwrap_or(identity.size() <= cores),
        identity,
        timeout,
        chunk_bytes,
        region,
        rendezvous,
        queue: Arc::default(),
        failure: Mutex::new(None),
        reaches_all: AtomicBool::new(false),
    });
    let group = Group::new(shared.clone(), Worker::new(shared.clone()))?;
    if shared.rendezvous.must_meet() {
        group.barrier()?.wait()?;
        for (rank, &global) in shared.identity.global_ranks.iter().enumerate() {
            let pid = shared.region.record(rank).pid.load(Ordering::SeqCst);
            shared.rendezvous.watch(global, pid);
        }
    }
    shared.reach_all();
    // All ranks have mapped the region by now.
    drop(file);
    Ok(Arc::new(group))
}

impl Medium for Shared {
    type Worker = Worker;

    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    fn transport(&self) -> &str {
        self.rendezvous.name()
    }

    fn message(&self, task: P2pTask) -> Result<Arc<Completion>> {
        let done = Arc::new(Completion::default());
        let job = Job { task: Task::P2p(task), after: None, done: done.clone() };
        self.queue.push(job, true);
        // A thread that waits for the progress of messages must take this one too.
        self.notify_self();
        Ok(done)
    }

    fn split(&self, identity: Identity) -> Result<Arc<dyn ProcessGroup>> {
        let Self { timeout, chunk_bytes, spins, .. } = *self;
        let settings = Settings { timeout, chunk_bytes, spins: Some(spins) };
        connect(self.rendezvous.clone(), identity, settings)
    }

    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>> {
        self.rendezvous.empty(elements, dtype)
    }

    fn abort(&self, reason: &str) {
        self.region.abort(self.identity.rank, None, reason);
    }

    fn broken(&self) -> Option<Failure> {
        Self::broken(self)
    }

    fn broken_anywhere(&self) -> Option<Failure> {
        let of_job = || {
            let (rank, message) = self.rendezvous.failure()?;
            Some(Failure::Peer { rank, message })
        };
        Self::broken(self).or_else(of_job)
    }

    fn close(&self) {
        self.notify_self();
    }

    fn leave(&self) {
        self.region.record(self.identity.rank).left.store(1, Ordering::SeqCst);
        self.region.notify_all();
    }
}
