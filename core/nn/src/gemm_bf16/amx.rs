//! AMX: `tdpbf16ps` on tiles of 16 x 16 sums.
//!
//! The instructions are in inline assembly, because Rust has no stable functions for them.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::marker::PhantomData;

use super::pack::{BLOCK, Line, TILE, Tile};
use super::{Kernel, Strip, Sums, avx512};

/// A CPU with AMX for bf16, which the system lets this process use, and with AVX-512. The existence
/// of a value proves both.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amx(());

impl Amx {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f") && cpu_has_it() && system_allows_it();
        found.then_some(Self(()))
    }
}

/// Whether the CPU has tiles and their bf16 product, and the system saves them.
fn cpu_has_it() -> bool {
    const OS_SAVES_STATES: u32 = 1 << 27; // OSXSAVE, of leaf 1
    const AMX: u32 = 1 << 22 | 1 << 24; // bf16 and tiles, of leaf 7
    const TILE_STATES: u64 = 0b11 << 17; // their configuration and their data, in XCR0

    #[target_feature(enable = "xsave")]
    fn saved_states() -> u64 {
        // SAFETY: register 0 exists if the system saves states.
        unsafe { _xgetbv(0) }
    }
    #[allow(unused_unsafe)] // safe in later versions of Rust
    // SAFETY: every 64-bit CPU has `cpuid`, and `xgetbv` if the bit of leaf 1 says so.
    unsafe {
        __get_cpuid_max(0).0 >= 7
            && __cpuid_count(1, 0).ecx & OS_SAVES_STATES != 0
            && __cpuid_count(7, 0).edx & AMX == AMX
            && saved_states() & TILE_STATES == TILE_STATES
    }
}

/// Asks the system to allow tiles in this process, including all its threads.
#[cfg(target_os = "linux")]
fn system_allows_it() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers. A system that does not know it returns an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn system_allows_it() -> bool {
    false
}

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of 16 rows of 64 bytes.
static CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_per_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// This thread's tiles, configured until it is dropped.
pub(super) struct Tiles(PhantomData<*mut ()>); // not for other threads

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a value exists only if the CPU has tiles. Nothing else uses them.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}

impl Kernel for Amx {
    type Session = Tiles;

    // On two threads 2^22 multiplications took longer than on one, and 2^24 three fifths to four
    // fifths of the time.
    const WORTH_A_THREAD: usize = 1 << 23;

    // Two strips: each row of the other operand is read once or twice.
    const FEW_ROWS: usize = 64;

    // Rows at a multiple of half a page from each other share a few sets of the first-level cache.
    // A strip of them does not fit, and a product was a quarter slower.
    fn reads_rows(row_bytes: usize) -> bool {
        !row_bytes.is_multiple_of(2048)
    }

    fn session(self) -> Tiles {
        // SAFETY: `self` proves that there are tiles and that the process may use them. The
        // configuration is of palette 1, which every CPU with tiles supports.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags));
        }
        Tiles(PhantomData)
    }

    unsafe fn multiply(
        _: &Tiles,
        sums: &mut Sums,
        a: Strip,
        b: *const Line,
        depth: usize,
        [rows, cols]: [usize; 2],
        starts: bool,
    ) {
        if depth == 0 {
            if starts {
                *sums = Sums::ZERO;
            }
            return;
        }
        if rows > TILE && cols > TILE {
            // SAFETY: the session has configured the tiles; `a` and `b` have `depth` blocks.
            return unsafe { multiply_four(sums, a, b, depth, starts) };
        }
        for (row, col) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            if rows > row * TILE && cols > col * TILE {
                let sums = &mut sums.0[2 * row + col];
                // SAFETY: as above, from one of the block's two tiles on.
                unsafe {
                    let a = Strip { start: a.start.add(row * TILE * a.row_stride), ..a };
                    multiply_one(sums, a, b.add(col * TILE), depth, starts);
                }
            }
        }
    }

    fn transpose(self, tile: &mut Tile) {
        // SAFETY: `self` proves that the CPU has AVX-512.
        unsafe { avx512::transpose(tile) }
    }
}

/// Bytes per row of a tile, in memory and in the tile.
const ROW: usize = size_of::<Line>();

/// Bytes of a pair.
const PAIR: usize = size_of::<u32>();

