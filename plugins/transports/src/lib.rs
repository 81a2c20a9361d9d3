//! Process groups without other software, for threads and for processes of one or more hosts.
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
//! | [`Tcp`] | processes of any hosts | `"tcp"`; [`network`] allows other networks |
//! | [`Auto`] | processes of any hosts, sharing memory within a host | `"auto"`, the default |
//!
//! # How shared memory works
//! Threads and processes of one host use the same engine. All ranks of a group map a
//! [region](self#the-region): anonymous memory for threads, a memfd for processes. Each rank has a
//! communication thread, which runs its collectives in the order they were started; the caller gets
//! a `Work`. Tensors outside the CPU are copied to the host.
//!
//! A collective is cut into chunks that go through the region in a pipeline, with a barrier between
//! phases. In phase `k` a rank *writes* its part of chunk `k` into its own slot. It *reduces* its
//! portion of chunk `k - 1` over the slots of all ranks in rank order, and *reads* its part of
//! chunk `k - 2`. Collectives without a reduction read chunk `k - 1` instead. Slots rotate through
//! three buffers, also from one collective to the next.
//!
//! In programs whose allocator is a [`SharedMemory`], ranks can map each other's tensors from
//! [`ProcessGroup::empty`](fulgurite_core::collective::ProcessGroup::empty), where strategies put
//! buckets, shards and gradients. A collective of at least 16 KiB of such tensors is *direct*. The
//! ranks write the offsets of their tensors to their slots. Between two barriers, each rank then
//! reads its peers' tensors and writes its results; an all-reduce also writes them into its peers'
//! tensors. All ranks see whether all can do so, and so make the same choice.
//!
//! # The region
//! All offsets are multiples of a cache line, and all words native-endian atomics, since the ranks
//! are on one machine and run the same program.
//!
//! | part | per | content |
//! |---|---|---|
//! | header | group | magic, nonce, size, length; barrier arrivals; abort flag, rank and reason |
//! | rank record | rank | waker (futex word), sleep flag; pid; counts of barriers and collectives |
//! | | | fingerprints of the last two collectives; whether the rank has left |
//! | | | handle of its tensors' memory; in the first group's region, its waits in any group |
//! | channel | ordered pair | messages' chunks sent and received, and two chunk headers |
//! | slots | 3 buffers × rank | `chunk_bytes` each, the data of collectives |
//! | p2p chunks | ordered pair × 2 | the data of `send` / `recv` |
//!
//! A page takes memory from its first use: at most `3 × chunk_bytes` for each rank and group, plus
//! the p2p chunks of pairs that exchange messages.
//!
//! # Invariants
//! - A rank writes only to its own slots and to the chunks of messages it sends. It reads another
//!   rank's slot only after a barrier that follows the write. It rewrites its own slot only after a
//!   barrier that follows all reads. Nothing else synchronises data.
//! - It accesses another rank's tensors only between the two barriers of a direct collective with
//!   these tensors. There, a byte that one rank writes is not accessed by any other rank. If a
//!   barrier fails, the rank's tensors are never freed, as other ranks may still access them.
//! - Before a rank reads a peer's slot in a collective, it has checked that the peer is in the same
//!   collective. Sequence number, kind, dtype, bytes and a hash of the arguments are compared after
//!   the first barrier. A mismatch is an error on all ranks and ends the group.
//! - No lock on a tensor is held while waiting for a peer.
//! - Every wait checks the abort flag and the timeout. Every 100 ms it also checks the store's
//!   report of failed ranks and whether the processes of missing ranks are alive. While the job
//!   starts, it checks whether this rank was asked to end.
//! - The memory of a `shm` group has no name in any file system. It is freed when the last process
//!   that maps it ends, for any reason.
//! - After an error in a group, all its later calls fail with the same reason.

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
