//! [`Mixed`], the group of members on several hosts, and the splitting of groups.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::collective::{Collective, End, ProcessGroup, Work, check};
use fulgurite_error::{Error, Result};
use fulgurite_launch::Patience;

use super::levels::Levels;
use super::placement::Placement;
use crate::engine::{CLOSING, Failure, Job, JobThread, Queue, RunJobs, Task, wait_for};

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
    /// Ends before the groups of `parts`.
    levels: Option<InLevels>,
    parts: Parts,
    placement: Placement,
    name: String,
}

/// The collectives in levels, on a thread of their own.
struct InLevels {
    queue: Arc<Queue>,
    jobs: JobThread<LevelsWorker>,
    groups: Arc<Groups>,
}

/// The two groups of the levels, and the group of all members. They fail together.
struct Groups {
    all: [Arc<dyn ProcessGroup>; 3],
    broken: Mutex<Option<Failure>>,
}

struct LevelsWorker {
    levels: Levels,
    groups: Arc<Groups>,
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
                Some(InLevels::start(name, levels, groups)?)
            }
        };
        Ok(Arc::new(Self { levels, parts, placement, name: name.to_owned() }))
    }

    /// Returns the levels if a collective uses them. All members get the same answer.
    fn in_levels(&self, collective: &Collective) -> Option<&InLevels> {
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

impl InLevels {
    fn start(name: &str, levels: Levels, groups: [Arc<dyn ProcessGroup>; 3]) -> Result<Self> {
        let groups = Arc::new(Groups { all: groups, broken: Mutex::default() });
        let queue = Arc::<Queue>::default();
        let worker = LevelsWorker { levels, groups: groups.clone() };
        let jobs = JobThread::start(format!("levels-{name}"), queue.clone(), worker, || ())?;
        Ok(Self { queue, jobs, groups })
    }
}

impl RunJobs for LevelsWorker {
    fn run(&mut self, job: Job, _: u32) {
        let Job { task, after, done } = job;
        let result =
            match (&task, self.groups.broken()) {
                (_, Some(failure)) => Err(failure),
                (Task::Collective(collective), None) => wait_for(after).and_then(|()| {
                    match catch_unwind(AssertUnwindSafe(|| self.levels.run(collective))) {
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
                self.groups.fail(failure);
                // Parts of the collective may still be under way.
                std::mem::forget(task);
            }
        }
        done.set(result);
    }
}

impl Groups {
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
        self.all.iter().for_each(|group| group.abort(&reason));
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
        levels: &InLevels,
        collective: Collective,
        after: Option<Arc<dyn End>>,
        overlap: bool,
    ) -> Result<Work> {
        collective.check(self)?;
        let op = collective.name();
        let global_rank = self.global_ranks()[self.rank()];
        let group = self.name.clone();
        let error = move |failure: Failure| failure.error(global_rank, &group, op);
        if let Some(failure) = levels.groups.broken() {
            return Err(error(failure));
        }
        Ok(levels.jobs.push(collective.into(), after, overlap, error))
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
            levels.groups.fail(&Failure::Group(reason.to_owned()));
        }
    }

    fn failure(&self) -> Option<Error> {
        // A failure in levels ends both groups.
        self.parts.across.failure().or_else(|| self.parts.local.failure())
    }
}

impl Drop for InLevels {
    fn drop(&mut self) {
        self.queue.close();
        // Like any other group, limits the wait for operations that peers may never start.
        let mut patience = Patience::new(CLOSING);
        while !self.jobs.is_finished() && patience.slice().is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.jobs.is_finished() {
            self.groups.fail(&Failure::Group("the group was dropped".to_owned()));
        }
    }
}
