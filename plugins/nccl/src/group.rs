//! [`connect`], and the handle of a process group.

use std::any::Any;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fulgurite_engine::collective::{
    AllGather, Collective, End, Label, ProcessGroup, ReduceOp, ReduceScatter, Store, Timing, Work,
    all_gather_object, broadcast_object, check,
};
use fulgurite_error::{Error, Result};
use fulgurite_launch::Patience;

use crate::communicator::{Communicator, call, settle};
use crate::failure::Failure;
use crate::flight::{Flight, Notice, describe};
use crate::library::{Library, UniqueId};
use crate::messages::Messages;
use crate::pending::{Ended, Pending};
use crate::plan::{Plan, Planner};
use crate::routes::Routes;
use crate::shared::Shared;
use crate::streams::{Event, Streams};
use crate::timed::Timed;
use crate::world::World;

/// Time limit for started collectives when their group is dropped.
const CLOSING: Duration = Duration::from_secs(5);

/// A rank's inputs to its first group.
pub struct Parts {
    /// The job's ranks, for host tensors. If it fails the new group fails too, and the other way
    /// round.
    pub host: Arc<dyn ProcessGroup>,
    /// The path of NCCL. By default `libnccl.so.2`, found by the dynamic loader.
    pub library: Option<std::path::PathBuf>,
    /// The device.
    pub streams: Arc<dyn Streams>,
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// How long a collective may wait for its peers.
    pub timeout: Duration,
}

/// Makes the group of the ranks of `parts.host`: device tensors use NCCL, others the host's group.
///
/// A group of one rank is the host's group. Collective: every rank calls it, in the same order as
/// other calls.
///
/// # Errors
/// If NCCL cannot be loaded or is older than 2.18. Also if ranks are threads of one process and
/// NCCL is older than 2.24, unless `NCCL_P2P_DIRECT_DISABLE` is 1.
pub fn connect(parts: Parts) -> Result<Arc<dyn ProcessGroup>> {
    match parts.host.size() {
        1 => Ok(parts.host),
        _ => connect_even_alone(parts),
    }
}

/// Like [`connect`], but uses NCCL even for one rank, to test NCCL on a single GPU.
///
/// # Errors
/// As [`connect`].
pub fn connect_even_alone(parts: Parts) -> Result<Arc<dyn ProcessGroup>> {
    let Parts { host, library, streams, store, timeout } = parts;
    let library = Library::open(library.as_deref())?;
    tracing::debug!("process group `{}` over {}", host.name(), library.description());
    refuse_threads(&*host, &library)?;
    // A job may build several world groups. Every rank builds them in the same order.
    let rank = host.global_ranks()[host.rank()];
    let build = store.add(&format!("process_group/nccl/builds/{rank}"), 1)?;
    let world = World::new(library, streams, store, timeout)?;
    let name = host.name().to_owned();
    Ok(Group::of(Shared::new(world, host, format!("process_group/nccl/world{build}"), name)))
}

/// Refuses ranks that are threads of one process, if NCCL would write into other ranks' tensors.
/// Collective.
fn refuse_threads(host: &dyn ProcessGroup, library: &Library) -> Result<()> {
    /// Differs between processes, even in containers, where two processes may have the same id.
    static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));
    let disabled = std::env::var("NCCL_P2P_DIRECT_DISABLE").is_ok_and(|value| value == "1");
    let allowed = library.allows_threads() || disabled;
    let all: Vec<(u64, bool)> = all_gather_object(host, &(*PROCESS, allowed))?;
    let together = |&(process, allowed): &(u64, bool)| {
        !allowed && all.iter().filter(|(other, _)| *other == process).count() > 1
    };
    match all.iter().any(together) {
        false => Ok(()),
        true => Err(Error::Config(format!(
            "several ranks are threads of one process, and {} would write into each other's tensors, which memory of a \
             GPU's pool does not allow. Set the environment variable NCCL_P2P_DIRECT_DISABLE=1, or use NCCL 2.24 or newer",
            library.description()
        ))),
    }
}

/// Returns the purpose of this thread's collectives.
fn label() -> Option<String> {
    Label::current().map(|label| label.0.clone())
}

/// A process group over NCCL.
struct Group {
    shared: Arc<Shared>,
    /// Connects all members. Made by `connect`, or at the first collective on the device.
    communicator: Mutex<Option<Arc<Communicator>>>,
    messages: Arc<Messages>,
    collectives: AtomicU64,
    splits: AtomicU64,
    /// End of the last launched collective. All earlier ones have ended by then, as all share a
    /// stream.
    last: Mutex<Option<Arc<Ended>>>,
}

impl Group {
    fn of(shared: Arc<Shared>) -> Arc<dyn ProcessGroup> {
        let messages = Messages::new(shared.clone());
        Arc::new(Self {
            shared,
            communicator: Mutex::default(),
            messages,
            collectives: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            last: Mutex::default(),
        })
    }

    fn alive(&self, op: &'static str) -> Result<()> {
        match self.shared.failure() {
            Some(failure) => Err(self.shared.error(op, failure)),
            None => Ok(()),
        }
    }

