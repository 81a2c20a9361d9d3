//! The layout in which instructions read their operands.
//!
//! An operand is split into strips of 32 rows (left) or columns (right), and a strip into blocks of
//! 32 elements of the inner dimension. A block has two tiles, a tile has 16 lines, and a line has
//! 16 pairs. A line of the left operand is a row. A line of the right operand is a pair of rows, in
//! 16 columns. Padding is 0.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use super::Kernel;
use crate::gemm::Mat;
use crate::parallel_for::parallel_for;
use fulgurite_engine::simd::vectorized;

/// Rows or columns of a tile, and pairs of its depth.
pub(super) const TILE: usize = 16;
/// Rows or columns of a strip.
pub(super) const STRIP: usize = 2 * TILE;
/// Elements of the inner dimension in a block.
pub(super) const DEPTH: usize = 2 * TILE;
/// Lines of a block.
pub(super) const BLOCK: usize = 2 * TILE;

/// Strips packed together if the matrix's rows run across them. More of a row is then read at once
/// than the 64 bytes of one strip.
const TOGETHER: usize = 8;

/// Sixteen pairs of bf16, the element with the lower index in the lower half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u32; TILE]);

impl Line {
    pub(super) const ZERO: Self = Self([0; TILE]);
}

pub(super) type Tile = [Line; TILE];

/// An operand: a matrix as vectors along the inner dimension.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    data: &'a [bf16],
    /// The number of vectors.
    count: usize,
    depth: usize,
    vector_stride: usize,
    depth_stride: usize,
    side: Side,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

/// An operand in the layout of the instructions.
pub(super) struct Packed {
    lines: Vec<Line>,
    /// Blocks per strip.
    blocks: usize,
    count: usize,
}

impl Packed {
    /// Returns the number of strips.
    pub(super) fn strips(&self) -> usize {
        self.count.div_ceil(STRIP)
    }

    /// Returns the number of blocks per strip.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of rows or columns in a strip.
    pub(super) fn size(&self, strip: usize) -> usize {
        (self.count - strip * STRIP).min(STRIP)
    }

    /// Returns the blocks of a strip from `block` on.
    pub(super) fn strip(&self, strip: usize, block: usize) -> &[Line] {
        let start = strip * self.blocks * BLOCK;
        &self.lines[start..][..self.blocks * BLOCK][block * BLOCK..]
    }
}

impl<'a> Operand<'a> {
    /// Memory for the packed operand.
    pub(super) fn empty(&self) -> Packed {
        let blocks = self.depth.div_ceil(DEPTH);
        let lines = Vec::with_capacity(self.count.div_ceil(STRIP) * blocks * BLOCK);
        Packed { lines, blocks, count: self.count }
    }

    pub(super) fn left(a: Mat<'a, bf16>) -> Self {
        Self {
            data: a.data,
            count: a.rows,
            depth: a.cols,
            vector_stride: a.row_stride,
            depth_stride: a.col_stride,
            side: Side::Left,
        }
    }

    pub(super) fn right(b: Mat<'a, bf16>) -> Self {
        Self {
            data: b.data,
            count: b.cols,
            depth: b.rows,
            vector_stride: b.col_stride,
            depth_stride: b.row_stride,
            side: Side::Right,
        }
    }
}

