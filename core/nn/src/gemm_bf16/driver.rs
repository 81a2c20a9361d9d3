//! Splits a product into blocks, and into parts for threads.

use std::ops::Range;

use half::bf16;

use super::output::Target;
use super::pack::{BLOCK, DEPTH, Operand, Packed, STRIP, pack};
use super::{Kernel, Strip, Sums};
use crate::gemm::{Mat, Threads};
use crate::parallel_for::parallel_for;

/// Strips of rows and of columns whose sums are kept at a time. They take 256 KiB, which fits the
/// second-level cache together with a panel of the right operand.
const STRIPS: usize = 8;

/// Blocks of depth before the next strip of columns is multiplied. A strip of rows then stays in
/// the first-level cache, and the strips of columns (256 KiB) stay in the second.
const PANEL: usize = 16;

/// The cost of reading one strip, in products of two strips. Per strip of depth, both take the same
/// number of steps.
const READ_COST: usize = 1;

/// Computes `a b` into `target`.
///
/// # Safety
/// The target must have `a.rows * b.cols` elements, valid for writing, and initialised if they are
/// added to. Nothing else may use them. The inner dimensions must be equal.
pub(super) unsafe fn multiply<K: Kernel>(
    kernel: K,
    target: Target,
    a: Mat<bf16>,
    b: Mat<bf16>,
    threads: Threads,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    if m == 0 || n == 0 {
        return;
    }
    let multiplications = m.saturating_mul(n).saturating_mul(k);
    let threads = match threads {
        Threads::One => 1,
        Threads::All => {
            rayon::current_num_threads().min(multiplications / K::WORTH_A_THREAD).max(1)
        }
    };
    let Operands { left, right, rows, turned } = Operands::of::<K>(a, b);
    let (left, b) = match rows {
        Some(rows) => {
            let [b] = pack(kernel, [right], threads);
            (Left::Rows(rows), b)
        }
        None => {
            let [a, b] = pack(kernel, [left, right], threads);
            (Left::Packed(a), b)
        }
    };
    let (a, target) = (&left, Turned { target, turned });
    let [across, along] = grid(a.strips(), b.strips(), threads);
    let part = |i: usize| {
        let rows = share(a.strips(), across, i / along);
        let cols = share(b.strips(), along, i % along);
        // SAFETY: the caller's promise; the parts of the grid are disjoint.
        unsafe { multiply_part(kernel, target, a, &b, rows, cols) }
    };
    match across * along {
        1 => part(0),
        parts => parallel_for(parts, part),
    }
}

/// Takes the memory that [`multiply`] packs operands into, and frees it, for dry runs.
pub(super) fn hold_packed<K: Kernel>(a: Mat<bf16>, b: Mat<bf16>) {
    let Operands { left, right, rows, .. } = Operands::of::<K>(a, b);
    drop((right.empty(), rows.is_none().then(|| left.empty())));
}

/// The operands of the product that is computed.
struct Operands<'a> {
    left: Operand<'a>,
    right: Operand<'a>,
    /// The left operand, if it is read in place.
    rows: Option<Rows<'a>>,
    /// Whether it is the product's transpose.
    turned: bool,
}

impl<'a> Operands<'a> {
    /// If `a` has few rows, the transpose of `a b` is computed: the columns of `b` are then rows,
    /// which may be read in place. To pack them would take longer than the product.
    fn of<K: Kernel>(a: Mat<'a, bf16>, b: Mat<'a, bf16>) -> Self {
        // Each row is read once or twice, so it need not fit the first-level cache.
        if a.rows <= K::FEW_ROWS
            && let Some(rows) = Rows::whole(b.t())
        {
            let (left, right) = (Operand::left(b.t()), Operand::right(a.t()));
            return Self { left, right, rows: Some(rows), turned: true };
        }
        let rows = Rows::of::<K>(a);
        Self { left: Operand::left(a), right: Operand::right(b), rows, turned: false }
    }
}

/// A target, for a product or its transpose.
#[derive(Clone, Copy)]
struct Turned<'a> {
    target: Target<'a>,
    turned: bool,
}

impl Turned<'_> {
    /// Stores the first `size` sums of a strip of rows and a strip of columns.
    ///
    /// # Safety
    /// As [`Target::store`].
    unsafe fn store<K: Kernel>(
        &self,
        kernel: K,
        sums: &mut Sums,
        strips: [usize; 2],
        size: [usize; 2],
    ) {
        let ([row, col], [height, width]) = (strips.map(|strip| strip * STRIP), size);
        // SAFETY: the caller's promise.
        unsafe {
            if self.turned {
                sums.transpose(kernel);
                self.target.store(sums, [col, row], [width, height]);
            } else {
                self.target.store(sums, [row, col], [height, width]);
            }
        }
    }
}

/// The left operand.
enum Left<'a> {
    Packed(Packed),
    Rows(Rows<'a>),
}

/// Whole strips of rows with whole blocks, unpacked in memory.
#[derive(Clone, Copy)]
struct Rows<'a>(Mat<'a, bf16>);

impl<'a> Rows<'a> {
    /// Returns the rows of `a`, if the kernel can read them in place as often as it needs.
    fn of<K: Kernel>(a: Mat<'a, bf16>) -> Option<Self> {
        Self::whole(a).filter(|_| K::reads_rows(a.row_stride * size_of::<bf16>()))
    }

