//! A communicator of NCCL, and the stream of its calls.
#![allow(unsafe_code)] // NCCL's handles.

use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use candle_core::Device;
use fulgurite_launch::Patience;

use crate::failure::Failure;
use crate::library::{Call, Fault, Handle, Operands, Progress, UniqueId};
use crate::shared::Shared;
use crate::streams::Stream;
use crate::world::World;

/// How long the end of a communicator may take before it is left as it is.
const ENDING: Duration = Duration::from_secs(2);

/// A handle of NCCL.
struct Live(Handle);

// SAFETY: any thread may use it, one at a time, which `World::calls` sees to.
unsafe impl Send for Live {}

/// A communicator. One that is neither [finished](Self::finish) nor aborted is leaked: to free it could wait for ranks
/// that are gone.
pub(crate) struct Communicator {
    world: Arc<World>,
    /// None once it has ended.
    handle: Mutex<Option<Live>>,
    pub(crate) stream: Box<dyn Stream>,
    /// NCCL has its address.
    _name: Arc<CString>,
}

/// Calls on a communicator.
pub(crate) type Calls<'a> = (&'a Communicator, Vec<(Call, Operands)>);

impl Communicator {
    /// Begins to connect the ranks that have `id`; [`settle`] waits until they are.
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
        // NCCL keeps the address as long as the communicator, which may be leaked.
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

    /// How it does; `None` once it has ended.
    pub(crate) fn progress(&self) -> Result<Option<Progress>, Fault> {
        let _calls = self.world.calls();
        let Some(handle) = self.handle() else { return Ok(None) };
        // SAFETY: it is there as long as the lock is held.
        unsafe { self.world.library.progress(handle) }.map(Some)
    }

    /// Ends what is under way on this rank.
    pub(crate) fn abort(&self) {
        let handle = {
            let _calls = self.world.calls();
            self.take()
        };
        let Some(handle) = handle else { return };
        // Without the lock, for it may take long; nobody else has the handle now.
        // SAFETY: it has not ended before.
        if let Err(fault) = unsafe { self.world.library.abort(handle) } {
            tracing::warn!("ending a communicator that failed: {fault}");
        }
    }

    /// Ends it, its calls having run.
    pub(crate) fn finish(&self) {
        let finish = || -> Result<bool, Fault> {
            let calls = self.world.calls();
            let Some(handle) = self.handle() else { return Ok(true) };
            // SAFETY: it is there as long as the lock is held.
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
            // SAFETY: it has not ended before, and nobody else has it now.
            unsafe { self.world.library.destroy(handle) }.map(|()| true)
        };
        match finish() {
            Ok(true) => {}
            Ok(false) => tracing::debug!("a communicator did not end within {ENDING:?}"),
            Err(fault) => tracing::debug!("ending a communicator: {fault}"),
        }
    }
}

/// Begins calls on communicators as one, and waits until they are on their streams.
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
        // SAFETY: the handles are there as long as the lock is held; who plans the calls holds their memory until
        // they have run.
        unsafe { world.library.group(&all) }?
    };
    match begun {
        Progress::Done => Ok(()),
        Progress::UnderWay => settle(shared, calls.iter().map(|(communicator, _)| *communicator)),
    }
}

/// Waits until communicators are ready, or have launched what was begun. The watchdog ends it.
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
            // As a rule it takes some tens of microseconds, for NCCL has a thread for each group of calls, and a sleep would
            // double them; the first time, when ranks connect, it takes seconds.
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

/// Why a communicator has no handle any more.
fn ended(shared: &Shared) -> Failure {
    shared.failure().unwrap_or_else(|| Failure::Group("the communicator has ended".to_owned()))
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Group(fault.to_string())
    }
}
