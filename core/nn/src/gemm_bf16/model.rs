//! The instructions in scalar arithmetic, and products in their documented order.
//!
//! From Intel's manual of the instruction set, volume 2: `VDPBF16PS` and `TDPBF16PS`. A result
//! counts as denormal if, rounded with an unbounded exponent, it is below the least normal number.
//! The CPU's other instructions do the same.

use std::marker::PhantomData;

use half::bf16;

use super::pack::{BLOCK, DEPTH, Line, STRIP, TILE, Tile};
use super::{Kernel, Strip, Sums};
use crate::gemm::Mat;

fn without_denormal(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// Returns `a * b + c`, rounded once to nearest even, with denormals treated as 0 and flushed to 0.
pub(super) fn fma(a: f32, b: f32, c: f32) -> f32 {
    let [a, b, c] = [a, b, c].map(without_denormal);
    let sum = a.mul_add(b, c);
    if sum.abs() == f32::MIN_POSITIVE {
        // The sum may have been rounded up with a denormal's fewer digits. Here it is computed with
        // all digits. The smaller factor and `c` are both small enough for that.
        const SCALE: f32 = (1u64 << 63) as f32;
        let (small, large) = if a.abs() < b.abs() { (a, b) } else { (b, a) };
        let scaled = (small * SCALE).mul_add(large, c * SCALE);
        if scaled.abs() < f32::MIN_POSITIVE * SCALE {
            return 0f32.copysign(sum);
        }
    }
    without_denormal(sum)
}

/// Returns `a + b`, with denormals treated as 0 and flushed to 0.
fn add(a: f32, b: f32) -> f32 {
    without_denormal(without_denormal(a) + without_denormal(b))
}

/// An instruction, for one element of the result and a block of the inner dimension.
pub(super) trait Instruction: Copy + Default + Sync {
    fn block(sum: f32, a: &[bf16; DEPTH], b: &[bf16; DEPTH]) -> f32;
}

/// AVX512-BF16: sixteen instructions per block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Vdpbf16ps;

/// AMX: one instruction per block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tdpbf16ps;

impl Instruction for Vdpbf16ps {
    fn block(mut sum: f32, a: &[bf16; DEPTH], b: &[bf16; DEPTH]) -> f32 {
        for k in (0..DEPTH).step_by(2) {
            sum = fma(a[k + 1].to_f32(), b[k + 1].to_f32(), sum);
            sum = fma(a[k].to_f32(), b[k].to_f32(), sum);
        }
        sum
    }
}

impl Instruction for Tdpbf16ps {
    fn block(sum: f32, a: &[bf16; DEPTH], b: &[bf16; DEPTH]) -> f32 {
        let mut sums = [0f32; 2];
        for k in 0..DEPTH {
            sums[k % 2] = fma(a[k].to_f32(), b[k].to_f32(), sums[k % 2]);
        }
        add(sum, add(sums[0], sums[1]))
    }
}

/// Returns the sums of `a b`, row-major, in the instruction's documented order.
pub(super) fn definition<I: Instruction>(a: Mat<bf16>, b: Mat<bf16>) -> Vec<f32> {
    let mut out = Vec::with_capacity(a.rows * b.cols);
    for i in 0..a.rows {
        for j in 0..b.cols {
            let mut sum = 0.0;
            for start in (0..a.cols).step_by(DEPTH) {
                let (mut left, mut right) = ([bf16::ZERO; DEPTH], [bf16::ZERO; DEPTH]);
                for k in start..a.cols.min(start + DEPTH) {
                    left[k - start] = a.data[i * a.row_stride + k * a.col_stride];
                    right[k - start] = b.data[k * b.row_stride + j * b.col_stride];
                }
                sum = I::block(sum, &left, &right);
            }
            out.push(sum);
        }
    }
    out
}

/// A kernel that uses the model of an instruction.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Model<I>(PhantomData<fn() -> I>);

impl<I: Instruction> Kernel for Model<I> {
    type Session = ();

    const WORTH_A_THREAD: usize = 1 << 20;

    const FEW_ROWS: usize = 64;

    fn reads_rows(_: usize) -> bool {
        true
    }

    fn session(self) {}

    unsafe fn multiply(
        (): &(),
        sums: &mut Sums,
        a: Strip,
        b: *const Line,
        depth: usize,
        [rows, cols]: [usize; 2],
        starts: bool,
    ) {
        // SAFETY: the caller's promise.
        let b = unsafe { std::slice::from_raw_parts(b, depth * BLOCK) };
        let values = |pair: u32| [pair as u16, (pair >> 16) as u16].map(bf16::from_bits);
        let all = (0..STRIP * STRIP).map(|i| (i / STRIP, i % STRIP));
        for (row, col) in all.filter(|&(row, col)| row < rows && col < cols) {
            let sum = &mut sums.0[row / TILE * 2 + col / TILE][row % TILE * TILE + col % TILE];
            if starts {
                *sum = 0.0;
            }
            for (block, b) in b.chunks(BLOCK).enumerate() {
                let (mut left, mut right) = ([bf16::ZERO; DEPTH], [bf16::ZERO; DEPTH]);
                for pair in 0..TILE {
                    let at = 2 * pair..2 * pair + 2;
                    let in_a = row * a.row_stride + block * a.block_stride + pair;
                    // SAFETY: the caller's promise.
                    let left_pair = unsafe { a.start.add(in_a).read_unaligned() };
                    left[at.clone()].copy_from_slice(&values(left_pair));
                    let line = b[col / TILE * TILE + pair];
                    right[at].copy_from_slice(&values(line.0[col % TILE]));
                }
                *sum = I::block(*sum, &left, &right);
            }
        }
    }

    fn transpose(self, tile: &mut Tile) {
        let before = *tile;
        for (i, line) in tile.iter_mut().enumerate() {
            *line = Line(std::array::from_fn(|j| before[j].0[i]));
        }
    }
}