/// Adds to all four tiles, or to 0 if it `starts` the sums.
///
/// # Safety
/// This thread's tiles must be configured. `a` and `b` must have `depth` blocks, at least one.
unsafe fn multiply_four(sums: &mut Sums, a: Strip, b: *const Line, depth: usize, starts: bool) {
    // SAFETY: the caller's promise. The assembly reads blocks, and reads and writes all of `sums`.
    unsafe {
        asm!(
            "test {starts:e}, {starts:e}",
            "jz 3f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 2f",
            "3:",
            "tileloadd tmm0, [{sums} + {row}]",
            "tileloadd tmm1, [{sums} + {row} + {TILE_BYTES}]",
            "tileloadd tmm2, [{sums} + {row} + 2 * {TILE_BYTES}]",
            "tileloadd tmm3, [{sums} + {row} + 3 * {TILE_BYTES}]",
            "2:",
            "tileloadd tmm4, [{upper} + {a_row}]",
            "tileloaddt1 tmm6, [{b} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm7, [{b} + {row} + {TILE_BYTES}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{lower} + {a_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {upper}, {a_block}",
            "add {lower}, {a_block}",
            "add {b}, {BLOCK_BYTES}",
            "dec {depth}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            "tilestored [{sums} + {row} + {TILE_BYTES}], tmm1",
            "tilestored [{sums} + {row} + 2 * {TILE_BYTES}], tmm2",
            "tilestored [{sums} + {row} + 3 * {TILE_BYTES}], tmm3",
            starts = in(reg) u32::from(starts),
            sums = in(reg) sums.0.as_mut_ptr(),
            row = in(reg) ROW,
            upper = inout(reg) a.start => _,
            lower = inout(reg) a.start.add(TILE * a.row_stride) => _,
            a_row = in(reg) a.row_stride * PAIR,
            a_block = in(reg) a.block_stride * PAIR,
            b = inout(reg) b => _,
            depth = inout(reg) depth => _,
            TILE_BYTES = const TILE * ROW,
            BLOCK_BYTES = const BLOCK * ROW,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Adds to one tile, or to 0 if it `starts` the sums.
///
/// # Safety
/// As [`multiply_four`]; `a` and `b` start at the used tile of the first block.
unsafe fn multiply_one(
    sums: &mut [f32; TILE * TILE],
    a: Strip,
    b: *const Line,
    depth: usize,
    starts: bool,
) {
    // SAFETY: the caller's promise. The assembly reads one tile of each block, and reads and writes
    // all of `sums`.
    unsafe {
        asm!(
            "test {starts:e}, {starts:e}",
            "jz 3f",
            "tilezero tmm0",
            "jmp 2f",
            "3:",
            "tileloadd tmm0, [{sums} + {row}]",
            "2:",
            "tileloadd tmm1, [{a} + {a_row}]",
            "tileloadd tmm2, [{b} + {row}]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "add {a}, {a_block}",
            "add {b}, {BLOCK_BYTES}",
            "dec {depth}",
            "jnz 2b",
            "tilestored [{sums} + {row}], tmm0",
            starts = in(reg) u32::from(starts),
            sums = in(reg) sums.as_mut_ptr(),
            row = in(reg) ROW,
            a = inout(reg) a.start => _,
            a_row = in(reg) a.row_stride * PAIR,
            a_block = in(reg) a.block_stride * PAIR,
            b = inout(reg) b => _,
            depth = inout(reg) depth => _,
            BLOCK_BYTES = const BLOCK * ROW,
            out("tmm0") _, out("tmm1") _, out("tmm2") _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the configuration of this thread's tiles, all 0 if they are released.
    fn configuration() -> [u8; 64] {
        let mut bytes = [0; 64];
        // SAFETY: the caller has detected tiles; the instruction writes 64 bytes.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) bytes.as_mut_ptr(), options(nostack, preserves_flags));
        }
        bytes
    }

    #[test]
    fn a_panic_releases_the_tiles() {
        let Some(amx) = Amx::detect() else {
            return eprintln!("skipped: this CPU has no AMX, or the system does not allow it");
        };
        assert_eq!(configuration(), [0; 64]);
        let panicked = std::panic::catch_unwind(|| {
            let _session = amx.session();
            assert_eq!(configuration()[0], 1, "configured");
            panic!("in a part");
        });
        assert!(panicked.is_err());
        assert_eq!(configuration(), [0; 64]);
    }
}
