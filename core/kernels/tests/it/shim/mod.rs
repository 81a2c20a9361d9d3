//! Kernels on the CPU: compiled with `shim/` by a host compiler, as programs of their own under sanitizers. A report of
//! theirs ends a program, and is the message of the test.

mod build;
mod machine;

pub(crate) use build::{Driver, Sanitizer, build};
pub(crate) use machine::Machine;
