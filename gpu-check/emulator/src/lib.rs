//! A GPU for machines that have none: CUDA's driver, cuBLAS and cuRAND, as far as Fulgurite and candle call them, with
//! kernels in PTX that are translated to C++, compiled by g++ and run on the CPU.
//!
//! It is loaded before a program that is built with the feature `cuda`:
//!
//! ```text
//! LD_PRELOAD=libfulgurite_gpu_emulator.so gpu-check
//! ```
//!
//! `.ci/gpu` builds both and does that. NVIDIA's own compilers make the PTX, as for a GPU. What it is for is to find what is
//! wrong with launches, copies, streams and memory before a GPU is at hand:
//!
//! - memory that is not allocated, or freed, faults, with the kernel's name; what is written past an allocation's end is
//!   found when it is freed; new memory is full of NaN; a misaligned access, or one of the host's memory, ends the program;
//! - streams are ordered by events alone, in an order that is drawn, and so are the threads of a block;
//! - copies between a stream and pinned memory happen when the stream gets to them, not when they are asked for;
//! - launches and products that CUDA or cuBLAS would refuse are refused;
//! - every call that matters is counted, with the place in the program that it comes from: launches, copies of memory that may be paged out, waits.
//!
//! | variable | |
//! |---|---|
//! | `FULGURITE_GPU_EMULATOR_DEVICES` | how many GPUs there are; 1 |
//! | `FULGURITE_GPU_EMULATOR_BYTES` | the memory of each; 8 GiB |
//! | `FULGURITE_GPU_EMULATOR_ORDER` | `eager`: work is done when it is queued; `lazy`: when it is waited for; a number: in an order drawn from it; 1 |
//! | `FULGURITE_GPU_EMULATOR_FAILS` | `DEVICE:COUNT:BYTES`: the allocation of a process on this GPU that is the `COUNT`th, from 1 on, of at least `BYTES` bytes finds no memory left; none |
//! | `FULGURITE_GPU_EMULATOR_CALLS` | a folder, where each process writes its counts as `PID.json` |
//! | `FULGURITE_GPU_EMULATOR_CACHE` | where compiled kernels are kept; `fulgurite/gpu-emulator` of the user's cache directory |
//!
//! It reads PTX alone, so kernels of Fulgurite must be compiled to that: `FULGURITE_KERNELS=ptx`.
//!
//! What it does not show: how fast anything is, what `ptxas` makes of the PTX, memory order between threads beyond
//! barriers, rounding of approximate instructions (it computes them exactly), denormals that a GPU flushes. Kernels of one
//! process run one after the other.

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

/// Ends the process: this is a tool for tests, and going on would hide what is wrong.
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
