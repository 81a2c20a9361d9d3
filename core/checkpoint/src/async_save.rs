//! Saving while training goes on.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::snapshot::Snapshot;
use super::{CheckpointIO, SaveRequest};
use crate::{Error, Result};
use fulgurite_engine::collective::ProcessGroup;

/// Saves checkpoints in the background, one at a time.
///
/// [`start`](Self::start) copies this rank's parts into host memory that is used again for the
/// next checkpoint (the only thing the caller waits for: one pass over the shards, and as much
/// memory as they have), and a thread then saves the copies, with the transaction that
/// [`save`](super::save) is: nothing that happens to the tensors later gets into the checkpoint,
/// and a crash leaves what a crash in an ordinary save leaves. What follows a commit (the pointer
/// `last`, removing old checkpoints) is done by the same thread, after it.
///
/// The ranks' threads agree over a process group of their own, so training uses the others
/// meanwhile. An error that any rank meets is returned on every rank, by the call that learns of
/// the save's end: [`start`](Self::start) of the next, or [`wait`](Self::wait). Dropping it waits for
/// the save that is under way.
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
///     let request = fabric.save_request(&name, optimizer, &step, serde_json::Value::Null)?;
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
    buffers: Snapshot,
    /// Makes `buffers`.
    reserving: Option<JoinHandle<Result<Snapshot>>>,
    running: Option<Running>,
}

/// The ranks' threads.
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
pub struct Saved {
    /// The optimizer step that it was saved after.
    pub step: u64,
    /// Where it is.
    pub path: PathBuf,
    /// How long the caller was kept from going on.
    pub blocked: Duration,
}

impl AsyncSaver {
    /// Saves to `io`, over all ranks of `world`. Collective: makes a process group for the threads.
    ///
    /// # Errors
    /// If the group cannot be made.
    pub fn new(io: Arc<dyn CheckpointIO>, world: &dyn ProcessGroup) -> Result<Self> {
        let all = (0..world.size()).collect();
        let group = Group(world.split(&[all], "checkpoint")?);
        Ok(Self { io, group, buffers: Snapshot::default(), reserving: None, running: None })
    }

    /// Makes the memory for copies of what is in `request`, in the background, so that the first
    /// save does not wait for it: pages that were never used cost several times what copying does.
    /// Does nothing after the first save. Not collective.
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

    /// Copies what is to be saved and goes on to save it in the background. Waits for the save
    /// before first, and returns what it saved unless [`wait`](Self::wait) did. Every rank calls it,
    /// with its own parts; the copying is not collective.
    ///
    /// # Errors
    /// If the save before failed on any rank, on all ranks; then nothing is started.
    pub fn start(&mut self, request: SaveRequest) -> Result<Option<Saved>> {
        let begun = Instant::now();
        let earlier = self.wait()?;
        let SaveRequest { name, model, optimizer, meta, point_last, remove } = request;
        let mut buffers = std::mem::take(&mut self.buffers);
        // What became of the reservation is not asked: without it, the memory is made now.
        if let Some(Ok(Ok(reserved))) = self.reserving.take().map(JoinHandle::join) {
            buffers = reserved;
        }
        // Should this fail here alone, the others learn it from the thread.
        let taken = buffers.take(&model, &optimizer);
        drop((model, optimizer));
        let (io, group, step) = (self.io.clone(), self.group.clone(), meta.step);
        let save = move || {
            let Snapshot { model, optimizer } = buffers;
            let request = SaveRequest { name, model, optimizer, meta, point_last, remove };
            let saved = request.run_if(&*io, &*group.0, taken);
            (saved, Snapshot { model: request.model, optimizer: request.optimizer })
        };
        let thread = self.spawn(save)?;
        self.running = Some(Running { thread, step, blocked: begun.elapsed() });
        Ok(earlier)
    }

    /// Whether a save is under way on this rank. Ranks see the end of one at different moments.
    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.thread.is_finished())
    }

    /// Waits until the save that is under way is done, and returns what it saved; `None` if there
    /// was none. Every rank calls it.
    ///
    /// # Errors
    /// On every rank if it failed on any, as [`save`](super::save).
    pub fn wait(&mut self) -> Result<Option<Saved>> {
        let Some(Running { thread, step, blocked }) = self.running.take() else { return Ok(None) };
        let (saved, buffers) = thread.join().map_err(|_| {
            Error::checkpoint(
                self.io.location(""),
                format!("the thread that saved step {step} panicked"),
            )
        })?;
        self.buffers = buffers;
        saved.map(|path| Some(Saved { step, path, blocked }))
    }
}

impl Drop for AsyncSaver {
    fn drop(&mut self) {
        if let Err(error) = self.wait() {
            tracing::error!("the checkpoint that was under way was not saved: {error}");
        }
    }
}
