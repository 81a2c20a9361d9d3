//! A stand-in for GPUs in tests of `fulgurite-nccl`: a library with NCCL's interface, and a model
//! of CUDA streams.
//!
//! Ranks are threads of one process, or processes that share a folder (`FAKE_NCCL_FOLDER`).
//!
//! | file | subject |
//! |---|---|
//! | [`streams`] | queues of tasks that a thread runs in random order, constrained only by events |
//! | [`raw`] | how a stream is passed to a C library |
//! | [`api`] | NCCL's functions, and functions that inject failures |
//! | `clique` | the ranks of a communicator: their calls meet, and results are computed |
//! | `threads`, `processes` | ranks as threads of one process, and as processes |
//! | `reduce` | reductions in an arbitrary order |
//!
//! The library is as strict as NCCL's documentation allows. A communicator that is under way
//! rejects calls. Calls of a group are on their streams only once a query of the communicator has
//! said so. Mismatched ranks wait for ever. Wrong uses are counted ([`api::fakeNcclViolations`]).

pub mod api;
mod clique;
mod processes;
pub mod raw;
mod reduce;
pub mod streams;
mod threads;
