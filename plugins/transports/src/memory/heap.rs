//! Memory of this process that the job's other processes can map, for tensors that collectives
//! access directly.
//!
//! It is one anonymous sparse file, as long as the machine's memory. A page takes memory from its
//! first use. A tensor owns its elements as a `Vec`, which the program's allocator frees. So this
//! memory is used only in programs whose allocator is a [`SharedMemory`], which recognises the
//! memory by its address.
#![allow(unsafe_code)] // an allocator, and memory that it hands out

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use candle_core::{DType, Device, Tensor};

use super::free_list::FreeList;

const PAGE: usize = 4096;

/// Whether the program's allocator is a [`SharedMemory`]: set by its first allocation.
static INSTALLED: AtomicBool = AtomicBool::new(false);
static BASE: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
/// Bytes from [`BASE`] on; 0 before the memory is mapped.
static LEN: AtomicUsize = AtomicUsize::new(0);
/// Number of ranks on this host. Each maps the memory of all.
static RANKS: AtomicUsize = AtomicUsize::new(2);
static FREE_PAGES: Mutex<Option<FreeList>> = Mutex::new(None);

/// An allocator that can also free memory which other ranks of the job have mapped.
///
/// With it the collectives of [`Shm`](crate::Shm) access each other's gradients, buckets and shards
/// directly. Without it they copy through a region. `A` handles other allocations.
///
/// `fulgurite::use_mimalloc!();` installs it. It must be the program's global allocator, as no
/// other allocator can free its memory. Freed shared memory is kept for the next tensor of a group,
/// and not returned to the system.
///
/// ```
/// use fulgurite_transports::SharedMemory;
///
/// #[global_allocator]
/// static ALLOCATOR: SharedMemory<std::alloc::System> = SharedMemory(std::alloc::System);
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct SharedMemory<A>(pub A);

/// Returns the offset of `address` in the shared memory, if it lies there.
fn offset(address: usize) -> Option<usize> {
    // The length first: when it is visible, the base is too.
    let len = LEN.load(Ordering::Acquire);
    let offset = address.wrapping_sub(BASE.load(Ordering::Relaxed).addr());
    (offset < len).then_some(offset)
}

fn free(offset: usize, layout: Layout) {
    // A panic elsewhere cannot leave the list inconsistent.
    let mut list = FREE_PAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(list) = list.as_mut() {
        list.put(offset / PAGE, layout.size().div_ceil(PAGE));
    }
}

// SAFETY: `A` is a global allocator. Shared memory is distinguished from the memory of `A` by its
// address. It is not handed out again before it is freed, and stays mapped as long as the process
// lives.
unsafe impl<A: GlobalAlloc> GlobalAlloc for SharedMemory<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: `A` needs the same promises as this method.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if !INSTALLED.load(Ordering::Relaxed) {
            INSTALLED.store(true, Ordering::Relaxed);
        }
        match offset(ptr.addr()) {
            Some(offset) => free(offset, layout),
            // SAFETY: not in the shared memory, so from `A`; the rest as in `alloc`.
            None => unsafe { self.0.dealloc(ptr, layout) },
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let Some(offset) = offset(ptr.addr()) else {
            // SAFETY: not in the shared memory, so from `A`; the rest as in `alloc`.
            return unsafe { self.0.realloc(ptr, layout, new_size) };
        };
        // SAFETY: the caller promises that `new_size` and the alignment make a valid, non-empty
        // layout.
        let new =
            unsafe { self.0.alloc(Layout::from_size_align_unchecked(new_size, layout.align())) };
        if !new.is_null() {
            // SAFETY: both are at least that long, and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(ptr, new, layout.size().min(new_size)) };
            free(offset, layout);
        }
        new
    }
}

/// A handle for other processes to map this one's shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedMemoryHandle {
    /// File descriptor, in this process.
    pub(crate) fd: u32,
    pub(crate) len: usize,
    /// The first word of the memory, which identifies it.
    pub(crate) nonce: u64,
}

/// Returns this process's shared memory, made by the first call, or `None` if it cannot be made.
pub(crate) fn share() -> Option<SharedMemoryHandle> {
    static SHARE: OnceLock<Option<SharedMemoryHandle>> = OnceLock::new();
    if !INSTALLED.load(Ordering::Relaxed) {
        return None;
    }
    *SHARE.get_or_init(|| match reserve() {
        Ok(share) => Some(share),
        Err(error) => {
            tracing::debug!("no memory that other ranks can map: {error}");
            None
        }
    })
}

