//! State shared by all groups of a rank.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use fulgurite_core::Result;
use fulgurite_core::collective::Store;
use fulgurite_transports::network::Messenger;

use crate::library::Library;
use crate::shared::Shared;
use crate::streams::Streams;

/// NCCL, the device of a rank, and the groups that its watchdog checks.
pub(crate) struct World {
    pub(crate) library: Arc<Library>,
    pub(crate) streams: Arc<dyn Streams>,
    /// Exchanges the ranks' current collectives through the store, on its own thread.
    pub(crate) messenger: Messenger,
    pub(crate) timeout: Duration,
    store: Arc<dyn Store>,
    /// Held during calls of NCCL: communicators called in one group share state of NCCL.
    calls: Mutex<()>,
    groups: Mutex<Vec<Weak<Shared>>>,
}

impl World {
    pub(crate) fn new(
        library: Arc<Library>,
        streams: Arc<dyn Streams>,
        store: Arc<dyn Store>,
        timeout: Duration,
    ) -> Result<Arc<Self>> {
        let world = Arc::new(Self {
            library,
            streams,
            messenger: Messenger::new(store.clone())?,
            timeout,
            store,
            calls: Mutex::default(),
            groups: Mutex::default(),
        });
        crate::watchdog::start(&world)?;
        Ok(world)
    }

    /// Locks NCCL: no other thread of this rank calls it meanwhile.
    pub(crate) fn calls(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data of ours.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this rank must give up its waits, as it was asked to end during the job's start.
    pub(crate) fn gives_up(&self) -> bool {
        self.store.give_up().is_some()
    }

    /// Registers a group with the watchdog until it is dropped.
    pub(crate) fn watch(&self, group: &Arc<Shared>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// Returns the groups that have not been dropped.
    pub(crate) fn groups(&self) -> Vec<Arc<Shared>> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(Weak::upgrade).collect()
    }
}
