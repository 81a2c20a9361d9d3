//! Dry runs: the engine's own step with shapes, but without arithmetic.
//!
//! In a dry run, kernels that know its functions reserve their results and compute nothing. They
//! record their work instead, in order with the collectives that the step starts and waits for. All
//! other code runs as always, on values without a meaning. `fulgurite plan` is made of dry runs.
//!
//! ```
//! use fulgurite_core::execution::dry_run::{self, DryRun, Happening};
//!
//! fn double(x: &[f32]) -> Vec<f32> {
//!     if dry_run::skips_pass(2 * size_of_val(x)) {
//!         return vec![0.; x.len()];
//!     }
//!     x.iter().map(|x| 2. * x).collect()
//! }
//!
//! let run = DryRun::default();
//! let guard = run.enter();
//! let large = vec![1.; 1 << 20];
//! assert_eq!(double(&large)[0], 0.);
//! drop(guard);
//! assert_eq!(double(&large)[0], 2.);
//! assert!(matches!(run.take()[..], [Happening::Pass { bytes: 0x80_0000, .. }]));
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DType;

use super::context::{self, Change, ContextGuard};
use crate::memory::{self, Place};

/// Something that happens on the rank's thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    /// A matrix product.
    Product {
        /// Rows, inner dimension, columns.
        sizes: [usize; 3],
        /// Number of products of these sizes.
        count: usize,
        /// The operands' dtype.
        dtype: DType,
    },
    /// A pass over memory.
    Pass {
        /// Bytes read and written.
        bytes: usize,
        /// Whose memory it is.
        place: Place,
    },
    /// A copy between host and device began.
    Copy {
        /// A number of its own.
        id: u64,
        /// Bytes copied.
        bytes: u64,
        /// Where they go.
        to: Place,
    },
    /// A collective was started.
    Start {
        /// A number of its own.
        id: u64,
        /// The index of its group.
        group: usize,
        /// The name of the collective.
        op: &'static str,
        /// Bytes of the full tensors.
        bytes: u64,
        /// The name by which a message's sender and receiver meet; empty for other collectives.
        message: String,
    },
    /// The rank waits for a collective or a copy.
    Wait {
        /// Its number.
        id: u64,
    },
    /// A part of the step begins.
    Mark(String),
}

/// The record of a dry run. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct DryRun(Arc<Recorded>);

#[derive(Debug, Default)]
struct Recorded {
    happenings: Mutex<Vec<Happening>>,
    numbers: AtomicU64,
    has_host: bool,
}

impl DryRun {
    /// A dry run for devices with memory of their own, beside their host's. What goes from one to
    /// the other is copied, and values that are kept on the host count as the host's memory.
    pub fn with_host() -> Self {
        Self(Arc::new(Recorded { has_host: true, ..Recorded::default() }))
    }

    /// Whether the device has memory of its own.
    pub fn has_host(&self) -> bool {
        self.0.has_host
    }

    /// A new number for what is started and waited for.
    pub fn number(&self) -> u64 {
        self.0.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes this thread run dry until the guard is dropped.
    pub fn enter(&self) -> ContextGuard {
        context::push(Change::DryRun(self.clone()))
    }

    /// What has happened since the last call.
    pub fn take(&self) -> Vec<Happening> {
        std::mem::take(&mut *self.happenings())
    }

    /// Records something.
    pub fn record(&self, happening: Happening) {
        self.happenings().push(happening);
    }

    fn happenings(&self) -> MutexGuard<'_, Vec<Happening>> {
        self.0.happenings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this thread runs dry.
pub fn is_on() -> bool {
    context::dry_run(|run| run.is_some())
}

/// Whether this thread runs dry for a device with memory of its own ([`DryRun::with_host`]).
pub fn has_host() -> bool {
    context::dry_run(|run| run.is_some_and(DryRun::has_host))
}

/// This thread's dry run.
pub(super) fn current() -> Option<DryRun> {
    context::dry_run(|run| run.cloned())
}

/// Passes over fewer bytes are done in a dry run too, so that small values have a meaning.
pub(super) const SKIPPED_BYTES: usize = 64 << 10;

/// Smaller products are done too, so that the buffers that threads keep for products are there.
const SKIPPED_MULTIPLICATIONS: usize = 1 << 27;

/// Records a pass over `bytes` of memory, read and written, in a dry run. Returns whether the
/// caller skips it and leaves its result zero, or as it is. It is a pass of the host in code that
/// works [there](memory::at).
pub fn skips_pass(bytes: usize) -> bool {
    record(|| Happening::Pass { bytes, place: memory::place() }) && bytes >= SKIPPED_BYTES
}

/// Like [`skips_pass`], for `count` matrix products of these rows, inner dimension and columns.
pub fn skips_products(sizes: [usize; 3], count: usize, dtype: DType) -> bool {
    let multiplications = sizes.iter().fold(count, |all, &size| all.saturating_mul(size));
    record(|| Happening::Product { sizes, count, dtype })
        && multiplications >= SKIPPED_MULTIPLICATIONS
}

/// Records that a part of the step begins, in a dry run.
pub fn mark(label: &str) {
    record(|| Happening::Mark(label.to_owned()));
}

/// Records something in a dry run. Returns whether this thread runs dry.
fn record(happening: impl FnOnce() -> Happening) -> bool {
    context::dry_run(|run| match run {
        Some(run) => {
            run.record(happening());
            true
        }
        None => false,
    })
}
