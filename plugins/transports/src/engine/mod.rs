//! Process groups of any [`Medium`], and the engine of those over memory that ranks share.

pub(crate) mod blame;
mod connect;
mod direct;
mod group;
mod job_thread;
mod p2p;
mod plan;
mod queue;
mod reduce;
mod rendezvous;
mod stream;
mod wait;
mod worker;

pub(crate) use blame::Board;
pub(crate) use connect::{Settings, connect};
pub(crate) use group::{Group, Identity, Medium};
pub(crate) use job_thread::{JobThread, RunJobs};
pub(crate) use plan::{Buffer, Collective, Fingerprint, bytes, dtype_code};
pub(crate) use queue::{CLOSING, Completion, Job, P2pTask, Queue, Task, wait_for};
pub(crate) use reduce::reduce;
pub(crate) use rendezvous::{MappedRegion, MemoryOwner, Rendezvous};
pub(crate) use stream::Stream;
pub(crate) use wait::Failure;
