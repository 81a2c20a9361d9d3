//! [`Region`].
#![allow(unsafe_code)] // Memory shared between processes has no safe type.

use std::ops::Range;
use std::sync::atomic::Ordering;

use memmap2::{MmapOptions, MmapRaw};

use super::layout::{
    BUFFERS, Channel, Header, MAGIC, P2P_CHUNKS, REASON_BYTES, RankRecord, RegionLayout,
};
use super::waker::notify;

/// The seals of memory that other processes map. An access beyond the end of a file ends a process,
/// so the file must keep its length.
#[cfg(target_os = "linux")]
pub(crate) const SEALS: rustix::fs::SealFlags = {
    use rustix::fs::SealFlags;
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL)
};

/// The memory that all ranks of a group map. The crate's documentation lists its parts.
pub(crate) struct Region {
    map: MmapRaw,
    layout: RegionLayout,
}

impl Region {
    /// Makes a region for ranks that are threads of this process.
    pub(crate) fn anonymous(layout: RegionLayout) -> std::io::Result<Self> {
        let map = MmapOptions::new().len(layout.len).map_anon()?.into();
        let region = Self { map, layout };
        region.sign(0);
        Ok(region)
    }

    /// Maps `file`, which is zeroed and has at least the layout's length.
    #[cfg(target_os = "linux")]
    pub(crate) fn of_file(file: &std::fs::File, layout: RegionLayout) -> std::io::Result<Self> {
        let map = MmapOptions::new().len(layout.len).map_raw(file)?;
        Ok(Self { map, layout })
    }

    /// Marks new memory as a region.
    pub(crate) fn sign(&self, nonce: u64) {
        let header = self.header();
        header.nonce.store(nonce, Ordering::Relaxed);
        header.size.store(self.layout.size as u64, Ordering::Relaxed);
        header.len.store(self.layout.len as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::SeqCst);
    }

