//! [`Mixed`], the group of members on several hosts, and the splitting of groups.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::collective::{Collective, End, ProcessGroup, Work, check};
use fulgurite_error::{Error, Result, advice};
use fulgurite_launch::Patience;

use super::levels::Levels;
use super::placement::Placement;
use crate::engine::{CLOSING, Completion, Failure, Job, Queue, Task, Turn, wait_for, work};

/// Limit in bytes for collectives that use only the network, in one round.
const SMALL: usize = 64 << 10;

/// The components of a group with members on several hosts.
#[derive(Clone)]
pub(super) struct Parts {
    /// All members, over the network.
    pub(super) across: Arc<dyn ProcessGroup>,
    /// The members on this host, in the order of the group.
    pub(super) local: Arc<dyn ProcessGroup>,
    /// The host of each global rank of the job.
    pub(super) hosts: Arc<[usize]>,
    /// Whether the group communicates in levels if it can.
    pub(super) levels: bool,
}

/// A process group of several hosts with several members on some of them.
pub(super) struct Mixed {
    parts: Parts,
    placement: Placement,
    name: String,
    levels: Option<Arc<LevelsThread>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread of the collectives in levels.
struct LevelsThread {
    queue: Queue,
    levels: Mutex<Levels>,
    /// The two groups of the levels, and the group of all members. They fail together.
    groups: [Arc<dyn ProcessGroup>; 3],
    broken: Mutex<Option<Failure>>,
}

impl Mixed {
    /// Makes the group of all members of `parts.across`. Collective.
    pub(super) fn of_all(name: &str, parts: Parts) -> Result<Arc<dyn ProcessGroup>> {
        let global_ranks = parts.across.global_ranks();
        let of_member: Vec<usize> = global_ranks.iter().map(|&rank| parts.hosts[rank]).collect();
        let placement = Placement::of(&of_member);
        if placement.is_local() {
            return Ok(parts.local);
        }
        if placement.is_spread() {
            return Ok(parts.across);
        }
        let levels = match placement.per_host().filter(|_| parts.levels) {
            None => None,
            Some(per_host) => {
                let hosts = placement.hosts();
                let rails: Vec<Vec<usize>> = (0..per_host)
                    .map(|place| hosts.iter().map(|members| members[place]).collect())
                    .collect();
                let rail = parts.across.split(&rails, name)?;
                // A separate group, as its collectives come from another thread.
                let local = parts.local.split(&[(0..per_host).collect()], name)?;
                let groups = [local.clone(), rail.clone(), parts.across.clone()];
                let levels = Levels::new(local, rail, placement.clone());
                Some(LevelsThread::start(name, levels, groups)?)
            }
        };
        let (levels, thread) = levels.unzip();
        Ok(Arc::new(Self { parts, placement, name: name.to_owned(), levels, thread }))
    }

    /// Returns the levels if a collective uses them. All members get the same answer.
    fn in_levels(&self, collective: &Collective) -> Option<&Arc<LevelsThread>> {
        let cpu = match collective {
            Collective::AllReduce { tensor, .. } | Collective::Broadcast { tensor, .. } => {
                tensor.device().is_cpu()
            }
            Collective::AllGatherInto(parts) => {
                parts.iter().all(|part| part.output.device().is_cpu())
            }
            Collective::ReduceScatter { parts, .. } => {
                parts.iter().all(|part| part.input.device().is_cpu())
            }
            Collective::AllToAll(_) | Collective::Barrier => false,
        };
        let fits = cpu && collective.bytes() > SMALL;
        self.levels.as_ref().filter(|_| fits)
    }
}

impl LevelsThread {
    fn start(
        name: &str,
        levels: Levels,
        groups: [Arc<dyn ProcessGroup>; 3],
    ) -> Result<(Arc<Self>, JoinHandle<()>)> {
        let (queue, levels, broken) = (Queue::default(), Mutex::new(levels), Mutex::default());
        let this = Arc::new(Self { queue, levels, groups, broken });
        let run = {
            let this = this.clone();
            move || {
                while let Some((turn, job)) = this.queue.next() {
                    this.run(job);
                    drop(turn);
                }
            }
        };
        let thread = std::thread::Builder::new().name(format!("levels-{name}")).spawn(run);
        let thread = thread.map_err(|e| {
            Error::Launch(format!("starting a communication thread: {e}{}", advice(&e)))
        })?;
        Ok((this, thread))
    }

    /// Runs a job. Only the thread with the turn does, so the lock of the levels is free.
    fn run(&self, job: Job) {
        let Job { task, after, done } = job;
        let result = match (&task, self.broken()) {
            (_, Some(failure)) => Err(failure),
            (Task::Collective(collective), None) => wait_for(after).and_then(|()| {
                let mut levels = self.levels.lock().expect("panics are caught within");
                match catch_unwind(AssertUnwindSafe(|| levels.run(collective))) {
                    Ok(result) => result.map_err(failure),
                    Err(panic) => {
                        let message = crate::threads::panic_message(&*panic);
                        Err(Failure::Group(format!("a collective panicked: {message}")))
                    }
                }
            }),
            (Task::P2p(_), None) => {
                Err(Failure::Group("a message among the collectives".to_owned()))
            }
        };
        match &result {
            // Release the tensors before telling the caller of the end.
            Ok(()) => drop(task),
            Err(failure) => {
                self.fail(failure);
                // Parts of the collective may still be under way.
                std::mem::forget(task);
            }
        }
        done.set(result);
    }

