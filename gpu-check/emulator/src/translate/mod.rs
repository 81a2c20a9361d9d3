//! Translates a PTX kernel to a C++ function for `runtime/ptx.h`.
//!
//! Registers are untyped words, as in PTX: each instruction interprets their bits. Addresses of
//! global memory are host addresses. Addresses of shared memory are the lower half of a host
//! address, because PTX allows 32 bits for them.

mod function;
mod instructions;
mod kernel;
mod types;

pub(crate) use kernel::{Translated, translate};