    /// Whether this is the region signed with `nonce`.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_signed(&self, nonce: u64) -> bool {
        let header = self.header();
        header.magic.load(Ordering::SeqCst) == MAGIC
            && header.nonce.load(Ordering::Relaxed) == nonce
            && header.size.load(Ordering::Relaxed) == self.layout.size as u64
            && header.len.load(Ordering::Relaxed) == self.layout.len as u64
    }

    pub(crate) fn layout(&self) -> &RegionLayout {
        &self.layout
    }

    pub(crate) fn header(&self) -> &Header {
        self.at(0)
    }

    pub(crate) fn record(&self, rank: usize) -> &RankRecord {
        assert!(rank < self.layout.size);
        self.at(self.layout.records + rank * size_of::<RankRecord>())
    }

    pub(crate) fn channel(&self, src: usize, dst: usize) -> &Channel {
        assert!(src < self.layout.size && dst < self.layout.size);
        let index = src * self.layout.size + dst;
        self.at(self.layout.channels + index * size_of::<Channel>())
    }

    /// Returns a control structure. Used only for the three types above, which consist of atomics,
    /// so any bits are valid.
    fn at<T>(&self, offset: usize) -> &T {
        assert!(
            offset + size_of::<T>() <= self.layout.slots && offset.is_multiple_of(align_of::<T>())
        );
        // SAFETY: in bounds and aligned (the mapping starts at a page), mapped as long as `self`;
        // `T` consists of atomics, so others may change it while this reference lives.
        unsafe { &*self.map.as_ptr().add(offset).cast::<T>() }
    }

    /// Returns bytes of a rank's slot.
    ///
    /// # Safety
    /// No rank may write to these bytes while the slice lives. Either they are the caller's own
    /// slot, or barriers separate this read from the owner's write before and its next write after.
    pub(crate) unsafe fn slot(&self, buffer: usize, rank: usize, range: Range<usize>) -> &[u8] {
        let start = self.slot_start(buffer, rank, &range);
        // SAFETY: in bounds (checked there); not written meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(start), range.len()) }
    }

    /// Returns bytes of the caller's own slot, for writing.
    ///
    /// # Safety
    /// `rank` is the calling rank, and no other slice of these bytes lives in this process. No
    /// other rank reads the bytes: a barrier separates the last read from this write.
    #[allow(clippy::mut_from_ref)] // The exclusivity is the caller's promise.
    pub(crate) unsafe fn slot_mut(
        &self,
        buffer: usize,
        rank: usize,
        range: Range<usize>,
    ) -> &mut [u8] {
        let start = self.slot_start(buffer, rank, &range);
        // SAFETY: in bounds (checked there); not used by others meanwhile, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start), range.len()) }
    }

    fn slot_start(&self, buffer: usize, rank: usize, range: &Range<usize>) -> usize {
        let layout = &self.layout;
        assert!(buffer < BUFFERS && rank < layout.size);
        assert!(range.start <= range.end && range.end <= layout.slot);
        layout.slots + (buffer * layout.size + rank) * layout.slot + range.start
    }

    /// Returns the first `len` bytes of a chunk of a message.
    ///
    /// # Safety
    /// The calling rank is `dst`, and by the channel's counters this chunk was sent and not yet
    /// received.
    pub(crate) unsafe fn p2p_chunk(
        &self,
        src: usize,
        dst: usize,
        index: usize,
        len: usize,
    ) -> &[u8] {
        let start = self.p2p_start(src, dst, index, len);
        // SAFETY: in bounds (checked there); the sender does not touch the chunk before it has
        // been received, as the caller promises.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(start), len) }
    }

    /// Returns the first `len` bytes of a chunk of a message, for writing.
    ///
    /// # Safety
    /// The calling rank is `src`, and no other slice of these bytes lives in this process. By the
    /// channel's counters the chunk has been received, or was never sent.
    #[allow(clippy::mut_from_ref)] // The exclusivity is the caller's promise.
    pub(crate) unsafe fn p2p_chunk_mut(
        &self,
        src: usize,
        dst: usize,
        index: usize,
        len: usize,
    ) -> &mut [u8] {
        let start = self.p2p_start(src, dst, index, len);
        // SAFETY: in bounds (checked there); the receiver does not touch the chunk before it has
        // been sent, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(start), len) }
    }

    fn p2p_start(&self, src: usize, dst: usize, index: usize, len: usize) -> usize {
        let layout = &self.layout;
        assert!(
            src < layout.size && dst < layout.size && index < P2P_CHUNKS && len <= layout.p2p_chunk
        );
        layout.p2p_chunks + ((src * layout.size + dst) * P2P_CHUNKS + index) * layout.p2p_chunk
    }

    /// Marks the group as aborted, unless it is already, and wakes all ranks. `failed` is the
    /// global rank whose failure is the reason, if any.
    pub(crate) fn abort(&self, rank: usize, failed: Option<usize>, reason: &str) {
        let header = self.header();
        let state = &header.abort_state.0;
        if state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            let mut len = reason.len().min(REASON_BYTES);
            while !reason.is_char_boundary(len) {
                len -= 1;
            }
            for (slot, byte) in header.abort_reason.iter().zip(reason[..len].bytes()) {
                slot.store(byte, Ordering::Relaxed);
            }
            header.abort_len.store(len as u32, Ordering::Relaxed);
            header.abort_rank.store(rank as u32, Ordering::Relaxed);
            header.abort_failed.store(failed.map_or(0, |r| r as u32 + 1), Ordering::Relaxed);
            state.store(2, Ordering::SeqCst);
        }
        self.notify_all();
    }

    /// Returns the arguments of the first [`abort`](Self::abort), if any.
    pub(crate) fn aborted(&self) -> Option<(usize, Option<usize>, String)> {
        let header = self.header();
        if header.abort_state.0.load(Ordering::Acquire) != 2 {
            return None;
        }
        let len = (header.abort_len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
        let bytes: Vec<u8> =
            header.abort_reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let rank = header.abort_rank.load(Ordering::Relaxed) as usize;
        let failed = header.abort_failed.load(Ordering::Relaxed).checked_sub(1);
        Some((rank, failed.map(|r| r as usize), String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Makes every rank check its condition.
    pub(crate) fn notify_all(&self) {
        (0..self.layout.size).for_each(|rank| notify(self.record(rank)));
    }
}

/// A random number, to distinguish memory of this program from other memory.
pub(crate) fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // std's hash maps have random keys; the hash of empty input under such a key is a random
    // number.
    RandomState::new().build_hasher().finish()
}
