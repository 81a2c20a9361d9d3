//! [`Group`]: a rank's handle of a process group, over memory that the ranks share or a network.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{Collective, End, ProcessGroup, Solo, Work, check};
use fulgurite_error::{Error, Result};
use twox_hash::XxHash3_64;

use super::job_thread::{JobThread, RunJobs};
use super::plan::Collective as EngineCollective;
use super::queue::{Completion, P2pTask, Queue};
use super::wait::Failure;

/// The identity of a group, and this process's rank in it.
pub(crate) struct Identity {
    /// Unique among all groups of the job.
    pub(crate) key: String,
    pub(crate) name: String,
    pub(crate) rank: usize,
    pub(crate) global_ranks: Vec<usize>,
}

impl Identity {
    pub(crate) fn size(&self) -> usize {
        self.global_ranks.len()
    }

    /// This process's global rank.
    pub(crate) fn own_rank(&self) -> usize {
        self.global_ranks[self.rank]
    }

    /// Returns the group if this rank is alone in it. Such a group has no medium.
    pub(crate) fn alone(&self) -> Option<Arc<dyn ProcessGroup>> {
        let alone = || Arc::new(Solo::new(self.name.clone(), self.own_rank())) as _;
        (self.size() == 1).then(alone)
    }

    /// Converts `failure` to an error of the operation `op`.
    pub(crate) fn error(&self, op: &'static str, failure: Failure) -> Error {
        failure.error(self.own_rank(), &self.name, op)
    }
}

/// What connects the members of a group: memory that they share, or a network.
pub(crate) trait Medium: Send + Sync + 'static {
    type Worker: RunJobs;

    fn identity(&self) -> &Identity;

    /// The jobs that the worker runs.
    fn queue(&self) -> &Arc<Queue>;

    /// The transport's name, for people.
    fn transport(&self) -> &str;

    /// Starts a message.
    fn message(&self, task: P2pTask) -> Result<Arc<Completion>>;

    /// Makes the group of some of the members. Collective over them.
    fn split(&self, identity: Identity) -> Result<Arc<dyn ProcessGroup>>;

    /// Makes a flat CPU tensor of arbitrary values in memory that suits the medium, if it has some.
    fn empty(&self, elements: usize, dtype: DType) -> Result<Option<Tensor>> {
        let _ = (elements, dtype);
        Ok(None)
    }

    fn abort(&self, reason: &str);

    /// Returns the failure of the group, if this rank knows of one.
    fn broken(&self) -> Option<Failure>;

    /// Returns the failure of the group or of the job, even if only another rank has reported it so
    /// far.
    fn broken_anywhere(&self) -> Option<Failure>;

    /// Tells waiting threads of this rank that the queue is closed, and ends messages.
    fn close(&self);

    /// Tells the other members that this rank's communication thread has ended.
    fn leave(&self) {}
}

/// A process group. Dropping it finishes started operations (for a few seconds at most) and joins
/// its threads.
pub(crate) struct Group<M: Medium> {
    medium: Arc<M>,
    jobs: JobThread<M::Worker>,
    splits: AtomicU64,
}

impl<M: Medium> Group<M> {
    /// Starts the communication thread.
    pub(crate) fn new(medium: Arc<M>, worker: M::Worker) -> Result<Self> {
        let name = format!("comm-{}", medium.identity().name);
        let leave = {
            let medium = medium.clone();
            move || medium.leave()
        };
        let jobs = JobThread::start(name, medium.queue().clone(), worker, leave)?;
        Ok(Self { medium, jobs, splits: AtomicU64::new(0) })
    }

    fn start_collective(
        &self,
        collective: EngineCollective,
        after: Option<Arc<dyn End>>,
        overlap: bool,
    ) -> Result<Work> {
        let op = collective.name();
        self.alive(op)?;
        let medium = self.medium.clone();
        let error = move |failure| medium.identity().error(op, failure);
        Ok(self.jobs.push(collective, after, overlap, error))
    }

    fn message(
        &self,
        op: &'static str,
        tensor: &Tensor,
        peer: usize,
        sending: bool,
    ) -> Result<Work> {
        check::peer(self, op, peer)?;
        check::tensor(self, op, "tensor", tensor)?;
        self.alive(op)?;
        let done = self.medium.message(P2pTask { sending, peer, tensor: tensor.clone() })?;
        let medium = self.medium.clone();
        let error = move |failure| medium.identity().error(op, failure);
        Ok(Work::pending(move || done.wait().map_err(error)))
    }

    fn alive(&self, op: &'static str) -> Result<()> {
        match self.medium.broken() {
            Some(failure) => Err(self.medium.identity().error(op, failure)),
            None => Ok(()),
        }
    }
}

impl<M: Medium> ProcessGroup for Group<M> {
    fn name(&self) -> &str {
        &self.medium.identity().name
    }

    fn rank(&self) -> usize {
        self.medium.identity().rank
    }

    fn size(&self) -> usize {
        self.medium.identity().size()
    }

    fn transport(&self) -> String {
        self.medium.transport().to_owned()
    }

    fn global_ranks(&self) -> &[usize] {
        &self.medium.identity().global_ranks
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
        self.message("send", tensor, dst, true)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.message("recv", tensor, src, false)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let (set, rank) = check::partition(self, partition)?;
        let agreed = XxHash3_64::oneshot(format!("{name}\0{partition:?}").as_bytes());
        self.start_collective(EngineCollective::Split(agreed), None, true)?.wait()?;
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        let Identity { key, global_ranks, .. } = self.medium.identity();
        let part = Identity {
            key: format!("{key}/{split}.{set}"),
            name: name.to_owned(),
            rank,
            global_ranks: partition[set].iter().map(|&rank| global_ranks[rank]).collect(),
        };
        self.medium.split(part)
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        let suitable = match device {
            Device::Cpu => self.medium.empty(elements, dtype)?,
            _ => None,
        };
        suitable.map_or_else(|| storage::unset(elements, dtype, device), Ok)
    }

    fn abort(&self, reason: &str) {
        self.medium.abort(reason);
    }

    fn failure(&self) -> Option<Error> {
        let failure = self.medium.broken_anywhere()?;
        Some(self.medium.identity().error("failure", failure))
    }
}

impl<M: Medium> Drop for Group<M> {
    fn drop(&mut self) {
        self.medium.queue().close();
        self.medium.close();
    }
}
