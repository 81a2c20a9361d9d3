//! CUDA kernels in C without headers, the table of their parameters, and plans of launches.
//!
//! A kernel is compiled in three ways: by NVRTC when a program first needs it (feature `cuda`), by NVRTC and `ptxas`
//! in `.ci/kernels`, which compares the parameters in what comes out with [`table::all`], and by a host compiler under
//! `shim/`, where the tests run it with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer against what
//! the CPU computes. **None of them has run on a GPU yet.**
//!
//! What is launched is a [`Plan`]: which kernels, over how many blocks, with which arguments, which products of matrices
//! (cuBLAS computes those) between them, what small tables they read and what memory they need besides. A plan is made from
//! addresses and sizes alone, so that the tests carry out the very plans that a GPU would.
//!
//! ```
//! use fulgurite_kernels::{Float, plans::{Values, squared_norm}};
//!
//! // Two gradients, whose memory is at these addresses, and where the sum of their squares shall be.
//! let grads = [Values { address: 0x1000, length: 70_000, dtype: Float::F32 },
//!              Values { address: 0x9000, length: 3, dtype: Float::Bf16 }];
//! let plan = squared_norm(&grads, 0x100);
//! let names: Vec<_> = plan.calls().iter().map(|call| call.kernel).collect();
//! assert_eq!(names, ["squared_norm_chunks", "sum_f64"]);
//! ```
//!
//! NVRTC makes the code of the GPU itself (a cubin), which the driver need not compile. The environment variable
//! `FULGURITE_KERNELS=ptx` has it make PTX instead, for tools that read that, such as `gpu-check/emulator`.
//!
//! With `FULGURITE_ATTENTION=cudnn`, cuDNN computes attention instead ([`cudnn`]).
//!
//! This crate knows tensors only as addresses, lengths and dtypes; `engine` and `nn` have the plans carried out.

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

/// Threads of a block, in every kernel.
pub const THREADS: u32 = 256;
