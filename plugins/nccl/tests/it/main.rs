//! Tests with a library that has NCCL's interface, and streams that run in random order.
//!
//! Ranks are threads of this process, or processes.

mod conforms;
mod copies;
mod faults;
mod host_memory;
mod orders;
mod pipelines;
mod processes;
mod ranks;
mod replicas;
mod timings;
mod trainings;
