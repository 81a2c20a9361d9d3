//! A kernel in PTX as a function in C++, for `runtime/ptx.h`.
//!
//! Registers are words without a type, as in PTX: each instruction says how it reads their bits. Addresses of global
//! memory are those of the host; addresses of shared memory are the lower half of one, as they may be in 32 bits.

mod function;
mod instructions;
mod kernel;
mod types;

pub(crate) use kernel::{Translated, translate};
