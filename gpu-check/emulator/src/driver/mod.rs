//! The functions of CUDA's driver, by their names.
//!
//! The documentation of each is NVIDIA's; what is said here is what differs. All are called from C, with arguments that
//! the caller promises to be what that documentation asks for.

mod devices;
mod events;
mod launches;
mod memory;
mod status;

pub(crate) use status::Status;