    fn broken(&self) -> Option<Failure> {
        self.broken.lock().expect("no panic while failing").clone()
    }

    /// Ends all groups, so that waits of members in the other groups end too.
    fn fail(&self, failure: &Failure) {
        let mut broken = self.broken.lock().expect("no panic while failing");
        if broken.is_some() {
            return;
        }
        *broken = Some(failure.clone());
        drop(broken);
        let reason = match failure {
            Failure::Group(reason) => reason.clone(),
            Failure::Interrupted => "interrupted".to_owned(),
            Failure::Peer { rank, message } => format!("rank {rank} failed: {message}"),
        };
        self.groups.iter().for_each(|group| group.abort(&reason));
    }
}

/// Converts the error of a group within the levels.
fn failure(error: Error) -> Failure {
    match error {
        Error::Collective { message, .. } => Failure::Group(message),
        other => other.into(),
    }
}

impl Mixed {
    fn start_in_levels(
        &self,
        levels: &Arc<LevelsThread>,
        collective: Collective,
        after: Option<Arc<dyn End>>,
        overlap: bool,
    ) -> Result<Work> {
        collective.check(self)?;
        let op = collective.name();
        let global_rank = self.global_ranks()[self.rank()];
        let group = self.name.clone();
        let error = move |failure| match failure {
            Failure::Peer { rank, message } => Error::PeerFailed { rank, message },
            Failure::Interrupted => Error::Interrupted,
            Failure::Group(message) => {
                Error::Collective { rank: global_rank, group: group.clone(), op, message }
            }
        };
        if let Some(failure) = levels.broken() {
            return Err(error(failure));
        }
        let done = Arc::new(Completion::default());
        let task = Task::Collective(collective.into());
        levels.queue.push(Job { task, after, done: done.clone() }, overlap);
        let levels = levels.clone();
        let finish = move |done: &Completion| {
            let run = |turn: Turn<'_>, job| {
                levels.run(job);
                drop(turn);
            };
            levels.queue.finish(done, run)
        };
        Ok(work(done, overlap, finish, error))
    }
}

impl ProcessGroup for Mixed {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.parts.across.rank()
    }

    fn size(&self) -> usize {
        self.parts.across.size()
    }

    fn transport(&self) -> String {
        let [local, across] = [&self.parts.local, &self.parts.across].map(|part| part.transport());
        format!("{local} within hosts, {across} between them")
    }

    fn global_ranks(&self) -> &[usize] {
        self.parts.across.global_ranks()
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        match self.in_levels(&collective) {
            Some(levels) => self.start_in_levels(levels, collective, None, overlap),
            None => self.parts.across.start(collective, overlap),
        }
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        match self.in_levels(&collective) {
            Some(levels) => {
                self.start_in_levels(levels, collective, Some(end.clone()), true).map(Some)
            }
            None => self.parts.across.start_after(end, collective),
        }
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.parts.across.send(tensor, dst)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.parts.across.recv(tensor, src)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let (set, own) = check::partition(self, partition)?;
        let hosts: Vec<usize> =
            self.global_ranks().iter().map(|&rank| self.parts.hosts[rank]).collect();
        let is_local = |set: &[usize]| set.iter().all(|&member| hosts[member] == hosts[set[0]]);
        // Sets on one host get no network connections.
        let across: Vec<Vec<usize>> = partition
            .iter()
            .flat_map(|set| match is_local(set) {
                true => set.iter().map(|&member| vec![member]).collect(),
                false => vec![set.clone()],
            })
            .collect();
        let across = self.parts.across.split(&across, name)?;
        let (host, _) = self.placement.find(self.rank());
        let here = &self.placement.hosts()[host];
        let local: Vec<Vec<usize>> = partition
            .iter()
            .map(|set| {
                let place = |member: &usize| here.iter().position(|one| one == member);
                set.iter().filter_map(place).collect::<Vec<_>>()
            })
            .filter(|set| !set.is_empty())
            .collect();
        let local = self.parts.local.split(&local, name)?;
        if is_local(&partition[set]) {
            debug_assert_eq!(local.rank(), own, "a set on one host keeps its order");
            return Ok(local);
        }
        Self::of_all(name, Parts { across, local, ..self.parts.clone() })
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.parts.local.empty(elements, dtype, device)
    }

    fn abort(&self, reason: &str) {
        self.parts.across.abort(reason);
        self.parts.local.abort(reason);
        if let Some(levels) = &self.levels {
            levels.fail(&Failure::Group(reason.to_owned()));
        }
    }

    fn failure(&self) -> Option<Error> {
        // A failure in levels ends both groups.
        self.parts.across.failure().or_else(|| self.parts.local.failure())
    }
}

impl Drop for Mixed {
    fn drop(&mut self) {
        if let Some(levels) = &self.levels {
            levels.queue.close();
        }
        if let Some(thread) = self.thread.take() {
            // Like any other group, limits the wait for operations that peers may never start.
            let mut patience = Patience::new(CLOSING);
            while !thread.is_finished() && patience.slice().is_some() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if let Some(levels) = self.levels.as_ref().filter(|_| !thread.is_finished()) {
                levels.fail(&Failure::Group("the group was dropped".to_owned()));
            }
            // The thread catches panics; an error means that it has ended anyway.
            let _ = thread.join();
        }
    }
}
