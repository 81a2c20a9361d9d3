//! Stores the sums of a product, in f32 or bf16, written or added.

use bytemuck::Zeroable;
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

    /// Stores the sums of a strip of rows and a strip of columns, `size` of them, from this row and
    /// column on.
    ///
    /// # Safety
    /// The target must have these elements, initialised if they are added to, and nothing else may
    /// use them.
    pub(super) unsafe fn store(&self, sums: &Sums, start: [usize; 2], size: [usize; 2]) {
        let width = self.cols;
        match self.kind {
            TargetKind::F32 { out, add: false } => {
                store(Wide::<false>(out), width, sums, start, size);
            }
            TargetKind::F32 { out, add: true } => {
                store(Wide::<true>(out), width, sums, start, size);
            }
            TargetKind::Bf16 { out, bias } => {
                store(Rounded(out, bias), width, sums, start, size);
            }
            TargetKind::AddBf16 { out } => store(AddRounded(out), width, sums, start, size),
        }
    }
}

/// The way in which sums become elements.
trait Output: Copy {
    type Element: Zeroable + Copy;
    /// Whether elements depend on what they were.
    const ADDS: bool;

    /// The target's first element.
    fn start(self) -> *mut Self::Element;

    /// The elements for sums of a row, from column `col` on. `before` has what they were, if
    /// [`ADDS`](Self::ADDS).
    fn elements(
        self,
        sums: &Segment<f32>,
        before: &Segment<Self::Element>,
        col: usize,
    ) -> Segment<Self::Element>;
}

/// Consecutive values of a row. Arrays, because loops over slices with raw pointers were not
/// vectorised.
type Segment<T> = [T; TILE];

/// [`std::array::from_fn`], which is not always inlined.
#[inline(always)]
fn each<T: Zeroable + Copy>(element: impl Fn(usize) -> T) -> Segment<T> {
    let mut all = [T::zeroed(); TILE];
    for (i, to) in all.iter_mut().enumerate() {
        *to = element(i);
    }
    all
}

/// `out = sum`, or `out += sum` if `ADDS`.
#[derive(Clone, Copy)]
struct Wide<const ADDS: bool>(*mut f32);

impl<const ADDS: bool> Output for Wide<ADDS> {
    type Element = f32;
    const ADDS: bool = ADDS;

    #[inline(always)]
    fn start(self) -> *mut f32 {
        self.0
    }

    #[inline(always)]
    fn elements(self, sums: &Segment<f32>, before: &Segment<f32>, _: usize) -> Segment<f32> {
        if ADDS { each(|i| before[i] + sums[i]) } else { *sums }
    }
}

/// `out = sum + bias`, rounded once.
#[derive(Clone, Copy)]
struct Rounded<'a>(*mut bf16, Option<&'a [bf16]>);

impl Output for Rounded<'_> {
    type Element = bf16;
    const ADDS: bool = false;

    #[inline(always)]
    fn start(self) -> *mut bf16 {
        self.0
    }

    #[inline(always)]
    fn elements(self, sums: &Segment<f32>, _: &Segment<bf16>, col: usize) -> Segment<bf16> {
        let Some(bias) = self.1 else {
            return each(|i| bf16::narrow(sums[i]));
        };
        let bias = &bias[col..];
        let mut padded = [bf16::ZERO; TILE];
        let bias = bias.first_chunk().unwrap_or_else(|| {
            padded[..bias.len()].copy_from_slice(bias);
            &padded
        });
        each(|i| bf16::narrow(sums[i] + bias[i].widen()))
    }
}

/// `out += sum`, rounded once.
#[derive(Clone, Copy)]
struct AddRounded(*mut bf16);

impl Output for AddRounded {
    type Element = bf16;
    const ADDS: bool = true;

    #[inline(always)]
    fn start(self) -> *mut bf16 {
        self.0
    }

    #[inline(always)]
    fn elements(self, sums: &Segment<f32>, before: &Segment<bf16>, _: usize) -> Segment<bf16> {
        each(|i| bf16::narrow(before[i].widen() + sums[i]))
    }
}

/// Stores the first `len` sums of a segment. Its first element is `at` elements from the target's
/// start, in column `col`.
///
/// # Safety
/// As [`Target::store`], for these elements.
#[inline(always)]
unsafe fn store_segment<O: Output>(
    output: O,
    [at, col]: [usize; 2],
    sums: &Segment<f32>,
    len: usize,
) {
    // SAFETY: the caller's promise. What elements were is read only if they are initialised.
    unsafe {
        let out = output.start().add(at);
        if len == TILE {
            let out = out.cast::<Segment<O::Element>>();
            let before = if O::ADDS { out.read() } else { Zeroable::zeroed() };
            return out.write(output.elements(sums, &before, col));
        }
        let mut before = [O::Element::zeroed(); TILE];
        if O::ADDS {
            out.copy_to_nonoverlapping(before.as_mut_ptr(), len);
        }
        let elements = output.elements(sums, &before, col);
        out.copy_from_nonoverlapping(elements.as_ptr(), len);
    }
}

vectorized! {
    /// [`Target::store`], under its caller's promise. `width` is the length of a row.
    fn store[O: Output](
        output: O,
        width: usize,
        sums: &Sums,
        start: [usize; 2],
        size: [usize; 2],
    ) {
        let Sums(tiles) = sums;
        let ([first_row, first_col], [height, wide]) = (start, size);
        for row in 0..height {
            let at = [(first_row + row) * width + first_col, first_col];
            let of_tile = row / TILE * 2;
            let values = |half: usize| &tiles[of_tile + half].as_chunks().0[row % TILE];
            // SAFETY: the promise to `Target::store`. A whole segment has a length known at compile
            // time.
            unsafe {
                if wide == STRIP {
                    store_segment(output, at, values(0), TILE);
                    store_segment(output, at.map(|x| x + TILE), values(1), TILE);
                } else {
                    store_segment(output, at, values(0), wide.min(TILE));
                    if wide > TILE {
                        store_segment(output, at.map(|x| x + TILE), values(1), wide - TILE);
                    }
                }
            }
        }
    }
}
