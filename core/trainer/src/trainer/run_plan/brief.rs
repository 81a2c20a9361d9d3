//! Plans at the start of a run, whose time is limited and whose data may be read in part.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::{Error, Result};
use fulgurite_engine::data::{DataContext, DataModule};
use fulgurite_engine::execution;
use fulgurite_engine::memory::{self, MemoryKind, Place};

/// In force in a dry run at the start of a run: data is [previewed](DataModule::preview), because
/// the run itself reads it again.
#[derive(Debug)]
pub(crate) struct Brief {
    /// When the dry run is given up.
    end: Instant,
    /// Bytes that the run will hold of data that was not read.
    unread_bytes: AtomicU64,
}

impl Brief {
    pub(super) fn until(end: Instant) -> Self {
        Self { end, unread_bytes: AtomicU64::new(0) }
    }

    /// Bytes that the run will hold of data that was not read.
    pub(super) fn unread_bytes(&self) -> u64 {
        self.unread_bytes.load(Ordering::Relaxed)
    }
}

/// Gives up a brief dry run that has taken too long.
///
/// # Errors
/// If it has.
pub(crate) fn check_time() -> Result<()> {
    match execution::value::<Brief>() {
        Some(brief) if Instant::now() > brief.end => Err(Error::other("the dry run is given up")),
        _ => Ok(()),
    }
}

/// Opens a run's data; previews it in a brief dry run.
///
/// # Errors
/// As [`DataModule::setup`].
pub(crate) fn open_data<D: DataModule>(config: &D::Config, context: &DataContext) -> Result<D> {
    let _place = memory::at(Place::Host);
    let _kind = memory::of_kind(MemoryKind::Data);
    let Some(brief) = execution::value::<Brief>() else { return D::setup(config, context) };
    let before = memory::held();
    let data = D::preview(config, context)?;
    let read = memory::held().saturating_sub(before);
    brief.unread_bytes.fetch_add(data.memory().saturating_sub(read), Ordering::Relaxed);
    Ok(data)
}
