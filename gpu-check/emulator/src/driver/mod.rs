//! The functions of CUDA's driver, under their C names.
//!
//! NVIDIA documents each of them; comments here state only the differences. All are called from C.
//! The caller promises arguments that satisfy that documentation.

mod devices;
mod events;
mod launches;
mod memory;
mod status;

pub(crate) use status::Status;
