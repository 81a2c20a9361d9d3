//! The process group over NCCL, with a library that has NCCL's interface, for ranks that are threads of this process or
//! processes, and streams that run in random order.

mod conforms;
mod copies;
mod faults;
mod host_memory;
mod orders;
mod processes;
mod ranks;
mod replicas;
mod timings;
mod trainings;
