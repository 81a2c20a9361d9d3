//! CUDA kernels in C without headers, the table of their parameters, and plans of launches.
//!
//! A kernel is compiled in three ways:
//!
//! - NVRTC compiles it when a program first needs it (feature `cuda`).
//! - `.ci/kernels` compiles it with NVRTC and `ptxas`, and compares the parameters in the output
//!   with [`table::all`].
//! - A host compiler compiles it with `shim/`. The tests run it with AddressSanitizer,
//!   UndefinedBehaviorSanitizer and ThreadSanitizer, and compare the results with the CPU's.
//!
//! **No kernel has run on a GPU yet.**
//!
//! A [`Plan`] lists the kernels to launch, with their numbers of blocks and their arguments. It
//! also lists the matrix products between them (computed by cuBLAS), the small tables that kernels
//! read, and the scratch memory. A plan is made from addresses and sizes alone, so the tests run
//! the same plans as a GPU.
//!
//! ```
//! use fulgurite_kernels::{Float, plans::{Values, squared_norm}};
//!
//! // Two gradients at these addresses, and the address for the sum of their squares.
//! let grads = [Values { address: 0x1000, length: 70_000, dtype: Float::F32 },
//!              Values { address: 0x9000, length: 3, dtype: Float::Bf16 }];
//! let plan = squared_norm(&grads, 0x100);
//! let names: Vec<_> = plan.calls().iter().map(|call| call.kernel).collect();
//! assert_eq!(names, ["squared_norm_chunks", "sum_f64"]);
//! ```
//!
//! NVRTC compiles to machine code (a cubin), so the driver compiles nothing. With the environment
//! variable `FULGURITE_KERNELS=ptx` it emits PTX, for tools such as `gpu-check/emulator`.
//!
//! With `FULGURITE_ATTENTION=cudnn`, cuDNN computes attention instead ([`cudnn`]).
//!
//! This crate knows tensors only as addresses, lengths and dtypes; `engine` and `nn` run the plans.

pub mod cache;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod cudnn;
mod dtype;
mod plan;
pub mod plans;
mod product;
mod source;
pub mod table;
pub mod versions;

pub use dtype::Float;
pub use plan::{
    Address, Argument, Bf16, Call, Element, F16, Field, FieldType, Half, In, Out, Parameter, Plan,
    Pointee, Row, Table, Target, Unknown, Work,
};
pub use product::{Matrix, Product, Start};
pub use source::{NVRTC_OPTIONS, Source};

/// Threads of a block, in most kernels: `THREADS` in `kernels/common.cu`.
pub const THREADS: u32 = 256;
