//! [`connect_world`], and the handle of a process group.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use candle_core::Tensor;
use fulgurite_core::collective::{Collective, End, GroupContext, ProcessGroup, Solo, Work, check};
use fulgurite_core::{Error, Result, advice};
use twox_hash::XxHash3_64;

use super::lanes::Lanes;
use super::messenger::Messenger;
use super::shared::{Shared, World};
use super::wire::Network;
use super::worker::Worker;
use crate::engine::{Collective as EngineCollective, Completion, Failure, Job, Task, Turn, work};

/// Makes the group of all ranks of a job over `network`.
///
/// In a round of a reduction a rank holds up to `chunk_bytes` of the other ranks' data. Collective:
/// every rank of the job calls it, in the same order as other calls.
///
/// # Errors
/// If a rank cannot be reached within `context.timeout`. The error names the rank.
pub fn connect_world(
    network: Arc<dyn Network>,
    context: &GroupContext,
    chunk_bytes: usize,
) -> Result<Arc<dyn ProcessGroup>> {
    // A job may build several world groups. Every rank builds them in the same order.
    let counter = format!("network/{}/builds/{}", network.name(), context.rank);
    let build = context.store.add(&counter, 1)?;
    let key = format!("network/{}/world{build}", network.name());
    let (store, timeout) = (context.store.clone(), context.timeout);
    let messenger = Messenger::new(store.clone())?;
    let world = World { network, store, messenger, timeout, chunk_bytes };
    let ranks = (0..context.world_size).collect();
    Group::connect(&world, key, "world".to_owned(), context.rank, ranks)
}

/// A process group over a network. Dropping it finishes started operations (for a few seconds at
/// most) and joins its threads.
struct Group {
    shared: Arc<Shared>,
    worker: Arc<Mutex<Worker>>,
    thread: Option<JoinHandle<()>>,
    lanes: Lanes,
    splits: AtomicU64,
}

impl Group {
    fn connect(
        world: &World,
        key: String,
        name: String,
        rank: usize,
        global_ranks: Vec<usize>,
    ) -> Result<Arc<dyn ProcessGroup>> {
        if global_ranks.len() == 1 {
            return Ok(Arc::new(Solo::new(name, global_ranks[0])));
        }
        let wanted = || match world.store.failure() {
            Some((rank, message)) => Err(Error::PeerFailed { rank, message }),
            None => world.store.give_up().map_or(Ok(()), Err),
        };
        let network = world.network.clone();
        let wire = network.connect(&key, &global_ranks, rank, world.timeout, &wanted)?;
        let shared = Arc::new(Shared::new(world, key, name, rank, global_ranks));
        let worker = Arc::new(Mutex::new(Worker::new(shared.clone(), wire)));
        let thread = std::thread::Builder::new()
            .name(format!("comm-{}", shared.name))
            .spawn({
                let (shared, worker) = (shared.clone(), worker.clone());
                move || {
                    while let Some((turn, job)) = shared.queue.next() {
                        run(&worker, turn, job);
                    }
                }
            })
            .map_err(|e| {
                Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
            })?;
        let lanes = Lanes::new(shared.clone());
        let splits = AtomicU64::new(0);
        Ok(Arc::new(Self { shared, worker, thread: Some(thread), lanes, splits }))
    }

    fn start_collective(
        &self,
        collective: EngineCollective,
        after: Option<Arc<dyn End>>,
        overlap: bool,
    ) -> Result<Work> {
        let op = collective.name();
        let shared = &self.shared;
        self.alive(op)?;
        let done = Arc::new(Completion::default());
        let job = Job { task: Task::Collective(collective), after, done: done.clone() };
        shared.queue.push(job, overlap);
        let (waits, worker) = (shared.clone(), self.worker.clone());
        let finish =
            move |done: &Completion| waits.queue.finish(done, |turn, job| run(&worker, turn, job));
        let shared = shared.clone();
        Ok(work(done, overlap, finish, move |failure| shared.error(op, failure)))
    }

    fn alive(&self, op: &'static str) -> Result<()> {
        match self.shared.broken() {
            Some(failure) => Err(self.shared.error(op, failure)),
            None => Ok(()),
        }
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
        let done = self.lanes.push(tensor, peer, sending)?;
        let shared = self.shared.clone();
        Ok(Work::pending(move || done.wait().map_err(|failure| shared.error(op, failure))))
    }
}

/// Runs a job. Only the thread with the turn uses the worker, so the lock is free.
fn run(worker: &Mutex<Worker>, turn: Turn<'_>, job: Job) {
    worker.lock().expect("a worker catches panics").run(job);
    drop(turn);
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
        self.shared.network.name().to_owned()
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
        let global = self.global_ranks();
        let key = format!("{}/{split}.{set}", self.shared.key);
        let ranks = partition[set].iter().map(|&rank| global[rank]).collect();
        Self::connect(&self.shared.world(), key, name.to_owned(), rank, ranks)
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(&Failure::Group(reason.to_owned()));
    }

    fn failure(&self) -> Option<Error> {
        let failure = self.shared.broken_anywhere()?;
        Some(self.shared.error("failure", failure))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.shared.queue.close();
        self.lanes.close();
        if let Some(thread) = self.thread.take() {
            // The thread catches panics; an error means that it has ended anyway.
            let _ = thread.join();
        }
    }
}
