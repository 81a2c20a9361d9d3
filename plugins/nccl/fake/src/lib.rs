//! What stands in for GPUs in the tests of `fulgurite-nccl`: a library with NCCL's interface, whose ranks are
//! threads of one process, or processes that meet in a folder (`FAKE_NCCL_FOLDER`), and a model of CUDA's streams.
//!
//! | file | subject |
//! |---|---|
//! | [`streams`] | queues of tasks that a thread runs in random order, which honours events and nothing else |
//! | [`raw`] | how a stream is given to a library of C |
//! | [`api`] | NCCL's functions, and those that tell the library to fail |
//! | `clique` | the ranks of a communicator, where their calls meet, and what comes of them |
//! | `threads`, `processes` | ranks that are threads of a process, and processes |
//! | `reduce` | reductions in an arbitrary order |
//!
//! The library is as strict as NCCL's documentation allows: a communicator that is under way may not be called, what
//! a group of calls has begun is on its streams only once the communicator is asked and says so, and ranks that do
//! not fit wait for ever. What a caller does that it must not do is counted ([`api::fakeNcclViolations`]).

pub mod api;
mod clique;
mod processes;
pub mod raw;
mod reduce;
pub mod streams;
mod threads;