/// Packs operands of a product, on this number of threads.
pub(super) fn pack<K: Kernel, const N: usize>(
    kernel: K,
    operands: [Operand<'_>; N],
    threads: usize,
) -> [Packed; N] {
    let mut packed = operands.map(|operand| operand.empty());
    let groups = packed.each_ref().map(|packed| packed.strips().div_ceil(TOGETHER));
    let room = packed.each_mut().map(Room::new);
    let group = |i: usize| {
        let (mut which, mut i) = (0, i);
        while i >= groups[which] {
            i -= groups[which];
            which += 1;
        }
        // SAFETY: `packed` keeps the lines until all calls have returned, and no other call has
        // this group.
        let lines = unsafe { room[which].group(i) };
        pack_group(kernel, operands[which], i, lines);
    };
    let all = groups.iter().sum::<usize>();
    let parts = threads.min(all).max(1);
    match parts {
        1 => (0..all).for_each(group),
        _ => parallel_for(parts, |i| (all * i / parts..all * (i + 1) / parts).for_each(group)),
    }
    for packed in &mut packed {
        let len = packed.strips() * packed.blocks * BLOCK;
        // SAFETY: the groups cover all strips, and `pack_group` writes every line of a group.
        unsafe { packed.lines.set_len(len) }
    }
    packed
}

/// The memory of an operand's packed lines.
struct Room {
    lines: *mut MaybeUninit<Line>,
    strips: usize,
    lines_per_strip: usize,
}
// SAFETY: threads that share it write the lines of different groups.
unsafe impl Sync for Room {}

impl Room {
    fn new(packed: &mut Packed) -> Self {
        let (strips, lines_per_strip) = (packed.strips(), packed.blocks * BLOCK);
        let lines = &mut packed.lines.spare_capacity_mut()[..strips * lines_per_strip];
        Self { lines: lines.as_mut_ptr(), strips, lines_per_strip }
    }

    /// Returns the lines of a group of strips.
    ///
    /// # Safety
    /// The lines' memory must live as long as the result, and nothing else may use the group's
    /// lines meanwhile.
    #[allow(clippy::mut_from_ref)] // the caller's promise
    unsafe fn group(&self, group: usize) -> &mut [MaybeUninit<Line>] {
        let strips = strips_of(group, self.strips);
        let len = strips.len() * self.lines_per_strip;
        // SAFETY: the strips lie in the room, and the caller promises that no other reference to
        // them exists.
        unsafe {
            std::slice::from_raw_parts_mut(self.lines.add(strips.start * self.lines_per_strip), len)
        }
    }
}

/// Returns the strips of a group, of `strips` in all.
fn strips_of(group: usize, strips: usize) -> Range<usize> {
    (group * TOGETHER).min(strips)..((group + 1) * TOGETHER).min(strips)
}

vectorized! {
    /// Writes every line of a group of strips.
    fn pack_group[K: Kernel](
        kernel: K,
        operand: Operand<'_>,
        group: usize,
        lines: &mut [MaybeUninit<Line>],
    ) {
        let blocks = operand.depth.div_ceil(DEPTH);
        let strips = strips_of(group, operand.count.div_ceil(STRIP));
        let count = strips.len();
        assert_eq!(lines.len(), count * blocks * BLOCK, "the lines of the group");
        for i in 0..count * blocks {
            let (strip, block) = match operand.depth_stride {
                // Each vector is read from start to end.
                1 => (i / blocks, i % blocks),
                _ => (i % count, i / count),
            };
            for half in 0..2 {
                let vector = (strips.start + strip) * STRIP + half * TILE;
                let lines = &mut lines[(strip * blocks + block) * BLOCK + half * TILE..];
                let tile = lines.first_chunk_mut().expect("the lines of a tile");
                operand.write_tile(kernel, vector, block * DEPTH, tile);
            }
        }
    }
}

impl Operand<'_> {
    /// Writes the tile that starts at this vector and depth, every line of it.
    // Lines are written where they stay: a tile in a variable was copied several times.
    #[inline(always)]
    fn write_tile<K: Kernel>(
        &self,
        kernel: K,
        vector: usize,
        depth: usize,
        lines: &mut [MaybeUninit<Line>; TILE],
    ) {
        let vectors = self.count.saturating_sub(vector).min(TILE);
        let len = (self.depth - depth).min(DEPTH);
        let lines_are = match self.depth_stride {
            1 => {
                self.write_vectors(vector..vector + vectors, depth..depth + len, lines);
                Side::Left
            }
            _ => {
                self.write_pairs(vector..vector + vectors, depth..depth + len, lines);
                Side::Right
            }
        };
        if lines_are != self.side {
            // SAFETY: every line was written.
            kernel.transpose(unsafe { &mut *lines.as_mut_ptr().cast::<Tile>() });
        }
    }

    /// Writes lines with the pairs of one vector, which are adjacent in memory.
    #[inline(always)]
    fn write_vectors(
        &self,
        vectors: Range<usize>,
        depth: Range<usize>,
        lines: &mut [MaybeUninit<Line>],
    ) {
        let (used, padding) = lines.split_at_mut(vectors.len());
        for (vector, line) in vectors.zip(used) {
            let values = &self.data[vector * self.vector_stride + depth.start..][..depth.len()];
            if let Ok(values) = <&[bf16; DEPTH]>::try_from(values) {
                line.write(Line(bytemuck::cast(*values)));
            } else {
                let line = line.write(Line::ZERO);
                for (line, values) in line.0.iter_mut().zip(values.chunks(2)) {
                    *line = pair(values[0], values.get(1).copied().unwrap_or(bf16::ZERO));
                }
            }
        }
        padding.fill(MaybeUninit::new(Line::ZERO));
    }

    /// Writes lines with one pair of each vector; the vectors are adjacent in memory.
    #[inline(always)]
    fn write_pairs(
        &self,
        vectors: Range<usize>,
        depth: Range<usize>,
        lines: &mut [MaybeUninit<Line>],
    ) {
        let pairs = if vectors.is_empty() { 0 } else { depth.len().div_ceil(2) };
        let row =
            |depth: usize| &self.data[depth * self.depth_stride + vectors.start..][..vectors.len()];
        let (used, padding) = lines.split_at_mut(pairs);
        for (low, line) in depth.clone().step_by(2).zip(used) {
            let high = if low + 1 < depth.end {
                row(low + 1)
            } else {
                &[bf16::ZERO; TILE][..vectors.len()]
            };
            let low = row(low);
            if let (Ok(low), Ok(high)) =
                (<&[bf16; TILE]>::try_from(low), <&[bf16; TILE]>::try_from(high))
            {
                line.write(Line(std::array::from_fn(|i| pair(low[i], high[i]))));
            } else {
                let line = line.write(Line::ZERO);
                for (line, (&low, &high)) in line.0.iter_mut().zip(low.iter().zip(high)) {
                    *line = pair(low, high);
                }
            }
        }
        padding.fill(MaybeUninit::new(Line::ZERO));
    }
}

