//! Saving in the background, while training goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::on_hosts::{Hosts, save_on_hosts};
use super::snapshot::Snapshot;
use super::{CheckpointIO, SaveRequest};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;

/// Saves checkpoints in the background, one at a time.
///
/// [`start`](Self::start) copies this rank's parts into host memory, which is reused for the next
/// checkpoint. The caller waits only for this copy: one pass over the shards, into as much host
/// memory as they take. A thread then saves the copies in the same transaction as
/// [`save`](super::save). Later changes of the tensors do not reach the checkpoint, and a crash has
/// the same consequences as a crash in `save`. The thread also updates `last` and removes old
/// checkpoints, after the commit.
///
/// The threads communicate over a process group of their own, so that training can use the other
/// groups. An error of any rank is returned on every rank, by the next [`start`](Self::start) or by
/// [`wait`](Self::wait). Dropping the saver waits for the save under way.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use fulgurite_core::checkpoint::{AsyncSaver, CheckpointIO};
/// # use fulgurite_core::fabric::{Fabric, FabricOptimizer};
/// # fn train(
/// #     fabric: &Fabric, io: Arc<dyn CheckpointIO>, optimizer: &mut FabricOptimizer,
/// # ) -> fulgurite_core::Result<()> {
/// let mut saver = AsyncSaver::new(io, &**fabric.world())?;
/// for step in 1..=100u64 {
///     // … train …
///     let name = format!("step-{step:08}");
///     let request = fabric.checkpoints().save_request(&name, Some(optimizer), &step, serde_json::Value::Null)?;
///     saver.start(request)?;
/// }
/// saver.wait()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncSaver {
    io: Arc<dyn CheckpointIO>,
    group: Group,
    /// The hosts whose memory the checkpoints are in; `None` for a place that all ranks share.
    hosts: Option<Arc<Hosts>>,
    buffers: Snapshot,
    /// The thread that allocates `buffers`, after [`reserve`](Self::reserve).
    reserving: Option<JoinHandle<Result<Snapshot>>>,
    running: Option<Running>,
}

/// The process group of the ranks' threads.
#[derive(Clone)]
struct Group(Arc<dyn ProcessGroup>);

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.name())
    }
}

#[derive(Debug)]
struct Running {
    thread: JoinHandle<(Result<PathBuf>, Snapshot)>,
    step: u64,
    blocked: Duration,
}

/// A checkpoint that was committed.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedCheckpoint {
    /// The optimizer step after which it was saved.
    pub step: u64,
    /// Its path.
    pub path: PathBuf,
    /// How long the caller waited.
    pub blocked: Duration,
}

impl AsyncSaver {
    /// Creates a saver to `io` for all ranks of `world`. Collective: makes a process group for the
    /// threads.
    ///
    /// # Errors
    /// If the group cannot be made.
    pub fn new(io: Arc<dyn CheckpointIO>, world: &dyn ProcessGroup) -> Result<Self> {
        Self::with_group(io, world, "checkpoint", None)
    }

    /// Like [`new`](Self::new), for checkpoints in the memory of hosts: `io` is this host's, and
    /// saves are as [`save_on_hosts`]. The process group is named `copies`. Collective.
    ///
    /// # Errors
    /// If the group cannot be made.
    pub fn on_hosts(
        io: Arc<dyn CheckpointIO>,
        world: &dyn ProcessGroup,
        hosts: Hosts,
    ) -> Result<Self> {
        Self::with_group(io, world, "copies", Some(Arc::new(hosts)))
    }

    fn with_group(
        io: Arc<dyn CheckpointIO>,
        world: &dyn ProcessGroup,
        name: &str,
        hosts: Option<Arc<Hosts>>,
    ) -> Result<Self> {
        let all = (0..world.size()).collect();
        let group = Group(world.split(&[all], name)?);
        Ok(Self { io, group, hosts, buffers: Snapshot::default(), reserving: None, running: None })
    }

    /// Allocates the memory for the copies of `request` in the background.
    ///
    /// The first use of its pages takes several times as long as copying. Does nothing after the
    /// first save. Not collective.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn reserve(&mut self, request: &SaveRequest) -> Result<()> {
        if self.running.is_some() || !self.buffers.is_empty() {
            return Ok(());
        }
        let (model, optimizer) = (request.model.clone(), request.optimizer.clone());
        let reserve = move || Snapshot::reserve(&model, &optimizer);
        self.reserving = Some(self.spawn(reserve)?);
        Ok(())
    }

    fn spawn<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(f)
            .map_err(Error::io("starting a thread to save", self.io.location("")))
    }

    /// Starts to save `request` in the background: copies its tensors and returns.
    ///
    /// First waits for the previous save, and returns its result unless [`wait`](Self::wait) has
    /// done so. Every rank calls it, with its own parts; the copying is not collective.
    ///
    /// # Errors
    /// On all ranks, if the previous save failed on any; then nothing is started.
    pub fn start(&mut self, request: SaveRequest) -> Result<Option<SavedCheckpoint>> {
        let begun = Instant::now();
        let earlier = self.wait()?;
        let SaveRequest { name, model, optimizer, meta, update_last, remove } = request;
        let mut buffers = std::mem::take(&mut self.buffers);
        // If the reservation failed, the memory is allocated now.
        if let Some(Ok(Ok(reserved))) = self.reserving.take().map(JoinHandle::join) {
            buffers = reserved;
        }
        // If the copy fails on this rank, its thread tells the other ranks.
        let taken = buffers.take(&model, &optimizer);
        drop((model, optimizer));
        let (io, group, step) = (self.io.clone(), self.group.clone(), meta.step);
        let hosts = self.hosts.clone();
        let save = move || {
            let Snapshot { model, optimizer } = buffers;
            let request = SaveRequest { name, model, optimizer, meta, update_last, remove };
            let saved = match &hosts {
                None => request.run_if(&*io, &*group.0, taken),
                Some(hosts) => {
                    let name = &request.name;
                    save_on_hosts(&*io, &*group.0, hosts, name, Some(&request), taken)
                }
            };
            (saved, Snapshot { model: request.model, optimizer: request.optimizer })
        };
        let thread = self.spawn(save)?;
        self.running = Some(Running { thread, step, blocked: begun.elapsed() });
        Ok(earlier)
    }

    /// Whether a save is under way on this rank. Ranks see its end at different times.
    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.thread.is_finished())
    }

    /// Waits for the save under way, if any, and returns its result. Every rank calls it.
    ///
    /// # Errors
    /// On every rank if it failed on any, as [`save`](super::save).
    pub fn wait(&mut self) -> Result<Option<SavedCheckpoint>> {
        let Some(Running { thread, step, blocked }) = self.running.take() else { return Ok(None) };
        let (saved, buffers) = thread.join().map_err(|_| {
            Error::checkpoint(
                self.io.location(""),
                format!("the thread that saved step {step} panicked"),
            )
        })?;
        self.buffers = buffers;
        saved.map(|path| Some(SavedCheckpoint { step, path, blocked }))
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("the checkpoint that was under way was not saved: {error}");
        }
    }
}
