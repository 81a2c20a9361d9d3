//! A communicator of NCCL, and the stream of its calls.
#![allow(unsafe_code)] // NCCL's handles.

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::Device;
use fulgurite_core::launch::Patience;

use crate::failure::Failure;
use crate::library::{Call, Fault, Handle, Operands, Progress, UniqueId};
use crate::shared::Shared;
use crate::streams::Stream;
use crate::world::World;

/// Time limit for finalizing a communicator; after it the communicator is leaked.
const ENDING: Duration = Duration::from_secs(2);

/// A handle of NCCL.
struct Live(Handle);

// SAFETY: NCCL lets any thread use the handle, one at a time; `World::calls` ensures the latter.
unsafe impl Send for Live {}

/// A communicator. It is leaked unless it is [finished](Self::finish) or aborted: freeing it could
/// wait for dead ranks.
pub(crate) struct Communicator {
    world: Arc<World>,
    /// `None` after the communicator has ended.
    handle: Mutex<Option<Live>>,
    pub(crate) stream: Box<dyn Stream>,
    /// NCCL keeps a pointer to the name.
    _name: Arc<CString>,
}

/// Calls on one communicator.
pub(crate) type Calls<'a> = (&'a Communicator, Vec<(Call, Operands)>);

impl Communicator {
    /// Begins to connect the ranks that share `id`; [`settle`] waits until they are connected.
    pub(crate) fn new(
        shared: &Shared,
        device: &Device,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Arc<Self>, Failure> {
        let world = shared.world.clone();
        world.streams.bind(device)?;
        let stream = world.streams.stream(device)?;
        let name = Arc::new(CString::new(shared.name.replace('\0', "")).unwrap_or_default());
        let handle = {
            let _calls = world.calls();
            world.library.init(&name, id, rank, size)?
        };
        // NCCL keeps the pointer as long as the communicator, which may be leaked.
        std::mem::forget(name.clone());
        let handle = Mutex::new(Some(Live(handle)));
        let this = Arc::new(Self { world, handle, stream, _name: name });
        shared.add(&this);
        Ok(this)
    }

    fn handle(&self) -> Option<Handle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|live| live.0)
    }

    fn take(&self) -> Option<Handle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).take().map(|live| live.0)
    }

    /// Returns the communicator's state, or `None` after it has ended.
    pub(crate) fn progress(&self) -> Result<Option<Progress>, Fault> {
        let _calls = self.world.calls();
        let Some(handle) = self.handle() else { return Ok(None) };
        // SAFETY: the handle is valid while the lock is held.
        unsafe { self.world.library.progress(handle) }.map(Some)
    }

    /// Ends this rank's calls that are under way.
    pub(crate) fn abort(&self) {
        let handle = {
            let _calls = self.world.calls();
            self.take()
        };
        let Some(handle) = handle else { return };
        // The lock is not held, as the abort may take long. No other thread has the handle
        // any more.
        // SAFETY: the communicator has not ended before.
        if let Err(fault) = unsafe { self.world.library.abort(handle) } {
            tracing::warn!("ending a communicator that failed: {fault}");
        }
    }

    /// Finalizes and destroys the communicator, once its calls have run.
    pub(crate) fn finish(&self) {
        let finish = || -> Result<bool, Fault> {
            let calls = self.world.calls();
            let Some(handle) = self.handle() else { return Ok(true) };
            // SAFETY: the handle is valid while the lock is held.
            let mut progress = unsafe { self.world.library.finalize(handle) }?;
            drop(calls);
            let mut patience = Patience::new(ENDING);
            while progress == Progress::UnderWay {
                if patience.slice().is_none() {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_micros(200));
                progress = self.progress()?.unwrap_or(Progress::Done);
            }
            let _calls = self.world.calls();
            let Some(handle) = self.take() else { return Ok(true) };
            // SAFETY: the communicator has not ended before, and no other thread has the handle.
            unsafe { self.world.library.destroy(handle) }.map(|()| true)
        };
        match finish() {
            Ok(true) => {}
            Ok(false) => tracing::debug!("a communicator did not end within {ENDING:?}"),
            Err(fault) => tracing::debug!("ending a communicator: {fault}"),
        }
    }
}

/// Begins calls on communicators as one group, and waits until they are on their streams.
pub(crate) fn call(shared: &Shared, calls: &[Calls<'_>]) -> Result<(), Failure> {
    let world = &shared.world;
    let begun = {
        let _calls = world.calls();
        let mut all = Vec::new();
        for (communicator, calls) in calls {
            let Some(handle) = communicator.handle() else { return Err(ended(shared)) };
            let stream = communicator.stream.handle();
            all.extend(calls.iter().map(|&(call, operands)| (handle, stream, call, operands)));
        }
        // SAFETY: the handles are valid while the lock is held. The caller holds the calls' memory
        // until they have run.
        unsafe { world.library.group(&all) }?
    };
    match begun {
        Progress::Done => Ok(()),
        Progress::UnderWay => settle(shared, calls.iter().map(|(communicator, _)| *communicator)),
    }
}

/// Waits until the communicators are ready or have launched their calls. The watchdog ends a wait
/// that hangs.
pub(crate) fn settle<'a>(
    shared: &Shared,
    communicators: impl IntoIterator<Item = &'a Communicator>,
) -> Result<(), Failure> {
    for communicator in communicators {
        let mut polls = 0_u32;
        loop {
            if let Some(failure) = shared.failure() {
                return Err(failure);
            }
            match communicator.progress()? {
                None => return Err(ended(shared)),
                Some(Progress::Done) => break,
                Some(Progress::UnderWay) => {}
            }
            // NCCL uses a thread for each group of calls. That usually takes tens of microseconds,
            // which a sleep would double. The first call, which connects the ranks, takes seconds.
            polls += 1;
            match polls {
                0..512 => std::thread::yield_now(),
                512..1024 => std::thread::sleep(Duration::from_micros(50)),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
    Ok(())
}

/// Returns the failure to report for a communicator that has ended.
fn ended(shared: &Shared) -> Failure {
    shared.failure().unwrap_or_else(|| Failure::Group("the communicator has ended".to_owned()))
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Group(fault.to_string())
    }
}
