//! [`Group`]: a rank's handle of a process group.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_core::autograd::storage;
use fulgurite_core::collective::{Collective, End, ProcessGroup, Solo, Work, check};
use fulgurite_core::{Error, Result, advice};
use twox_hash::XxHash3_64;

use super::plan::Collective as EngineCollective;
use super::queue::{Completion, Job, P2pTask, Queue, Task, Turn, work};
use super::rendezvous::{MappedRegion, Rendezvous};
use super::wait::{Failure, Shared};
use super::worker::Worker;
use crate::memory::RegionLayout;

/// Number of times that the communication thread checks a flag before it sleeps: some tens of
/// microseconds. More would take cycles from the computing threads.
const SPINS: u32 = 2000;

/// Number of times that a waiting caller checks a flag before it sleeps.
///
/// This must take longer than waking another rank. Otherwise a rank that has slept once is late for
/// the next collective, so the others sleep there, and then the first rank sleeps again in the one
/// after.
const CALLERS_SPINS: u32 = 20_000;

/// The identity of a group, and this process's rank in it.
pub(crate) struct Membership {
    /// Unique among all groups that share a rendezvous.
    pub(crate) key: String,
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) global_ranks: Vec<usize>,
    pub(crate) timeout: Duration,
    pub(crate) chunk_bytes: usize,
    /// Whether a waiting rank spins before it sleeps. By default it does if each rank has a core.
    /// A split group inherits the setting.
    pub(crate) spins: Option<bool>,
}

/// A process group of this engine. Dropping it finishes started operations (for a few seconds at
/// most) and joins the communication thread.
pub(crate) struct Group {
    shared: Arc<Shared>,
    worker: Arc<Mutex<Worker>>,
    thread: Option<JoinHandle<()>>,
    rendezvous: Arc<dyn Rendezvous>,
    key: String,
    chunk_bytes: usize,
    splits: AtomicU64,
}

impl Group {
    /// Makes this rank's handle of the group. Collective, unless the rendezvous says otherwise.
    pub(crate) fn connect(
        rendezvous: Arc<dyn Rendezvous>,
        member: Membership,
    ) -> Result<Arc<dyn ProcessGroup>> {
        let Membership { key, name, rank, global_ranks, timeout, chunk_bytes, spins } = member;
        if global_ranks.len() == 1 {
            return Ok(Arc::new(Solo::new(name, global_ranks[0])));
        }
        let size = global_ranks.len();
        let layout = RegionLayout::new(size, chunk_bytes);
        let leader = (rank != 0).then_some(global_ranks[0]);
        let MappedRegion { region, file } = rendezvous.region(&key, leader, layout, timeout)?;
        region.record(rank).pid.store(std::process::id(), Ordering::SeqCst);
        if let Some(share) = rendezvous.share() {
            let memory = &region.record(rank).memory;
            memory.fd.store(share.fd, Ordering::SeqCst);
            memory.len.store(share.len as u64, Ordering::SeqCst);
            memory.nonce.store(share.nonce, Ordering::SeqCst);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            board: rendezvous.board(&region, &global_ranks),
            name,
            rank,
            global_ranks,
            timeout,
            region,
            rendezvous: rendezvous.clone(),
            queue: Queue::default(),
            failure: Mutex::new(None),
            spins: spins.unwrap_or(size <= cores),
            reaches_all: AtomicBool::new(false),
        });
        let worker = Arc::new(Mutex::new(Worker::new(shared.clone())));
        let thread = std::thread::Builder::new()
            .name(format!("comm-{}", shared.name))
            .spawn({
                let (shared, worker) = (shared.clone(), worker.clone());
                move || communicate(&shared, &worker)
            })
            .map_err(|e| {
                Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
            })?;
        let group = Self {
            shared,
            worker,
            thread: Some(thread),
            rendezvous,
            key,
            chunk_bytes,
            splits: AtomicU64::new(0),
        };
        if group.rendezvous.must_meet() {
            group.barrier()?.wait()?;
            for (rank, &global) in group.shared.global_ranks.iter().enumerate() {
                let pid = group.shared.region.record(rank).pid.load(Ordering::SeqCst);
                group.rendezvous.watch(global, pid);
            }
        }
        group.shared.reach_all();
        // All ranks have mapped the region, so the file is no longer needed.
        drop(file);
        Ok(Arc::new(group))
    }

    /// Queues a task. With `wake`, wakes the communication thread.
    fn push(
        &self,
        op: &'static str,
        task: Task,
        after: Option<Arc<dyn End>>,
        wake: bool,
    ) -> Result<Work> {
        let shared = &self.shared;
        if let Some(failure) = shared.broken() {
            return Err(shared.error(op, failure));
        }
        let done = Arc::new(Completion::default());
        let is_p2p = matches!(task, Task::P2p(_));
        shared.queue.push(Job { task, after, done: done.clone() }, wake);
        if is_p2p {
            // A thread that waits for the progress of messages must take this one too.
            shared.notify_self();
        }
        let (waits, worker) = (shared.clone(), self.worker.clone());
        let finish = move |done: &Completion| match is_p2p {
            true => done.wait(),
            false => waits.queue.finish(done, |turn, job| run(&worker, turn, job, CALLERS_SPINS)),
        };
        let shared = shared.clone();
        Ok(work(done, wake && !is_p2p, finish, move |failure| shared.error(op, failure)))
    }

    fn start_collective(
        &self,
        collective: EngineCollective,
        after: Option<Arc<dyn End>>,
        overlap: bool,
    ) -> Result<Work> {
        self.push(collective.name(), Task::Collective(collective), after, overlap)
    }
}

