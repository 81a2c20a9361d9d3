//! The parts of a region and their offsets. Zeroed memory is a valid initial state of all of them.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// Says that a mapping is a region of this layout.
pub(crate) const MAGIC: u64 = 0x666c_6775_7269_0001;

/// Buffers that slots rotate through: one being written, one reduced, one read.
pub(crate) const BUFFERS: usize = 3;

/// Chunks that a sender may be ahead of its receiver.
pub(crate) const P2P_CHUNKS: usize = 2;

/// Longest abort reason; the rest is cut.
pub(crate) const REASON_BYTES: usize = 2048;

/// Granularity of offsets, and no less than any element: chunks never cut one.
pub(crate) const LINE: usize = 64;

/// A value on cache lines of its own (two, as neighbours are prefetched in pairs).
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Line<T>(pub(crate) T);

/// The group's own words.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    /// Random; tells this region from any other that a stale path may lead to.
    pub(crate) nonce: AtomicU64,
    pub(crate) size: AtomicU64,
    pub(crate) len: AtomicU64,
    /// Arrivals at barriers, all ranks together: barrier `b` is passed at `(b + 1) * size`.
    pub(crate) arrivals: Line<AtomicU64>,
    /// 0: alive, 1: the reason is being written, 2: aborted.
    pub(crate) abort_state: Line<AtomicU32>,
    /// Group rank that aborted.
    pub(crate) abort_rank: AtomicU32,
    /// Global rank whose failure is the reason, plus one; 0 if there is none such.
    pub(crate) abort_failed: AtomicU32,
    pub(crate) abort_len: AtomicU32,
    pub(crate) abort_reason: [AtomicU8; REASON_BYTES],
}

/// One rank's words; only that rank writes them, but for the waker, which others
/// notify.
#[repr(C, align(128))]
pub(crate) struct RankRecord {
    /// Futex word: changes whenever the rank should check what it waits for.
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
    /// Fingerprints of the last two collectives, by sequence number: while one rank still compares
    /// those of one collective, another may have begun the next, but not the one after.
    pub(crate) ops: [OpRecord; 2],
    /// Memory of the rank that others may map.
    pub(crate) memory: MemoryRecord,
}

/// How to map a rank's shared memory; zeros if it has none.
#[repr(C)]
pub(crate) struct MemoryRecord {
    /// File descriptor, in the rank's process.
    pub(crate) fd: AtomicU32,
    pub(crate) len: AtomicU64,
    pub(crate) nonce: AtomicU64,
}

/// What a rank says it is doing.
#[repr(C)]
pub(crate) struct OpRecord {
    pub(crate) sequence: AtomicU64,
    pub(crate) kind: AtomicU32,
    pub(crate) dtype: AtomicU32,
    pub(crate) bytes: AtomicU64,
    pub(crate) detail: AtomicU64,
    /// Whether this rank's slot says where its tensors are, for the others to read and write.
    pub(crate) direct: AtomicU32,
}

/// One direction between two ranks.
#[repr(C, align(128))]
pub(crate) struct Channel {
    /// Chunks the sender has put in.
    pub(crate) sent: Line<AtomicU64>,
    /// Chunks the receiver has taken out.
    pub(crate) received: Line<AtomicU64>,
    pub(crate) heads: [ChunkHead; P2P_CHUNKS],
}

/// What a chunk belongs to.
#[repr(C)]
pub(crate) struct ChunkHead {
    /// Bytes of the whole message.
    pub(crate) total: AtomicU64,
    /// Bytes of it that came before.
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
    /// Where the chunks of messages begin.
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

    /// Bytes of a slot that belong to one rank, when a chunk is dealt to all of them.
    pub(crate) fn portion(&self) -> usize {
        self.slot / self.size
    }
}
