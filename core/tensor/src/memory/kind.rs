//! Kinds of memory, and whose it is.

use std::cell::Cell;
use std::marker::PhantomData;

/// What a block of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum MemoryKind {
    /// Everything that no scope names: in a step, activations and what kernels need for a moment.
    Activations,
    /// This rank's part of the parameters and buffers.
    Parameters,
    /// Parameters gathered from other ranks, or cast, for a unit's forward or backward.
    Gathered,
    /// Gradients, and the buckets in which they are reduced.
    Gradients,
    /// The state of optimizers.
    OptimizerState,
    /// Averages of the weights.
    Averages,
    /// Batches.
    Data,
}

impl MemoryKind {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::Gathered,
        Self::Gradients,
        Self::OptimizerState,
        Self::Averages,
        Self::Activations,
        Self::Data,
    ];

    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Activations => "activations",
            Self::Parameters => "parameters",
            Self::Gathered => "gathered parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer state",
            Self::Averages => "weight averages",
            Self::Data => "data",
        }
    }
}

thread_local! {
    /// A property of the thread: the allocator asks for it, and may not allocate.
    static KIND: Cell<MemoryKind> = const { Cell::new(MemoryKind::Activations) };
}

/// Memory that this thread allocates is of `kind` until the guard is dropped. Guards are dropped in
/// the reverse order of their making.
pub fn of_kind(kind: MemoryKind) -> KindGuard {
    KindGuard { before: KIND.replace(kind), _not_send: PhantomData }
}

/// The kind of what this thread allocates.
pub(super) fn current() -> MemoryKind {
    // A thread that ends has lost its kind.
    KIND.try_with(Cell::get).unwrap_or(MemoryKind::Activations)
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Device) };
}

/// Whose memory a block is in a plan for devices with memory of their own.
///
/// A dry run computes on the host. It tells the two apart by what its code says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device's, in which the model computes.
    Device,
    /// The host's.
    Host,
}

/// Memory that this thread allocates is at `place` until the guard is dropped, as [`of_kind`].
pub fn at(place: Place) -> PlaceGuard {
    PlaceGuard { before: PLACE.replace(place), _not_send: PhantomData }
}

/// The place of what this thread allocates.
pub fn place() -> Place {
    PLACE.try_with(Cell::get).unwrap_or(Place::Device)
}

/// Restores the place when it is dropped; made by [`at`].
#[must_use = "the place holds until the guard is dropped"]
#[derive(Debug)]
pub struct PlaceGuard {
    before: Place,
    _not_send: PhantomData<*const ()>,
}

impl Drop for PlaceGuard {
    fn drop(&mut self) {
        PLACE.set(self.before);
    }
}

/// Restores the kind when it is dropped; made by [`of_kind`].
#[must_use = "the kind holds until the guard is dropped"]
#[derive(Debug)]
pub struct KindGuard {
    before: MemoryKind,
    _not_send: PhantomData<*const ()>,
}

impl Drop for KindGuard {
    fn drop(&mut self) {
        KIND.set(self.before);
    }
}