    /// Splits a collective between NCCL and the host's group. Also returns its name.
    fn routes(&self, collective: Collective) -> Result<(Routes, &'static str)> {
        collective.check(self)?;
        let op = collective.name();
        self.alive(op)?;
        Ok((Routes::of(self, collective, &*self.shared.world.streams)?, op))
    }

    /// Begins the pending messages: a peer may need them before it joins the next collective.
    fn flush(&self, op: &'static str) -> Result<()> {
        self.messages.flush().map_err(|failure| self.shared.error(op, failure))
    }

    fn launch(
        &self,
        collective: &Collective,
        device: &Device,
        behind: Option<&Ended>,
    ) -> Result<Work> {
        let (shared, op) = (&self.shared, collective.name());
        let number = self.collectives.fetch_add(1, Ordering::Relaxed) + 1;
        if collective.is_empty() {
            return Ok(Work::ready());
        }
        let peers = (0..self.size()).filter(|&rank| rank != shared.rank).collect();
        let what = describe(collective);
        let notice = Notice { number: Some(number), what, label: label(), peers };
        let flight = Flight::new(notice);
        let notice = flight.notice.clone();
        let ticket = shared.begin(flight);
        match self.queue(collective, device, ticket, behind) {
            Ok(pending) => {
                let (shared, event) = (shared.clone(), pending.event.clone());
                let end = Arc::new(Ended { shared: shared.clone(), op, event });
                *self.last() = Some(end.clone());
                let wait = move || pending.wait().map_err(|failure| shared.error(op, failure));
                Ok(Work::pending(wait).with_end(end))
            }
            Err(failure) => {
                let failure = failure.within(&notice);
                shared.fail(failure.clone());
                // Report the first failure, which may have caused this one.
                Err(shared.error(op, shared.failure().unwrap_or(failure)))
            }
        }
    }

    /// Queues a collective on the communicator's stream, `behind` another one.
    #[allow(unsafe_code, reason = "copies within the device")]
    fn queue(
        &self,
        collective: &Collective,
        device: &Device,
        ticket: u64,
        behind: Option<&Ended>,
    ) -> Result<Pending, Failure> {
        let shared = &self.shared;
        let communicator = self.communicator(device)?;
        let streams = &*shared.world.streams;
        streams.bind(device)?;
        let planner = Planner { streams, device, rank: shared.rank, size: self.size() };
        let Plan { before, calls, after, memory } = planner.plan(collective)?;
        let stream = &communicator.stream;
        let queue = || -> Result<Arc<dyn Event>, Failure> {
            stream.follow_compute()?;
            if let Some(ended) = behind {
                stream.follow(&*ended.event)?;
            }
            let timed = Timed::begin(&**stream, Timing::current())?;
            // SAFETY: the plan holds the memory, the copies stay within its bounds, and each is
            // between a tensor and a flat buffer, which never overlap.
            unsafe { stream.copy(&before)? };
            call(shared, &[(&communicator, calls)])?;
            // SAFETY: as above.
            unsafe { stream.copy(&after)? };
            if let Some(timed) = timed {
                timed.end(&shared.name)?;
            }
            let event: Arc<dyn Event> = stream.record()?.into();
            shared.launched(ticket, event.clone())?;
            Ok(event)
        };
        match queue() {
            Ok(event) => Ok(Pending { shared: shared.clone(), ticket, event, memory }),
            Err(failure) => {
                // Some calls may be under way.
                std::mem::forget(memory);
                Err(failure)
            }
        }
    }

    fn last(&self) -> MutexGuard<'_, Option<Arc<Ended>>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A barrier of the host's group, which also orders the device. Later work of the compute
    /// stream runs after all earlier collectives, including those whose `Work` was dropped.
    fn barrier(&self, overlap: bool) -> Result<Work> {
        let on_host = self.shared.host.start(Collective::Barrier, overlap)?;
        let last = self.last().clone();
        Ok(Work::pending(move || {
            on_host.wait()?;
            last.map_or(Ok(()), |end| end.wait())
        }))
    }

    /// Returns the communicator of all members. The first call is collective.
    fn communicator(&self, device: &Device) -> Result<Arc<Communicator>, Failure> {
        let mut place = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = &*place {
            return Ok(communicator.clone());
        }
        let shared = &self.shared;
        shared.world.streams.bind(device)?;
        let own = match shared.rank {
            0 => {
                let _calls = shared.world.calls();
                let id = shared.world.library.unique_id();
                id.map(|UniqueId(id)| id.to_vec()).map_err(|fault| fault.to_string())
            }
            _ => Ok(vec![]),
        };
        // Rank 0 sends its id or its error.
        let id = broadcast_object(&*shared.host, &own, 0)?.map_err(Failure::Group)?;
        let id = id.try_into().map_err(|_| Failure::Group("the id of NCCL is none".to_owned()))?;
        let new = Communicator::new(shared, device, UniqueId(id), shared.rank, self.size())?;
        settle(shared, [&*new])?;
        Ok(place.insert(new).clone())
    }

