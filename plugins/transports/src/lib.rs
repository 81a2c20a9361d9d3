//! Process groups that need no other software: threads of one process, processes of one host, and processes of
//! several hosts.
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
//! | [`Tcp`] | processes of any hosts | `"tcp"`; see [`network`], which others can put another network under |
//! | [`Auto`] | processes of any hosts: shared memory within a host, a network between hosts | `"auto"`, the default |
//!
//! # How shared memory works
//! Threads and processes of one host have the same engine. All ranks of a group map a [region](self#the-region): anonymous
//! memory for threads, a memfd for processes. Each rank has a communication thread, on which its
//! collectives run in the order they were started; the caller gets a `Work`. Tensors that are not
//! on the CPU are copied to the host.
//!
//! A collective is cut into chunks that go through the region in a pipeline. In phase `k` a rank
//! *writes* its part of chunk `k` into its own slot, *reduces* its portion of chunk `k - 1` over
//! the slots of all ranks in rank order, and *reads* its part of chunk `k - 2`; there is a barrier
//! between two phases. Collectives without a reduction read chunk `k - 1` instead. Slots rotate
//! through three buffers, also from one collective to the next.
//!
//! In programs whose allocator is a [`SharedMemory`], ranks can map each other's tensors from
//! [`ProcessGroup::empty`](fulgurite_engine::collective::ProcessGroup::empty), where strategies put
//! buckets, shards and gradients. A collective of 16 KiB and more of such tensors is *direct*: the
//! ranks write the offsets of their tensors to their slots, and between two barriers each reads its
//! peers' tensors and writes its results, those of an all-reduce also into its peers' tensors. All
//! ranks see whether all can do so, and so make the same choice.
//!
//! # The region
//! All offsets are multiples of a cache line, and all words native-endian atomics, since the ranks
//! are on one machine and run the same program.
//!
//! | part | per | content |
//! |---|---|---|
//! | header | group | magic, nonce, size, length; arrivals at barriers so far; abort flag, rank and reason |
//! | rank record | rank | waker (futex word) and whether the rank sleeps on it; pid; barriers arrived at; collectives begun; fingerprints of the last two; whether it has left; how to map its tensors' memory; in the first group's region, whom the rank waits for in any group |
//! | channel | ordered pair | messages' chunks sent and received, and two chunk headers |
//! | slots | 3 buffers × rank | `chunk_bytes` each, the data of collectives |
//! | p2p chunks | ordered pair × 2 | the data of `send` / `recv` |
//!
//! A page takes memory from its first use: at most `3 × chunk_bytes` for each rank and group, plus
//! the p2p chunks of pairs that exchange messages.
//!
//! # Invariants
//! - A rank writes only to its own slots and to the chunks of messages it sends. It reads another rank's slot
//!   only after a barrier that comes after the write, and rewrites a slot of its own only after a
//!   barrier that comes after all reads. Nothing else synchronises data.
//! - It accesses another rank's tensors only between the two barriers of a direct collective with these
//!   tensors, and there no byte that one rank writes is accessed by another. If a barrier fails, the rank's
//!   tensors are never freed, as other ranks may still access them.
//! - Before a rank reads a peer's slot in a collective, it has seen that the peer is in the same
//!   collective: sequence number, kind, dtype, bytes and a hash of the arguments are compared after
//!   the first barrier. A mismatch is an error on all ranks and ends the group.
//! - No lock on a tensor is held while waiting for a peer.
//! - Every wait checks the abort flag, the timeout and, every 100 ms, the store's report of failed
//!   ranks, whether the processes of missing ranks still live, and, while the job starts, whether this rank
//!   was asked to end.
//! - The memory of a `shm` group has no name in any file system. It is freed when the last process that maps
//!   it ends, in whatever way.
//! - After an error in a group all its later calls fail with the same reason.

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "processes share memory on Linux"))]
mod engine;
mod hosts;
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "processes share memory on Linux"))]
mod memory;
pub mod network;
mod shm;
mod sync;
mod threads;

pub use hosts::Auto;
pub use memory::SharedMemory;
pub use network::Tcp;
pub use shm::Shm;
pub use threads::{ThreadsGroup, run_ranks, run_ranks_with};
