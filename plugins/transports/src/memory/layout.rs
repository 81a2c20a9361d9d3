//! The parts of a region and their offsets. Zeroed memory is a valid initial state of each.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// Marks a mapping as a region of this layout.
pub(crate) const MAGIC: u64 = 0x666c_6775_7269_0001;

/// Buffers that slots rotate through: one being written, one reduced, one read.
pub(crate) const BUFFERS: usize = 3;

/// Number of chunks that a sender may be ahead of its receiver.
pub(crate) const P2P_CHUNKS: usize = 2;

/// Limit for an abort reason, in bytes. Longer reasons are cut.
pub(crate) const REASON_BYTES: usize = 2048;

/// Granularity of offsets, a multiple of every element's size, so that no chunk cuts an element.
pub(crate) const LINE: usize = 64;

/// A value on its own cache lines (two, as neighbours are prefetched in pairs).
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

/// The state of the group.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    /// Random; distinguishes this region from another one at a stale path.
    pub(crate) nonce: AtomicU64,
    pub(crate) size: AtomicU64,
    pub(crate) len: AtomicU64,
    /// Arrivals at barriers, all ranks together: barrier `b` is passed at `(b + 1) * size`.
    pub(crate) arrivals: CachePadded<AtomicU64>,
    /// 0: alive, 1: the reason is being written, 2: aborted.
    pub(crate) abort_state: CachePadded<AtomicU32>,
    /// The group rank that aborted.
    pub(crate) abort_rank: AtomicU32,
    /// The global rank whose failure is the reason, plus one; 0 without such a rank.
    pub(crate) abort_failed: AtomicU32,
    pub(crate) abort_len: AtomicU32,
    pub(crate) abort_reason: [AtomicU8; REASON_BYTES],
}

/// The state of one rank. Only this rank writes it, except for the waker, which other ranks notify.
#[repr(C, align(128))]
pub(crate) struct RankRecord {
    /// Futex word, changed whenever the rank should check its condition.
    pub(crate) waker: AtomicU32,
    /// 1 while the rank sleeps, or is about to.
    pub(crate) asleep: AtomicU32,
    /// 1 once the rank has dropped the group.
    pub(crate) left: AtomicU32,
    /// Process id.
    pub(crate) pid: AtomicU32,
    /// Barriers this rank has arrived at.
    pub(crate) arrived: AtomicU64,
    /// Collectives this rank has begun.
    pub(crate) begun: AtomicU64,
    /// Fingerprints of the last two collectives, by sequence number. While one rank still compares
    /// the fingerprints of a collective, another may have begun the next collective, but not the
    /// one after.
    pub(crate) ops: [OpRecord; 2],
    /// The rank's shared memory.
    pub(crate) memory: MemoryRecord,
    /// Waits of the rank's threads, in any group. Used only in the region of all ranks.
    pub(crate) waits: [WaitRecord; WAITS],
}

/// Number of waits of a rank that can be recorded at a time.
pub(crate) const WAITS: usize = 4;

/// A long wait.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct WaitRecord {
    /// The awaited global rank, plus one; 0 if the record is free.
    pub(crate) awaited: AtomicU32,
    /// 1 if the wait has ended by its timeout.
    pub(crate) gave_up: AtomicU32,
    /// When the waiting thread last looked, in milliseconds of the host's clock.
    pub(crate) looked: AtomicU64,
}

/// The handle of a rank's shared memory; zeros without such memory.
#[repr(C)]
pub(crate) struct MemoryRecord {
    /// File descriptor, in the rank's process.
    pub(crate) fd: AtomicU32,
    pub(crate) len: AtomicU64,
    pub(crate) nonce: AtomicU64,
}

/// The collective that a rank is in.
#[repr(C)]
pub(crate) struct OpRecord {
    pub(crate) sequence: AtomicU64,
    pub(crate) kind: AtomicU32,
    pub(crate) dtype: AtomicU32,
    pub(crate) bytes: AtomicU64,
    pub(crate) detail: AtomicU64,
    /// Whether this rank's slot has the offsets of its exposed tensors.
    pub(crate) direct: AtomicU32,
}

/// Messages from one rank to another.
#[repr(C, align(128))]
pub(crate) struct Channel {
    /// Chunks that the sender has sent.
    pub(crate) sent: CachePadded<AtomicU64>,
    /// Chunks that the receiver has received.
    pub(crate) received: CachePadded<AtomicU64>,
    pub(crate) heads: [ChunkHead; P2P_CHUNKS],
}

/// The message of a chunk, and the chunk's place in it.
#[repr(C)]
pub(crate) struct ChunkHead {
    /// Bytes of the whole message.
    pub(crate) total: AtomicU64,
    /// Bytes of it before this chunk.
    pub(crate) offset: AtomicU64,
    pub(crate) dtype: AtomicU32,
}

/// Sizes and offsets of a region, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionLayout {
    pub(crate) size: usize,
    /// One rank's slot in one buffer: `size` portions of whole lines.
    pub(crate) slot: usize,
    /// One chunk of a message.
    pub(crate) p2p_chunk: usize,
    pub(crate) records: usize,
    pub(crate) channels: usize,
    pub(crate) slots: usize,
    /// Offset of the chunks of messages.
    pub(crate) p2p_chunks: usize,
    pub(crate) len: usize,
}

impl RegionLayout {
    pub(crate) fn new(size: usize, chunk_bytes: usize) -> Self {
        const PAGE: usize = 4096;
        let slot = chunk_bytes.div_ceil(size).next_multiple_of(LINE) * size;
        let p2p_chunk = chunk_bytes.min(256 << 10).next_multiple_of(LINE);
        let records = size_of::<Header>().next_multiple_of(LINE * 2);
        let channels = records + size * size_of::<RankRecord>();
        let slots = (channels + size * size * size_of::<Channel>()).next_multiple_of(PAGE);
        let p2p_chunks = slots + BUFFERS * size * slot;
        let len = (p2p_chunks + size * size * P2P_CHUNKS * p2p_chunk).next_multiple_of(PAGE);
        Self { size, slot, p2p_chunk, records, channels, slots, p2p_chunks, len }
    }

    /// Bytes of a slot that one rank reduces, when a chunk is divided among all ranks.
    pub(crate) fn portion(&self) -> usize {
        self.slot / self.size
    }
}
