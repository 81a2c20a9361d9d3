//! The device a rank computes on: the host's cores or its own GPU. `trainer.accelerator`.
//!
//! An [`AcceleratorConfig`] says which devices this process may use and opens one as an
//! [`Accelerator`]. [`place`] assigns devices to ranks from the devices that all ranks of a host
//! see.

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