impl ProcessGroup for Group {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn size(&self) -> usize {
        self.shared.size()
    }

    fn transport(&self) -> String {
        self.rendezvous.name().to_owned()
    }

    fn global_ranks(&self) -> &[usize] {
        &self.shared.global_ranks
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        collective.check(self)?;
        self.start_collective(collective.into(), None, overlap)
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        collective.check(self)?;
        self.start_collective(collective.into(), Some(end.clone()), true).map(Some)
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        check::peer(self, "send", dst)?;
        check::tensor(self, "send", "tensor", tensor)?;
        let task = P2pTask { sending: true, peer: dst, tensor: tensor.clone() };
        self.push("send", Task::P2p(task), None, true)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        check::peer(self, "recv", src)?;
        check::tensor(self, "recv", "tensor", tensor)?;
        let task = P2pTask { sending: false, peer: src, tensor: tensor.clone() };
        self.push("recv", Task::P2p(task), None, true)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let (set, rank) = check::partition(self, partition)?;
        let agreed = XxHash3_64::oneshot(format!("{name}\0{partition:?}").as_bytes());
        self.start_collective(EngineCollective::Split(agreed), None, true)?.wait()?;
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let global = self.global_ranks();
        let member = Membership {
            key: format!("{}/{split}.{set}", self.key),
            name: name.to_owned(),
            rank,
            global_ranks: partition[set].iter().map(|&rank| global[rank]).collect(),
            timeout: self.shared.timeout,
            chunk_bytes: self.chunk_bytes,
            spins: Some(self.shared.spins),
        };
        Self::connect(self.rendezvous.clone(), member)
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let shared = match device {
            Device::Cpu => self.rendezvous.empty(elements, dtype)?,
            _ => None,
        };
        shared.map_or_else(|| storage::unset(elements, dtype, device), Ok)
    }

    fn abort(&self, reason: &str) {
        self.shared.region.abort(self.shared.rank, None, reason);
    }

    fn failure(&self) -> Option<Error> {
        let of_job =
            || self.rendezvous.failure().map(|(rank, message)| Failure::Peer { rank, message });
        let failure = self.shared.broken().or_else(of_job)?;
        Some(self.shared.error("failure", failure))
    }
}

/// The body of the communication thread. Returns when the group is dropped and all started
/// operations have ended.
fn communicate(shared: &Shared, worker: &Mutex<Worker>) {
    while let Some((turn, job)) = shared.queue.next() {
        run(worker, turn, job, SPINS);
    }
    shared.region.record(shared.rank).left.store(1, Ordering::SeqCst);
    shared.region.notify_all();
}

/// Runs a job. Only the thread with the turn uses the worker, so the lock is free.
fn run(worker: &Mutex<Worker>, turn: Turn<'_>, job: Job, spins: u32) {
    worker.lock().expect("a worker catches panics").run(job, spins);
    drop(turn);
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shared.queue.close();
        self.shared.notify_self();
        if let Some(thread) = self.thread.take() {
            // The thread catches panics; an error means that it has ended anyway.
            let _ = thread.join();
        }
    }
}
