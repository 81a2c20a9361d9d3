//! What a rank computes on: the host's cores, or a device of its own. `trainer.accelerator`.
//!
//! An [`AcceleratorConfig`] says which devices this process may use and opens one; the opened one is an
//! [`Accelerator`]. Which rank takes which device follows from what all ranks of a host see ([`place`]).

#[expect(clippy::module_inception, reason = "the traits are the module's subject")]
mod accelerator;
#[cfg(feature = "cuda")]
mod cuda_time_stamp;
mod detect;
mod placement;
pub mod ranges;

pub use accelerator::{Accelerator, AcceleratorConfig, Available, DeviceMemory, TimeStamp};
#[cfg(feature = "cuda")]
pub use cuda_time_stamp::CudaTimeStamp;
pub use detect::detect;
pub use placement::{RankDevices, place};