    fn message(&self, op: &'static str, tensor: &Tensor, peer: usize) -> Result<Work> {
        let sending = op == "send";
        check::peer(self, op, peer)?;
        check::tensor(self, op, "tensor", tensor)?;
        self.alive(op)?;
        match self.shared.world.streams.reaches(tensor) {
            _ if tensor.elem_count() == 0 => Ok(Work::ready()),
            true => Ok(self.messages.push(tensor, peer, sending)),
            false if sending => self.shared.host.send(tensor, peer),
            false => self.shared.host.recv(tensor, peer),
        }
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
        self.shared.global_ranks.len()
    }

    fn transport(&self) -> String {
        format!("nccl, and {} for tensors on the host", self.shared.host.transport())
    }

    fn exact_reductions(&self) -> bool {
        false
    }

    fn global_ranks(&self) -> &[usize] {
        &self.shared.global_ranks
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        let (routes, op) = self.routes(collective)?;
        let Routes { on_host, on_device } = routes;
        self.flush(op)?;
        if let Some(Collective::Barrier) = on_host {
            return self.barrier(overlap);
        }
        // Host first, on all ranks.
        let on_host = on_host.map(|collective| self.shared.host.start(collective, overlap));
        let on_device =
            on_device.map(|(collective, device)| self.launch(&collective, &device, None));
        match (on_host.transpose()?, on_device.transpose()?) {
            (Some(one), Some(other)) => Ok(Work::pending(move || one.wait().and(other.wait()))),
            (one, other) => Ok(one.or(other).unwrap_or_else(Work::ready)),
        }
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        let (routes, op) = self.routes(collective)?;
        let end_on_device = (&**end as &dyn Any).downcast_ref::<Ended>();
        match (routes, end_on_device) {
            (Routes { on_host: None, on_device: Some((collective, device)) }, Some(end)) => {
                self.flush(op)?;
                self.launch(&collective, &device, Some(end)).map(Some)
            }
            (Routes { on_host: Some(collective), on_device: None }, None) => {
                self.flush(op)?;
                self.shared.host.start_after(end, collective)
            }
            _ => Ok(None),
        }
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.message("send", tensor, dst)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.message("recv", tensor, src)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let (set, _) = check::partition(self, partition)?;
        self.alive("split")?;
        self.flush("split")?;
        let shared = &self.shared;
        let host = shared.host.split(partition, name)?;
        let split = self.splits.fetch_add(1, Ordering::Relaxed);
        if host.size() == 1 {
            return Ok(host);
        }
        let key = format!("{}/{split}.{set}", shared.key);
        Ok(Self::of(Shared::new(shared.world.clone(), host, key, name.to_owned())))
    }

    /// NCCL connects an algorithm at its first call, so this calls each kind of collective of a
    /// step once. Two ranks are also connected for messages.
    fn connect(&self, device: &Device) -> Result<()> {
        let one = Tensor::zeros(1, DType::F32, device)?;
        if !self.shared.world.streams.reaches(&one) {
            return self.shared.host.connect(device);
        }
        let all = Tensor::zeros(self.size(), DType::F32, device)?;
        self.run(Collective::all_reduce(&one, ReduceOp::Sum))?;
        self.run(Collective::all_gather_into(vec![AllGather::even(&all, &one, self.size())]))?;
        let scattered = ReduceScatter::even(&one, &all, self.size());
        self.run(Collective::reduce_scatter(vec![scattered], ReduceOp::Sum))?;
        if self.size() == 2 {
            let peer = 1 - self.rank();
            let connected = self.messages.connect_to(peer, device);
            connected.map_err(|failure| self.shared.error("connect", failure))?;
        }
        Ok(())
    }

    fn begin_messages(&self) -> Result<()> {
        self.messages.flush().map_err(|failure| self.shared.error("send", failure))
    }

    fn travels_apart(&self, tensor: &Tensor) -> bool {
        !self.shared.world.streams.reaches(tensor)
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.shared.host.empty(elements, dtype, device)
    }

    fn abort(&self, reason: &str) {
        self.shared.fail(Failure::Group(reason.to_owned()));
    }

    fn failure(&self) -> Option<Error> {
        let of_host = || self.shared.host.failure().map(Failure::from);
        let failure = self.shared.failure().or_else(of_host)?;
        Some(self.shared.error("failure", failure))
    }
}

impl Drop for Group {
    /// Waits for started work, then frees the communicators.
    fn drop(&mut self) {
        let shared = &self.shared;
        // An error here makes the group fail.
        let _ = self.messages.flush();
        let mut patience = Patience::new(CLOSING);
        while shared.failure().is_none() {
            let mut under_way = false;
            shared.flights(|flight| {
                let done =
                    flight.event.as_ref().is_none_or(|event| event.is_done().unwrap_or(true));
                under_way |= !done;
                !done
            });
            match under_way {
                false => {
                    shared.communicators().iter().for_each(|communicator| communicator.finish());
                    return;
                }
                true if patience.slice().is_none() => {
                    return shared.fail(Failure::Group("the group was dropped".to_owned()));
                }
                true => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }
}
