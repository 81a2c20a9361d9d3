//! Process groups that need nothing installed: threads of one process, and processes of one host.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fulgurite_core::collective::ReduceOp;
//! use fulgurite_transports::run_ranks;
//!
//! let sums = run_ranks(4, |group| {
//!     let x = Tensor::new(&[group.rank() as f32, 1.0], &Device::Cpu)?;
//!     group.all_reduce(&x, ReduceOp::Sum)?.wait()?;
//!     Ok(x.to_vec1::<f32>()?)
//! })?;
//! assert_eq!(sums, vec![vec![6.0, 4.0]; 4]);
//! # Ok::<(), fulgurite_core::Error>(())
//! ```
//!
//! | transport | ranks are | chosen by |
//! |---|---|---|
//! | [`ThreadsGroup`], [`run_ranks`] | threads of this process | code; for tests |
//! | [`Shm`] | processes of one host | `trainer.process_group.type = "shm"` |
//!
//! # How it works
//! Both are one engine over one kind of memory, a [region](self#the-region) that all ranks of a
//! group map: anonymous memory for threads, a memfd for processes. Each rank has a communication
//! thread, on which its collectives run in the order they were started; the caller gets a `Work`.
//! Tensors that are not on the CPU are staged through host copies.
//!
//! A collective is cut into chunks that go through the region in a pipeline. In phase `k` a rank
//! *writes* its part of chunk `k` into its own slot, *reduces* its portion of chunk `k - 1` over the
//! slots of all ranks in rank order, and *reads* what it needs of chunk `k - 2`; between two phases
//! is one barrier. Collectives without a reduction read chunk `k - 1` instead. Slots rotate through
//! three buffers, also from one collective to the next.
//!
//! Where all ranks reach each other's tensors (those from
//! [`ProcessGroup::empty`](fulgurite_core::collective::ProcessGroup::empty), where strategies put
//! buckets, shards and gradients, in programs whose allocator is a [`SharedMemory`]), a collective of
//! 16 KiB and more is *direct*: the ranks tell each other in their slots where their tensors are, and
//! between two barriers each reads its peers' and writes its results, an all-reduce's also into
//! theirs. All ranks see whether all can, so they choose alike.
//!
//! # The region
//! All offsets are multiples of a cache line, all words native-endian atomics; the ranks are on one
//! machine and run one program.
//!
//! | part | per | content |
//! |---|---|---|
//! | header | group | magic, nonce, size, length; arrivals at barriers so far; abort flag, rank and reason |
//! | rank record | rank | waker (futex word) and whether the rank sleeps on it; pid; barriers arrived at; collectives begun; fingerprints of the last two; whether it has left; how to map its tensors' memory |
//! | channel | ordered pair | messages' chunks sent and received, and two chunk headers |
//! | slots | 3 buffers × rank | `chunk_bytes` each, the data of collectives |
//! | p2p chunks | ordered pair × 2 | the data of `send` / `recv` |
//!
//! The memory is committed as it is touched, at most `3 × chunk_bytes` a rank and group plus the
//! p2p chunks of the pairs that talk.
//!
//! # Invariants
//! - A rank writes only to its own slots and to the chunks of messages it sends. It reads another rank's slot
//!   only after a barrier that comes after the write, and rewrites a slot of its own only after a
//!   barrier that comes after all reads. Nothing else synchronises data.
//! - It touches another rank's tensors only between the two barriers of a direct collective that
//!   they are arguments of, and there no byte that one rank writes is read or written by another. If
//!   a barrier fails, the rank's tensors stay allocated for ever, as other ranks may still use them.
//! - Before a rank reads a peer's slot in a collective, it has seen that the peer is in the same
//!   collective: sequence number, kind, dtype, bytes and a hash of the arguments are compared after
//!   the first barrier. A mismatch is an error on all ranks and ends the group.
//! - No lock on a tensor is held while waiting for a peer.
//! - Every wait checks the abort flag, the timeout and, every 100 ms, the store's report of failed
//!   ranks and whether the processes of missing ranks still live.
//! - The memory of a `shm` group has no name in any file system: it is gone when the last process
//!   that maps it is, however that one ends.
//! - After an error a group is out of step; all its later calls fail with the same reason.

mod engine;
mod memory;
mod shm;
mod threads;

pub use memory::SharedMemory;
pub use shm::Shm;
pub use threads::{ThreadsGroup, run_ranks, run_ranks_with};
