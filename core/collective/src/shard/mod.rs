//! Shards: the region of a parameter that each rank holds.
//!
//! Every parameter has a global shape and a [`ShardSpec`]: the ordered cuts that mesh dimensions
//! make. The spec and a rank's mesh coordinate determine one hyper-rectangle, a [`Region`].
//! Initialisation, FSDP, tensor parallelism, gradient norms, optimizers and checkpoints all use
//! this layout and no other.
//!
//! ```
//! use fulgurite_core::shard::{Cut, Placement, ShardSpec};
//!
//! // Rows over 2 tensor-parallel ranks, then each part's rows over 2 FSDP ranks.
//! let spec = ShardSpec::new(vec![10, 4])
//!     .with_cut(Cut::new("tensor_parallel", 2, Placement::Shard(0)))
//!     .with_cut(Cut::new("data_parallel_shard", 2, Placement::Shard(0)));
//! let region = spec.region(|dim| if dim == "tensor_parallel" { 1 } else { 0 });
//! assert_eq!((region.offsets.as_slice(), region.sizes.as_slice()), (&[5, 0][..], &[3, 4][..]));
//! ```

mod placement;
mod region;
mod spec;

pub use placement::Placement;
#[doc(hidden)]
pub use region::Runs;
pub use region::{Region, Run, checked_elem_count};
pub use spec::{Cut, ShardSpec, chunk};