#[inline(always)]
fn pair(low: bf16, high: bf16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

#[cfg(test)]
mod tests {
    use super::super::model::{Model, Vdpbf16ps};
    use super::*;

    #[test]
    fn packed_lines_hold_rows_and_column_pairs() {
        let at = |i: usize, j: usize| bf16::from_bits((100 * i + j) as u16);
        for (rows, cols) in [(1, 1), (33, 70), (300, 32), (17, 5)] {
            let values: Vec<bf16> = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
            let turned: Vec<bf16> = (0..rows * cols).map(|i| at(i % rows, i / rows)).collect();
            for mat in [Mat::new(&values, rows, cols), Mat::new(&turned, cols, rows).t()] {
                let kernel = Model::<Vdpbf16ps>::default();
                let operands = [Operand::left(mat), Operand::right(mat.t())];
                let [left, right] = pack(kernel, operands, 3);
                assert_eq!(left.strips() * STRIP, rows.next_multiple_of(STRIP));
                for (i, k) in (0..left.strips() * STRIP)
                    .flat_map(|i| (0..left.blocks() * DEPTH).map(move |k| (i, k)))
                {
                    let expected = if i < rows && k < cols { at(i, k).to_bits() } else { 0 };
                    let half = |pair: u32| (pair >> (16 * (k % 2))) as u16;
                    let tile = i % STRIP / TILE * TILE;
                    let block = |packed: &Packed| packed.strip(i / STRIP, k / DEPTH).to_vec();
                    let line = block(&left)[tile + i % TILE];
                    assert_eq!(half(line.0[k % DEPTH / 2]), expected, "row {i}, depth {k}");
                    let line = block(&right)[tile + k % DEPTH / 2];
                    assert_eq!(half(line.0[i % TILE]), expected, "column {i}, depth {k}");
                }
            }
        }
    }
}
