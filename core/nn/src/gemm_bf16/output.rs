//! Stores the sums of a product, in f32 or bf16, written or added.

use std::ops::Range;

use half::bf16;

use super::Sums;
use super::pack::{STRIP, TILE};
use fulgurite_engine::simd::{Half, vectorized};

/// The row-major result of a product. Threads write disjoint elements.
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

    /// Stores the elements of the rows and columns. `sums` covers the strips from the first to the
    /// last element, one strip of rows after the other.
    ///
    /// # Safety
    /// The target must have these elements, initialised if they are added to, and nothing else may
    /// use them. `rows` and `cols` must start at a strip.
    pub(super) unsafe fn store(&self, sums: &[Sums], rows: Range<usize>, cols: Range<usize>) {
        let width = self.cols;
        match self.kind {
            TargetKind::F32 { out, add: false } => store(Write(out), width, sums, rows, cols),
            TargetKind::F32 { out, add: true } => store(Add(out), width, sums, rows, cols),
            TargetKind::Bf16 { out, bias: None } => store(Round(out), width, sums, rows, cols),
            TargetKind::Bf16 { out, bias: Some(bias) } => {
                store(RoundWithBias(out, bias), width, sums, rows, cols);
            }
            TargetKind::AddBf16 { out } => store(AddRounded(out), width, sums, rows, cols),
        }
    }
}

/// The way in which a sum is stored.
trait Output: Copy {
    /// Stores consecutive elements of a row. The first is `at` elements from the target's start, in
    /// column `col`.
    ///
    /// # Safety
    /// As [`Target::store`], for these elements.
    unsafe fn store(self, at: usize, col: usize, values: &[f32]);
}

/// `out = sum`.
#[derive(Clone, Copy)]
struct Write(*mut f32);

impl Output for Write {
    #[inline(always)]
    unsafe fn store(self, at: usize, _: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0.add(at), values.len()) }
    }
}

/// `out += sum`.
#[derive(Clone, Copy)]
struct Add(*mut f32);

impl Output for Add {
    #[inline(always)]
    unsafe fn store(self, at: usize, _: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(self.0.add(at), values.len()) };
        out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
    }
}

/// `out = sum`, rounded.
#[derive(Clone, Copy)]
struct Round(*mut bf16);

impl Output for Round {
    #[inline(always)]
    unsafe fn store(self, at: usize, _: usize, values: &[f32]) {
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { self.0.add(at + i).write(bf16::narrow(value)) }
        }
    }
}

/// `out = sum + bias`, rounded once.
#[derive(Clone, Copy)]
struct RoundWithBias<'a>(*mut bf16, &'a [bf16]);

impl Output for RoundWithBias<'_> {
    #[inline(always)]
    unsafe fn store(self, at: usize, col: usize, values: &[f32]) {
        let bias = &self.1[col..][..values.len()];
        for (i, (&value, bias)) in values.iter().zip(bias).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { self.0.add(at + i).write(bf16::narrow(value + bias.widen())) }
        }
    }
}

/// `out += sum`, rounded once.
#[derive(Clone, Copy)]
struct AddRounded(*mut bf16);

impl Output for AddRounded {
    #[inline(always)]
    unsafe fn store(self, at: usize, _: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(self.0.add(at), values.len()) };
        for (out, &value) in out.iter_mut().zip(values) {
            *out = bf16::narrow(out.widen() + value);
        }
    }
}

vectorized! {
    /// [`Target::store`], under its caller's promise. `width` is the length of a row.
    fn store[O: Output](
        output: O,
        width: usize,
        sums: &[Sums],
        rows: Range<usize>,
        cols: Range<usize>,
    ) {
        let mut sums = sums.iter();
        for first_row in rows.clone().step_by(STRIP) {
            for first_col in cols.clone().step_by(STRIP) {
                let Sums(tiles) = sums.next().expect("sums of every strip");
                let (height, wide) =
                    (STRIP.min(rows.end - first_row), STRIP.min(cols.end - first_col));
                for row in 0..height {
                    let (of_tile, at) = (row / TILE * 2, (first_row + row) * width + first_col);
                    let values = |half: usize| &tiles[of_tile + half][row % TILE * TILE..][..TILE];
                    // SAFETY: the promise to `Target::store`. A whole segment has a length known at
                    // compile time.
                    unsafe {
                        if wide == STRIP {
                            output.store(at, first_col, values(0));
                            output.store(at + TILE, first_col + TILE, values(1));
                        } else {
                            output.store(at, first_col, &values(0)[..wide.min(TILE)]);
                            if wide > TILE {
                                let rest = &values(1)[..wide - TILE];
                                output.store(at + TILE, first_col + TILE, rest);
                            }
                        }
                    }
                }
            }
        }
    }
}
