//! The accelerators that ranks compute on:
//!
//! | `type` | |
//! |---|---|
//! | `auto` | CUDA if it is built in and finds a device, else the CPU |
//! | `cpu` | the cores of the host |
//! | `cuda` | one NVIDIA GPU for each rank; needs the cargo feature `cuda` |
//!
//! ```
//! use fulgurite_accelerators as _; // links the plugins
//! use fulgurite_core::accelerator::detect;
//!
//! let accelerator = detect()?.open(0)?;
//! assert!(accelerator.device().is_cpu() || cfg!(feature = "cuda"));
//! # Ok::<(), fulgurite_core::Error>(())
//! ```

mod auto;
mod cpu;
mod cuda;
#[cfg(feature = "cuda")]
mod cuda_device;
#[cfg(any(feature = "cuda", test))]
mod out_of_memory;
#[cfg(feature = "cuda")]
mod pinned;

pub use auto::Auto;
pub use cpu::Cpu;
pub use cuda::Cuda;
