//! Process groups of threads and of processes.

mod abandonment;
#[cfg(target_os = "linux")]
mod hosts;
#[cfg(target_os = "linux")]
mod job;
#[cfg(target_os = "linux")]
mod shm;
#[cfg(target_os = "linux")]
mod tcp;
mod threads;

use fulgurite_transports::SharedMemory;

/// Lets ranks reach the tensors that a group made.
#[global_allocator]
static ALLOCATOR: SharedMemory<std::alloc::System> = SharedMemory(std::alloc::System);
