//! Kernels on the CPU. `shim/` and a host compiler turn them into programs that run under
//! sanitizers. A sanitizer's report ends the program, and becomes the test's message.

mod build;
mod machine;

pub(crate) use build::{Driver, Sanitizer, build};
pub(crate) use machine::Machine;
