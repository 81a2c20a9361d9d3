//! Device memory: host pages, with a page behind each allocation that faults.

use std::collections::BTreeMap;
use std::ffi::c_void;

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect};

/// Size of a device's address space. No address is used twice, so a use after free faults.
const ADDRESSES: usize = 1 << 44;
const PAGE: usize = 4096;
/// CUDA's alignment of allocations.
const ALIGN: usize = 256;
/// Fill byte between the end of an allocation and the end of its last page.
const PADDING: u8 = 0xa5;
/// Fill byte of new memory: a NaN in every dtype.
const GARBAGE: u8 = 0xff;

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct Memory {
    start: usize,
    next: usize,
    blocks: BTreeMap<usize, Block>,
    /// Bytes allocated.
    pub(crate) used: usize,
    /// Most bytes allocated at once.
    pub(crate) peak: usize,
    /// Size of the memory in bytes.
    pub(crate) total: usize,
    fails: Option<Fails>,
}

/// An allocation that fails as if no memory were left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fails {
    pub(crate) device: usize,
    /// Number of counted allocations up to and including the failing one; 0 afterwards.
    left: usize,
    /// Smallest allocation in bytes that counts.
    bytes: usize,
}

impl Fails {
    /// Parses `DEVICE:COUNT:BYTES`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let numbers = text.split(':').map(|number| number.parse().ok());
        match *numbers.collect::<Option<Vec<usize>>>()? {
            [device, left, bytes] if left > 0 => Some(Self { device, left, bytes }),
            _ => None,
        }
    }

    /// Counts an allocation; returns whether this one fails.
    fn is_now(&mut self, bytes: usize) -> bool {
        if bytes < self.bytes || self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.left == 0
    }
}

#[derive(Debug, Clone, Copy)]
struct Block {
    bytes: usize,
    pages: usize,
    is_given_back: bool,
}

impl Memory {
    pub(crate) fn new(total: usize) -> Self {
        // SAFETY: a new mapping, whose addresses are unused.
        let start = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            mmap_anonymous(std::ptr::null_mut(), ADDRESSES, ProtFlags::empty(), flags)
        };
        let start = start.expect("addresses for a device") as usize;
        Self { start, next: start, blocks: BTreeMap::new(), used: 0, peak: 0, total, fails: None }
    }

    /// Sets the allocation that fails.
    pub(crate) fn with_fails(self, fails: Option<Fails>) -> Self {
        Self { fails, ..self }
    }

    /// The first address, and the one after the last.
    pub(crate) fn addresses(&self) -> (usize, usize) {
        (self.start, self.start + ADDRESSES)
    }

    /// Allocates memory; `None` if there is not enough.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<usize> {
        let fails = self.fails.as_mut().is_some_and(|fails| fails.is_now(bytes));
        if fails || bytes > self.total - self.used {
            return None;
        }
        let pages = bytes.max(1).next_multiple_of(PAGE);
        let first = self.next;
        self.next += pages + PAGE;
        if self.next > self.start + ADDRESSES {
            return None;
        }
        // SAFETY: pages of this mapping that were never handed out.
        unsafe {
            mprotect(first as *mut c_void, pages, MprotectFlags::READ | MprotectFlags::WRITE)
                .ok()?;
            std::ptr::write_bytes(first as *mut u8, PADDING, pages);
        }
        let start = first + pages - bytes.next_multiple_of(ALIGN);
        // SAFETY: within these pages.
        unsafe { std::ptr::write_bytes(start as *mut u8, GARBAGE, bytes) };
        self.blocks.insert(start, Block { bytes, pages, is_given_back: false });
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Some(start)
    }

    /// Makes the bytes available again. Later allocations on the same stream may count on them
    /// before the stream reaches the [free](Self::free).
    ///
    /// # Errors
    /// If no allocation begins at `start`, or it was given back already.
    pub(crate) fn give_back(&mut self, start: usize) -> Result<(), String> {
        let block = self.blocks.get_mut(&start).filter(|block| !block.is_given_back);
        let block = block.ok_or_else(|| format!("nothing is allocated at {start:#x}"))?;
        block.is_given_back = true;
        self.used -= block.bytes;
        Ok(())
    }

    /// Frees an allocation that was given back.
    ///
    /// # Errors
    /// If the allocation was written past its end.
    pub(crate) fn free(&mut self, start: usize) -> Result<(), String> {
        let block = self.blocks.remove(&start);
        let block = block.ok_or_else(|| format!("nothing is allocated at {start:#x}"))?;
        let end = start + block.bytes.next_multiple_of(ALIGN);
        // SAFETY: the pages are mapped until they are freed below.
        let padding = unsafe {
            std::slice::from_raw_parts(
                (start + block.bytes) as *const u8,
                end - start - block.bytes,
            )
        };
        if padding.iter().any(|&byte| byte != PADDING) {
            return Err(format!("{} bytes at {start:#x} were written past their end", block.bytes));
        }
        let first = (end - block.pages) as *mut c_void;
        // SAFETY: pages of this mapping, which are no longer in use.
        unsafe {
            madvise(first, block.pages, Advice::LinuxDontNeed).map_err(|e| e.to_string())?;
            mprotect(first, block.pages, MprotectFlags::empty()).map_err(|e| e.to_string())
        }
    }

    /// Whether one allocation holds all of these bytes.
    pub(crate) fn holds(&self, start: usize, bytes: usize) -> bool {
        let block = self.blocks.range(..=start).next_back();
        block.is_some_and(|(&first, block)| start + bytes <= first + block.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_and_misuse() {
        let mut memory = Memory::new(10_000);
        let a = memory.allocate(1000).unwrap();
        let b = memory.allocate(5000).unwrap();
        assert_eq!((a % ALIGN, b % ALIGN, memory.used), (0, 0, 6000));
        assert!(memory.holds(a, 1000) && !memory.holds(a, 1001) && memory.holds(b + 4000, 1000));
        assert_eq!(memory.allocate(4001), None);
        memory.give_back(a).unwrap();
        assert!(memory.holds(a, 1000) && memory.give_back(a).is_err());
        memory.free(a).unwrap();
        assert!(!memory.holds(a, 1) && memory.give_back(a).is_err());
        assert_eq!((memory.used, memory.peak), (5000, 6000));
        // SAFETY: the padding of a live allocation.
        unsafe { *((b + 5000) as *mut u8) = 0 };
        assert!(memory.free(b).unwrap_err().contains("past their end"));
        let none = memory.allocate(0).unwrap();
        memory.free(none).unwrap();
    }

    #[test]
    fn planned_allocation_fails() {
        let fails = Fails::parse("1:2:100");
        assert_eq!(fails.unwrap().device, 1);
        let mut memory = Memory::new(10_000).with_fails(fails);
        let allocated = [100, 99, 100, 100, 200].map(|bytes| memory.allocate(bytes).is_some());
        assert_eq!(allocated, [true, true, false, true, true]);
        let wrong = ["", "1:2", "1:0:8", "1:2:3:4", "a:1:1", "1:-1:1"];
        assert!(wrong.iter().all(|text| Fails::parse(text).is_none()));
    }
}
