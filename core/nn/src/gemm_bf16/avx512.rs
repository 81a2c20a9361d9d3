//! AVX512-BF16: `vdpbf16ps` on registers.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::pack::{BLOCK, Line, TILE, Tile};
use super::{Kernel, Strip, Sums};

/// Rows whose sums are in registers at a time. 8 rows of two tiles of columns take 16 of the 32
/// registers, more than the instruction's latency needs.
const ROWS: usize = 8;

/// A CPU with AVX512-BF16. The existence of a value proves it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        found.then_some(Self(()))
    }
}

impl Kernel for Avx512 {
    type Session = Self;

    // Not measured: four times as many as in f32.
    const WORTH_A_THREAD: usize = 1 << 20;

    const FEW_ROWS: usize = 0; // not measured

    fn reads_rows(_: usize) -> bool {
        true
    }

    fn session(self) -> Self {
        self
    }

    unsafe fn multiply(
        _: &Self,
        sums: &mut Sums,
        a: Strip,
        b: *const Line,
        depth: usize,
        [rows, cols]: [usize; 2],
        starts: bool,
    ) {
        for first in (0..rows).step_by(ROWS) {
            let [left, right] = sums.tiles(first / TILE);
            let at = first % TILE * TILE;
            let (left, right) = (&mut left[at..][..ROWS * TILE], &mut right[at..][..ROWS * TILE]);
            // SAFETY: `self` proves that the CPU has the instructions. `a` and `b` have `depth`
            // blocks, and the rows are in a block.
            unsafe {
                let a = Strip { start: a.start.add(first * a.row_stride), ..a };
                if cols > TILE {
                    multiply_rows([left, right], a, b, depth, starts);
                } else {
                    multiply_rows([left], a, b, depth, starts);
                }
            }
        }
    }

    fn transpose(self, tile: &mut Tile) {
        // SAFETY: `self` proves that the CPU has AVX-512.
        unsafe { transpose(tile) }
    }
}

impl Sums {
    /// Returns the two tiles of a row of tiles.
    fn tiles(&mut self, row: usize) -> [&mut [f32; TILE * TILE]; 2] {
        let [a, b, c, d] = &mut self.0;
        if row == 0 { [a, b] } else { [c, d] }
    }
}

/// Adds to [`ROWS`] rows of some tiles, or to 0 if it `starts` the sums.
///
/// # Safety
/// `a` must start at the first of the rows, and `b` must point to a strip of the right operand,
/// both with `depth` blocks. `sums` must have [`ROWS`] rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_rows<const TILES: usize>(
    mut sums: [&mut [f32]; TILES],
    a: Strip,
    mut b: *const Line,
    depth: usize,
    starts: bool,
) {
    let mut registers = [[_mm512_setzero_ps(); TILES]; ROWS];
    if !starts {
        for (row, registers) in registers.iter_mut().enumerate() {
            for (register, sums) in registers.iter_mut().zip(&sums) {
                let sums = &sums[row * TILE..][..TILE];
                // SAFETY: a slice of 16 elements.
                *register = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
            }
        }
    }
    let rows: [*const u32; ROWS] =
        std::array::from_fn(|row| a.start.wrapping_add(row * a.row_stride));
    for block in 0..depth {
        let at = block * a.block_stride;
        for pair in 0..TILE {
            // SAFETY: the line of these pairs in each tile of the right operand's block, and the
            // pair of each row in the left operand's tile. A line has 64 bytes and is aligned.
            unsafe {
                let cols: [__m512bh; TILES] = std::array::from_fn(|tile| {
                    let line = _mm512_load_si512(b.add(tile * TILE + pair).cast());
                    transmute::<__m512i, __m512bh>(line)
                });
                for (row, registers) in registers.iter_mut().enumerate() {
                    let pairs = rows[row].add(at + pair).cast::<i32>().read_unaligned();
                    let pairs = _mm512_set1_epi32(pairs);
                    let pairs = transmute::<__m512i, __m512bh>(pairs);
                    for (register, &cols) in registers.iter_mut().zip(&cols) {
                        *register = _mm512_dpbf16_ps(*register, pairs, cols);
                    }
                }
            }
        }
        b = b.wrapping_add(BLOCK);
    }
    for (row, registers) in registers.iter().enumerate() {
        for (&register, sums) in registers.iter().zip(&mut sums) {
            let sums = &mut sums[row * TILE..][..TILE];
            // SAFETY: a slice of 16 elements.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), register) }
        }
    }
}

/// Transposes a tile of pairs.
#[target_feature(enable = "avx512f")]
pub(super) fn transpose(tile: &mut Tile) {
    // SAFETY: lines are 64 bytes of plain data, as registers are.
    let rows: [__m512i; TILE] = unsafe { transmute(*tile) };
    // In each 128-bit lane: pairs of rows interleaved, then fours of them.
    let mut twos = rows;
    for i in (0..TILE).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut fours = twos;
    for i in (0..TILE).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    // Lane `l` of `fours[4 g + c]` has column `4 l + c` of the rows from `4 g` on.
    let mut columns = fours;
    for c in 0..4 {
        let [a, b, c2, d] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
        let even = [_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(c2, d, 0x88)];
        let odd = [_mm512_shuffle_i32x4(a, b, 0xdd), _mm512_shuffle_i32x4(c2, d, 0xdd)];
        columns[c] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        columns[4 + c] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        columns[8 + c] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        columns[12 + c] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
    // SAFETY: as above.
    *tile = unsafe { transmute::<[__m512i; TILE], Tile>(columns) };
}
