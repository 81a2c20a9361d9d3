//! The memory that a process holds in large blocks: tensors and buffers.
//!
//! A program's allocator counts it if it is wrapped in [`Accounted`], as
//! `fulgurite::use_mimalloc!()` does. [`peak`] is what a run reports beside the plan of
//! `fulgurite plan`. A dry run also records a [`Trace`]: who holds what at each moment.
//!
//! ```
//! use std::alloc::System;
//! use fulgurite_core::memory::{self, Accounted, MemoryKind, Trace};
//!
//! #[global_allocator]
//! static ALLOCATOR: Accounted<System> = Accounted(System);
//!
//! let trace = Trace::start().expect("the allocator is accounted, and nothing else traces");
//! let held = {
//!     let _parameters = memory::of_kind(MemoryKind::Parameters);
//!     vec![0u8; 4096]
//! };
//! drop(vec![0u8; 1 << 20]);
//! drop(held);
//! let traced = trace.finish();
//! assert_eq!(traced.peak.held(), 4096 + (1 << 20));
//! assert_eq!(traced.peak.of(MemoryKind::Parameters), 4096);
//! ```

mod accounting;
mod address_space;
mod kind;
mod trace;

pub use accounting::{Accounted, COUNTED_BYTES, adopt, held, is_accounted, peak, reset_peak};
pub use kind::{KindGuard, MemoryKind, Place, PlaceGuard, at, of_kind, place};
pub use trace::{Held, Trace, TracePoint, Traced, mark, place_of};
