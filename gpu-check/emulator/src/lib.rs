//! An emulated GPU for machines without one: the parts of CUDA's driver, cuBLAS and cuRAND that
//! Fulgurite and candle call. PTX kernels are translated to C++, compiled by g++ and run on the
//! CPU.
//!
//! The library is preloaded into a program that is built with the feature `cuda`:
//!
//! ```text
//! LD_PRELOAD=libfulgurite_gpu_emulator.so gpu-check
//! ```
//!
//! `.ci/gpu` builds and runs both. NVIDIA's own compilers make the PTX, as for a GPU. The emulator
//! finds mistakes in launches, copies, streams and memory before a GPU is at hand:
//!
//! - An access to memory that is freed or was never allocated faults, with the kernel's name. A
//!   write past the end of an allocation is found when the allocation is freed. New memory is full
//!   of NaN. A misaligned access, or a kernel's access to host memory, ends the program.
//! - Only events order streams. The order of streams, and of threads in a block, is otherwise
//!   random.
//! - Copies between a stream and pinned memory happen when the stream reaches them, not at the
//!   call.
//! - Launches and matrix products that CUDA or cuBLAS would refuse are refused.
//! - Launches, copies of pageable memory, waits and other costly calls are counted, with the
//!   calling line of the program.
//!
//! Environment variables:
//!
//! - `FULGURITE_GPU_EMULATOR_DEVICES`: number of GPUs; default 1.
//! - `FULGURITE_GPU_EMULATOR_BYTES`: memory of each GPU; default 8 GiB.
//! - `FULGURITE_GPU_EMULATOR_ORDER`: `eager` runs work when it is queued, `lazy` when it is waited
//!   for, and a number in a random order with this seed. Default 1.
//! - `FULGURITE_GPU_EMULATOR_FAILS`: `DEVICE:COUNT:BYTES`: the `COUNT`th allocation (from 1) of at
//!   least `BYTES` bytes on this GPU fails, in each process. Default: none fails.
//! - `FULGURITE_GPU_EMULATOR_CALLS`: a folder for the counts; each process writes `PID.json`.
//! - `FULGURITE_GPU_EMULATOR_CACHE`: a folder for compiled kernels; `fulgurite/gpu-emulator` in the
//!   user's cache directory by default.
//!
//! The emulator reads only PTX, so Fulgurite's kernels must be compiled to PTX:
//! `FULGURITE_KERNELS=ptx`.
//!
//! The emulator shows nothing about speed, `ptxas`, memory order between threads beyond barriers,
//! rounding of approximate instructions (computed exactly here), or denormals that a GPU flushes.
//! Kernels of one process run one after the other.

mod blas;
mod calls;
mod compile;
mod driver;
mod machine;
mod memory;
mod ptx;
mod random;
mod streams;
mod translate;

/// Ends the process: in a test tool, going on would hide the mistake.
fn refuse(why: &str) -> ! {
    eprintln!("gpu emulator: {why}");
    machine::end();
    std::process::exit(97)
}

extern "C" fn at_exit() {
    machine::end();
}

/// Called by the dynamic loader when the process ends.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;