#[cfg(not(target_os = "linux"))]
fn reserve() -> std::io::Result<SharedMemoryHandle> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(target_os = "linux")]
fn reserve() -> std::io::Result<SharedMemoryHandle> {
    use std::fs::File;
    use std::os::fd::IntoRawFd;

    use memmap2::MmapOptions;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    let len = length();
    if len < 2 * PAGE {
        return Err(std::io::ErrorKind::OutOfMemory.into());
    }
    let file = File::from(memfd_create(
        "fulgurite-tensors",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    ftruncate(&file, len as u64)?;
    fcntl_add_seals(&file, super::SEALS)?;
    let map = MmapOptions::new().len(len).map_raw(&file)?;
    keep_from_dumps(&map);
    let nonce = super::nonce();
    // SAFETY: a new mapping of at least a page, which nothing else accesses yet.
    unsafe { map.as_mut_ptr().cast::<u64>().write(nonce) };
    *FREE_PAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner) =
        Some(FreeList::new(1, len / PAGE - 1));
    BASE.store(map.as_mut_ptr(), Ordering::Relaxed);
    LEN.store(len, Ordering::Release);
    // Stays mapped, and open for other processes, as long as the process lives.
    std::mem::forget(map);
    Ok(SharedMemoryHandle { fd: file.into_raw_fd() as u32, len, nonce })
}

/// Sets the number of ranks on this host, before any memory is shared.
#[cfg(target_os = "linux")]
pub(crate) fn set_ranks(ranks: usize) {
    RANKS.store(ranks.max(2), Ordering::Relaxed);
}

/// Returns the bytes to reserve: the machine's memory, within the limits of the process.
#[cfg(target_os = "linux")]
fn length() -> usize {
    use rustix::process::{Resource, getrlimit};

    let info = rustix::system::sysinfo();
    let memory = info.totalram as u64 * u64::from(info.mem_unit);
    // Exceeding the file limit would end the process. Other code needs address space too.
    let file = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    let ranks = RANKS.load(Ordering::Relaxed);
    let left = |limit: u64| limit.saturating_sub(addresses_in_use());
    let addresses =
        getrlimit(Resource::As).current.map_or(u64::MAX, |limit| share_of(left(limit), ranks));
    memory.min(file).min(addresses) as usize / PAGE * PAGE
}

/// Returns each rank's share of the address space that is left. Every rank maps the memory of all
/// ranks, within a quarter of the space.
#[cfg(target_os = "linux")]
fn share_of(left: u64, ranks: usize) -> u64 {
    left / 4 / ranks as u64
}

/// Returns the address space in use by this process, in bytes.
#[cfg(target_os = "linux")]
fn addresses_in_use() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE as u64
}

/// Excludes a mapping from core dumps, which would allocate its pages.
#[cfg(target_os = "linux")]
pub(crate) fn keep_from_dumps(map: &memmap2::MmapRaw) {
    if let Err(error) = map.advise(memmap2::Advice::DontDump) {
        tracing::debug!("core dumps will have the shared memory in them: {error}");
    }
}

/// Makes a flat CPU tensor of arbitrary values in the shared memory, if it has room and supports
/// the dtype.
pub(crate) fn empty_tensor(
    elements: usize,
    dtype: DType,
) -> fulgurite_error::Result<Option<Tensor>> {
    macro_rules! empty {
        ($($dtype:ident: $ty:ty),*) => { match dtype {
            $(DType::$dtype => empty::<$ty>(elements)
                .map(|content| Tensor::from_vec(content, elements, &Device::Cpu)),)*
            _ => None,
        } };
    }
    let tensor = empty!(
        F32: f32, F64: f64, BF16: half::bf16, F16: half::f16, U8: u8, U32: u32, I32: i32, I64: i64
    );
    Ok(tensor.transpose()?)
}

/// Allocates `len` elements of arbitrary values in the shared memory, if it has room.
fn empty<T: bytemuck::Pod>(len: usize) -> Option<Vec<T>> {
    share()?;
    let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| bytes > 0)?;
    let page = {
        let mut list = FREE_PAGES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        list.as_mut()?.take(bytes.div_ceil(PAGE))?
    };
    // SAFETY: within the mapping, which contains all pages of the list.
    let start = unsafe { BASE.load(Ordering::Relaxed).add(page * PAGE) };
    fulgurite_engine::memory::adopt(bytes);
    // SAFETY: not in use until they are freed, and aligned to a page. Pages of a file are
    // initialised, and any bytes are valid for `Pod`. The program's allocator, a `SharedMemory`,
    // recognises the address when they are freed.
    Some(unsafe { Vec::from_raw_parts(start.cast::<T>(), len, len) })
}

/// Returns the offset of `bytes` in the shared memory, if they lie there.
pub(crate) fn offset_of(bytes: &[u8]) -> Option<usize> {
    offset(bytes.as_ptr().addr())
}

/// Returns the address of `len` bytes at an [offset](offset_of), if they are in the shared memory.
pub(crate) fn at(offset: usize, len: usize) -> Option<*mut u8> {
    let all = LEN.load(Ordering::Acquire);
    let end = offset.checked_add(len).filter(|&end| end <= all);
    end.map(|_| BASE.load(Ordering::Relaxed).wrapping_add(offset))
}

/// Returns the nonce of a mapping of another process's shared memory.
#[cfg(target_os = "linux")]
pub(crate) fn nonce_of(map: &memmap2::MmapRaw) -> Option<u64> {
    // SAFETY: aligned to a page and long enough; written once, before the mapping was shared.
    (map.len() >= PAGE).then(|| unsafe { map.as_ptr().cast::<u64>().read() })
}