    /// Returns the rows of `a`, if they are whole strips of whole blocks.
    fn whole(a: Mat<'a, bf16>) -> Option<Self> {
        let is_whole = a.rows.is_multiple_of(STRIP)
            && a.cols.is_multiple_of(DEPTH)
            && a.col_stride == 1
            && a.row_stride.is_multiple_of(2);
        // The last row must end within the slice.
        let ends = |a: Mat<bf16>| (a.rows - 1) * a.row_stride + a.cols <= a.data.len();
        (is_whole && a.rows > 0 && ends(a)).then_some(Self(a))
    }
}

impl Left<'_> {
    fn strips(&self) -> usize {
        match self {
            Self::Packed(packed) => packed.strips(),
            Self::Rows(Rows(a)) => a.rows / STRIP,
        }
    }

    fn blocks(&self) -> usize {
        match self {
            Self::Packed(packed) => packed.blocks(),
            Self::Rows(Rows(a)) => a.cols / DEPTH,
        }
    }

    /// Returns the rows in a strip.
    fn size(&self, strip: usize) -> usize {
        match self {
            Self::Packed(packed) => packed.size(strip),
            Self::Rows(_) => STRIP,
        }
    }

    /// Returns the blocks of a strip from `block` on.
    fn strip(&self, strip: usize, block: usize) -> Strip {
        match self {
            Self::Packed(packed) => Strip::packed(packed.strip(strip, block)),
            Self::Rows(Rows(a)) => Strip {
                start: a.data[strip * STRIP * a.row_stride + block * DEPTH..].as_ptr().cast(),
                row_stride: a.row_stride / 2,
                block_stride: DEPTH / 2,
            },
        }
    }
}

/// Splits the strips of rows and of columns into parts. Returns the grid whose largest part
/// multiplies and reads least. Bits do not depend on it.
fn grid(rows: usize, cols: usize, threads: usize) -> [usize; 2] {
    let mut best = ([1, 1], usize::MAX);
    for across in 1..=threads.min(rows) {
        for along in 1..=(threads / across).min(cols) {
            let [rows, cols] = [rows.div_ceil(across), cols.div_ceil(along)];
            let takes = rows * cols + READ_COST * (rows + cols);
            if takes < best.1 {
                best = ([across, along], takes);
            }
        }
    }
    best.0
}

/// Returns the `i`-th of `parts` shares of `0..len`.
fn share(len: usize, parts: usize, i: usize) -> Range<usize> {
    len * i / parts..len * (i + 1) / parts
}

/// Computes the elements of these strips, on this thread.
///
/// # Safety
/// As [`multiply`], for the elements of the strips.
unsafe fn multiply_part<K: Kernel>(
    kernel: K,
    target: Turned,
    a: &Left,
    b: &Packed,
    rows: Range<usize>,
    cols: Range<usize>,
) {
    let session = kernel.session();
    let panels = a.blocks().div_ceil(PANEL).max(1);
    // Sums of one panel are stored before the next strip's.
    let kept = if panels == 1 { 1 } else { rows.len().min(STRIPS) * cols.len().min(STRIPS) };
    let mut sums = vec![Sums::ZERO; kept];
    for cols in pieces(&cols) {
        for rows in pieces(&rows) {
            for panel in 0..panels {
                let block = panel * PANEL;
                let depth = PANEL.min(a.blocks() - block);
                for (i, row) in rows.clone().enumerate() {
                    let left = a.strip(row, block);
                    for (j, col) in cols.clone().enumerate() {
                        let sums = &mut sums[(i * cols.len() + j) % kept];
                        let right = b.strip(col, block)[..depth * BLOCK].as_ptr();
                        let size = [a.size(row), b.size(col)];
                        // SAFETY: `depth` blocks of a strip of each operand. The caller's promise
                        // for the elements, and each is in one pair of strips.
                        unsafe {
                            K::multiply(&session, sums, left, right, depth, size, panel == 0);
                            if panel + 1 == panels {
                                target.store(kernel, sums, [row, col], size);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Returns the strips in pieces of at most [`STRIPS`].
fn pieces(strips: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = strips.end;
    strips.clone().step_by(STRIPS).map(move |start| start..end.min(start + STRIPS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_cover_everything() {
        for (rows, cols, threads) in [(1, 1, 8), (3, 7, 4), (40, 2, 16), (16, 16, 96)] {
            let [across, along] = grid(rows, cols, threads);
            assert!(across * along <= threads);
            for (len, parts) in [(rows, across), (cols, along)] {
                let all: Vec<usize> = (0..parts).flat_map(|i| share(len, parts, i)).collect();
                assert_eq!(all, (0..len).collect::<Vec<_>>());
                assert!((0..parts).all(|i| !share(len, parts, i).is_empty()));
                let pieces: Vec<usize> = pieces(&(3..3 + len)).flatten().collect();
                assert_eq!(pieces, (3..3 + len).collect::<Vec<_>>());
            }
        }
        assert_eq!(grid(16, 16, 16), [4, 4]);
        assert_eq!(grid(1, 100, 10), [1, 10]);
    }
}
