//! The allocator with which collectives reach the tensors that a group made where they are.

use fulgurite_transports::SharedMemory;

#[global_allocator]
static ALLOCATOR: SharedMemory<std::alloc::System> = SharedMemory(std::alloc::System);
