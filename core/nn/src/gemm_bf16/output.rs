//! What becomes of the sums of a product: f32 or bf16, written or added.

use std::ops::Range;

use half::bf16;

use super::Sums;
use super::pack::{STRIP, TILE};
use fulgurite_engine::simd::vectorized;

/// The row-major matrix that a product goes to, of which each thread writes other elements.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    kind: TargetKind<'a>,
    /// The length of a row.
    cols: usize,
}
// SAFETY: threads that share it write disjoint elements.
unsafe impl Sync for Target<'_> {}

#[derive(Clone, Copy)]
pub(super) enum TargetKind<'a> {
    /// `out = sum`, or `out += sum` if `add`.
    F32 { out: *mut f32, add: bool },
    /// `out = sum + bias`, rounded once.
    Bf16 { out: *mut bf16, bias: Option<&'a [bf16]> },
    /// `out += sum`, rounded once.
    AddBf16 { out: *mut bf16 },
}

impl<'a> Target<'a> {
    pub(super) fn new(kind: TargetKind<'a>, cols: usize) -> Self {
        Self { kind, cols }
    }

    /// Stores the elements of the rows and columns. `sums` has those of the strips that these start
    /// and end in, a strip of rows after the other.
    ///
    /// # Safety
    /// The target has these elements, initialised if they are added to, and nobody else uses them.
    /// `rows` and `cols` start at a strip.
    pub(super) unsafe fn store(&self, sums: &[Sums], rows: Range<usize>, cols: Range<usize>) {
        store(*self, sums, rows, cols);
    }

    /// # Safety
    /// As [`store`](Self::store), for `values.len()` elements of a row from this one on.
    #[inline(always)]
    unsafe fn store_segment(&self, row: usize, col: usize, values: &[f32]) {
        let at = row * self.cols + col;
        match self.kind {
            TargetKind::F32 { out, add } => {
                // SAFETY: the caller's promise; a slice of initialised elements is made only where
                // they are added to.
                unsafe {
                    let out = out.add(at);
                    if add {
                        let out = std::slice::from_raw_parts_mut(out, values.len());
                        out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                    } else {
                        std::ptr::copy_nonoverlapping(values.as_ptr(), out, values.len());
                    }
                }
            }
            TargetKind::Bf16 { out, bias } => {
                let bias = bias.map(|bias| &bias[col..][..values.len()]);
                for (i, &value) in values.iter().enumerate() {
                    let value = bias.map_or(value, |bias| value + widened(bias[i]));
                    // SAFETY: the caller's promise.
                    unsafe { out.add(at + i).write(rounded(value)) }
                }
            }
            TargetKind::AddBf16 { out } => {
                // SAFETY: the caller's promise.
                let out = unsafe { std::slice::from_raw_parts_mut(out.add(at), values.len()) };
                for (out, &value) in out.iter_mut().zip(values) {
                    *out = rounded(widened(*out) + value);
                }
            }
        }
    }
}

vectorized! {
    /// [`Target::store`], whose caller has promised what it asks.
    fn store[](target: Target<'_>, sums: &[Sums], rows: Range<usize>, cols: Range<usize>) {
        let strips = cols.len().div_ceil(STRIP);
        for row in 0..rows.len() {
            for col in (0..cols.len()).step_by(TILE) {
                let sums = &sums[row / STRIP * strips + col / STRIP];
                let tile = &sums.0[row % STRIP / TILE * 2 + col % STRIP / TILE];
                let values = &tile[row % TILE * TILE..][..TILE];
                // SAFETY: the promise to `Target::store`. A whole segment has a length that the
                // compiler knows.
                unsafe {
                    if cols.len() - col >= TILE {
                        target.store_segment(rows.start + row, cols.start + col, values);
                    } else {
                        let values = &values[..cols.len() - col];
                        target.store_segment(rows.start + row, cols.start + col, values);
                    }
                }
            }
        }
    }
}

/// [`bf16::to_f32`], without a branch.
#[inline(always)]
fn widened(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// [`bf16::from_f32`], in arithmetic that the compiler vectorises.
#[inline(always)]
fn rounded(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_has_the_bits_of_half() {
        let ends = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        for high in 0..=u32::from(u16::MAX) {
            for low in ends {
                let x = f32::from_bits(high << 16 | low);
                assert_eq!(rounded(x).to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
            let x = bf16::from_bits(high as u16);
            assert!(x.is_nan() || widened(x).to_bits() == x.to_f32().to_bits(), "{x:e}");
        }
    }
}
