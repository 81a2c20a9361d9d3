//! Matrix products on slices, by the `gemm` crate, which candle uses too.
//!
//! ```
//! use fulgurite_core::nn::gemm::{Mat, Threads, gemm};
//!
//! let (a, b) = ([1f32, 2., 3., 4.], [1f32, 0., 0., 1.]);
//! let mut out = [10f32; 4];
//! gemm(&mut out, Mat::new(&a, 2, 2).t(), Mat::new(&b, 2, 2), true, Threads::One);
//! assert_eq!(out, [11., 13., 12., 14.]);
//! ```
#![allow(unsafe_code)] // the crate's one entry point takes raw pointers; bounds are checked here

use std::ops::Range;

use gemm::Parallelism;
use half::bf16;

use super::gemm_bf16::Bf16Gemm;
use super::host::Float;
use super::parallel_for::parallel_for;
use fulgurite_engine::execution::dry_run::skips_products;

/// A view of a slice as a matrix, row-major or transposed.
#[derive(Debug, Clone, Copy)]
pub struct Mat<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A row-major matrix over the first elements of `data`.
    ///
    /// # Panics
    /// If `data` has fewer than `rows * cols` elements.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        let fits = rows.checked_mul(cols).is_some_and(|len| len <= data.len());
        assert!(fits, "a {rows} x {cols} matrix in a slice of {} elements", data.len());
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// Returns a matrix of the same shape and layout over other elements.
    fn with_data<U>(self, data: &[U]) -> Mat<'_, U> {
        let Self { rows, cols, row_stride, col_stride, .. } = self;
        Mat { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, without copying.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// The threads that compute a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// The calling thread.
    One,
    /// rayon's current pool.
    All,
}

/// `out = a b`, or `out += a b` if `add`; `out` is row-major.
///
/// # Panics
/// If `out` is too short for the product, or the inner dimensions differ.
pub fn gemm<T: Float>(out: &mut [T], a: Mat<T>, b: Mat<T>, add: bool, threads: Threads) {
    let size = checked_size(a, b);
    let out = &mut out[..size];
    if a.cols == 0 {
        if !add {
            out.fill(T::ZERO);
        }
    } else if size > 0 && !skips_products([a.rows, a.cols, b.cols], 1, T::DTYPE) {
        // SAFETY: `out` has that many elements, initialised.
        unsafe { multiply(out.as_mut_ptr(), a, b, add, threads) }
    }
}

/// [`gemm()`] of bf16 matrices, with sums in f32. It uses the CPU's bf16 instructions if
/// [available](super::bf16_products); otherwise it converts the operands to f32.
///
/// # Panics
/// As [`gemm()`].
pub fn gemm_bf16(out: &mut [f32], a: Mat<bf16>, b: Mat<bf16>, add: bool, threads: Threads) {
    if let Some(products) = Bf16Gemm::available() {
        return products.gemm(out, a, b, add, threads);
    }
    let [a_values, b_values] =
        [a.data, b.data].map(|data| data.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
    gemm(out, a.with_data(&a_values), b.with_data(&b_values), add, threads);
}

/// Returns `a b` of bf16 matrices, row-major, as [`gemm_bf16`] computes it and rounded once.
///
/// # Panics
/// As [`gemm()`].
pub fn product_bf16(a: Mat<bf16>, b: Mat<bf16>, threads: Threads) -> Vec<bf16> {
    if let Some(products) = Bf16Gemm::available() {
        return products.product(a, b, None, threads);
    }
    let mut out = vec![0.0; checked_size(a, b)];
    gemm_bf16(&mut out, a, b, false, threads);
    out.into_iter().map(bf16::from_f32).collect()
}

/// Returns `a b`, row-major, in new memory that is not zeroed first.
///
/// # Panics
/// As [`gemm()`].
pub fn product<T: Float>(a: Mat<T>, b: Mat<T>, threads: Threads) -> Vec<T> {
    let size = checked_size(a, b);
    if a.cols == 0 || size == 0 || skips_products([a.rows, a.cols, b.cols], 1, T::DTYPE) {
        return vec![T::ZERO; size];
    }
    let mut out = Vec::with_capacity(size);
    // SAFETY: there is room for that many elements; without `add` all are written and none is read.
    unsafe {
        multiply(out.as_mut_ptr(), a, b, false, threads);
        out.set_len(size);
    }
    out
}

/// Returns the number of elements of `a b`. Panics unless the inner dimensions are equal.
fn checked_size<T>(a: Mat<T>, b: Mat<T>) -> usize {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    a.rows.checked_mul(b.cols).expect("a product has no more elements than memory")
}

/// # Safety
/// `out` must be valid for writing `a.rows * b.cols` elements, initialised if `add`, and nothing
/// else may use them. [`checked_size`] must have passed, and no dimension may be 0.
unsafe fn multiply<T: Float>(out: *mut T, a: Mat<T>, b: Mat<T>, add: bool, threads: Threads) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let [across, along] = match threads {
        Threads::One => [1, 1],
        Threads::All => grid([m, k, n], cols_unit::<T>(), rayon::current_num_threads()),
    };
    if across * along == 1 {
        // SAFETY: the caller's promise, for the whole product.
        return unsafe { multiply_part(out, 0..m, 0..n, a, b, add) };
    }
    let (out, unit) = (Out(out), cols_unit::<T>());
    parallel_for(across * along, |i| {
        let rows = share(m, ROWS, across, i / along);
        let cols = share(n, unit, along, i % along);
        // SAFETY: the caller's promise; the parts of the grid share no element.
        unsafe { multiply_part(out.pointer(), rows, cols, a, b, add) }
    });
}

/// The elements of a product. Threads write disjoint elements.
struct Out<T>(*mut T);
// SAFETY: threads that share it write disjoint elements.
unsafe impl<T: Float> Sync for Out<T> {}

impl<T> Out<T> {
    fn pointer(&self) -> *mut T {
        self.0
    }
}

/// Rows of a part are multiples of this: the `gemm` crate's kernels compute six at a time.
const ROWS: usize = 12;

/// Columns of a part are a multiple of this many bytes, so that the `gemm` crate's kernels fill
/// their tiles: four vectors of AVX-512, or two of AVX.
fn tile_bytes() -> usize {
    match instructions() {
        "AVX-512" => 256,
        _ => 128,
    }
}

/// Returns the vector instructions for f32 and f64 products on this CPU. The bits of products
/// depend on them, because each instruction set sums in its own order.
pub fn instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        // The order of the `gemm` crate's choice.
        if is_x86_feature_detected!("avx512f") {
            "AVX-512"
        } else if is_x86_feature_detected!("fma") {
            "AVX2"
        } else {
            "none"
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        if cfg!(target_arch = "aarch64") { "NEON" } else { "none" }
    }
}

/// Multiplications that justify another thread.
const WORTH_A_THREAD: usize = 1 << 18;

/// The `gemm` crate sums products of up to this many rows and columns in another order than larger
/// ones.
const SMALL: usize = 64;

/// The crate also sums products of up to this many elements in another order.
const FEW: usize = 256;

/// The cost of reading one element, in multiplications: a measured order of magnitude.
const READ_COST: usize = 16;

/// Splits the rows and the columns of an `m` x `k` by `k` x `n` product into parts, for at most
/// `threads` threads. Returns the grid whose largest part multiplies and reads least. Parts have
/// multiples of `unit` columns.
///
/// Results do not depend on the number of threads, because each part is summed in the order of the
/// whole product. Products that the `gemm` crate sums in another order ([`SMALL`], [`FEW`]) are
/// neither split nor the result of a split.
fn grid([m, k, n]: [usize; 3], unit: usize, threads: usize) -> [usize; 2] {
    let most = threads.min(m.saturating_mul(n).saturating_mul(k) / WORTH_A_THREAD);
    let takes = |rows: usize, cols: usize| rows.saturating_mul(cols) + READ_COST * (rows + cols);
    let mut best = ([1, 1], takes(m, n));
    if k <= 2 {
        return best.0;
    }
    for across in 1..=most {
        for along in 1..=most / across {
            let [rows, cols] = [smallest_share(m, ROWS, across), smallest_share(n, unit, along)];
            let alike = rows.min(cols) > 1
                && rows.saturating_mul(cols) > FEW
                && (m.max(n) <= SMALL || rows.max(cols) > SMALL);
            let takes = takes(largest_share(m, ROWS, across), largest_share(n, unit, along));
            if alike && takes < best.1 {
                best = ([across, along], takes);
            }
        }
    }
    best.0
}

/// The number of columns in [`tile_bytes`].
fn cols_unit<T>() -> usize {
    tile_bytes() / size_of::<T>()
}

/// Returns the `i`-th of `parts` shares of `0..len`. Shares begin at multiples of `unit`.
fn share(len: usize, unit: usize, parts: usize, i: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    let at = |i: usize| (units * i / parts * unit).min(len);
    at(i)..at(i + 1)
}

/// The length of the first share, which has the fewest units.
fn smallest_share(len: usize, unit: usize, parts: usize) -> usize {
    share(len, unit, parts, 0).len().min(share(len, unit, parts, parts - 1).len())
}

/// An upper bound of the length of the last share, which has the most units.
fn largest_share(len: usize, unit: usize, parts: usize) -> usize {
    len.min(len.div_ceil(unit).div_ceil(parts) * unit)
}

/// Computes the part of `out` in these rows and columns, on this thread.
///
/// # Safety
/// As [`multiply`], for the elements of the part.
unsafe fn multiply_part<T: Float>(
    out: *mut T,
    rows: Range<usize>,
    cols: Range<usize>,
    a: Mat<T>,
    b: Mat<T>,
    add: bool,
) {
    let ld = b.cols;
    // SAFETY: the part lies within `out`, `a` and `b`, whose strides reach no element outside.
    // `out` is row-major; `a` and `b` are dense, row-major or transposed, and their slices are long
    // enough. `out` overlaps neither, because nothing else uses it. `T` is f32 or f64, which the
    // crate supports.
    unsafe {
        gemm::gemm(
            rows.len(),
            cols.len(),
            a.cols,
            out.add(rows.start * ld + cols.start),
            1,
            ld as isize,
            add,
            a.data.as_ptr().add(rows.start * a.row_stride),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr().add(cols.start * b.col_stride),
            b.col_stride as isize,
            b.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::iter::repeat;

    use super::*;

    #[test]
    fn transposes_and_accumulates() {
        let a = [1f64, 2., 3., 4., 5., 6.]; // 2 x 3
        let b = [1f64, 0., 2., 0., 1., 1.]; // 2 x 3
        let mut out = [0f64; 4];
        gemm(&mut out, Mat::new(&a, 2, 3), Mat::new(&b, 2, 3).t(), false, Threads::One);
        assert_eq!(out, [7., 5., 16., 11.]);
        gemm(&mut out, Mat::new(&a, 2, 3), Mat::new(&b, 2, 3).t(), true, Threads::All);
        assert_eq!(out, [14., 10., 32., 22.]);
        let mut out = [9f64; 9];
        gemm(&mut out, Mat::new(&a, 2, 3).t(), Mat::new(&b, 2, 3), false, Threads::One);
        assert_eq!(out, [1., 4., 6., 2., 5., 9., 3., 6., 12.]);
        gemm(&mut out, Mat::new(&[], 3, 0), Mat::new(&[], 0, 3), false, Threads::One);
        assert_eq!(out, [0.; 9]);
        let fresh = product(Mat::new(&a, 2, 3).t(), Mat::new(&b, 2, 3), Threads::All);
        assert_eq!(fresh, [1., 4., 6., 2., 5., 9., 3., 6., 12.]);
        assert_eq!(product::<f64>(Mat::new(&[], 2, 0), Mat::new(&[], 0, 2), Threads::One), [0.; 4]);
    }

    #[test]
    fn bf16_matrices_have_sums_in_f32() {
        let values = |n: usize| (0..n).map(|i| bf16::from_f32((i % 7) as f32 - 3.0));
        let (a, b): (Vec<_>, Vec<_>) = (values(5 * 300).collect(), values(300 * 3).collect());
        let mut out = [0.5f32; 15];
        gemm_bf16(&mut out, Mat::new(&a, 300, 5).t(), Mat::new(&b, 300, 3), true, Threads::All);
        let rounded = product_bf16(Mat::new(&a, 300, 5).t(), Mat::new(&b, 300, 3), Threads::All);
        for (i, found) in out.into_iter().enumerate() {
            // Whole numbers, which f32 adds exactly and bf16 does not.
            let product = |k: usize| a[k * 5 + i / 3].to_f32() * b[k * 3 + i % 3].to_f32();
            let sum = (0..300).map(product).sum::<f32>();
            assert_eq!(found, 0.5 + sum);
            assert_eq!(rounded[i], bf16::from_f32(sum));
        }
    }

    #[test]
    #[should_panic(expected = "matrix in a slice of 4 elements")]
    fn overflowing_shapes_are_refused() {
        // With wrapping multiplication, the size would be 0.
        Mat::new(&[0f32; 4], 1 << (usize::BITS - 1), 2);
    }

    #[test]
    #[should_panic(expected = "no more elements than memory")]
    fn overflowing_products_are_refused() {
        let (a, b) = (Mat::new(&[], 1 << (usize::BITS - 1), 0), Mat::new(&[], 0, 2));
        gemm::<f32>(&mut [], a, b, false, Threads::One);
    }

    fn threads_change_no_bit<T: Float>() {
        let value = |i: usize| T::from_f64(((i * 7919) % 1013) as f64 / 511. - 1.);
        let data: Vec<T> = (0..1_000_000).map(value).collect();
        let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
        let pools = [2, 3, 4, 5, 12].map(pool);
        let shapes = [
            [[64, 256, 100], [97, 256, 97], [32, 768, 128]],
            [[512, 96, 48], [385, 619, 234], [20, 300, 801]],
            [[1, 1000, 1000], [1000, 1000, 1], [2, 1000, 900]],
            [[97, 700, 65], [130, 1000, 64], [73, 600, 67]],
            [[3, 1000, 1000], [64, 5000, 64], [48, 5000, 40]],
        ];
        for [m, k, n] in shapes.into_iter().flatten() {
            for transposed in [[false, false], [false, true], [true, false], [true, true]] {
                let mat = |rows, cols, transposed| match transposed {
                    true => Mat::new(&data, cols, rows).t(),
                    false => Mat::new(&data, rows, cols),
                };
                let (a, b) = (mat(m, k, transposed[0]), mat(k, n, transposed[1]));
                let run = |threads| {
                    let mut out = data[..m * n].to_vec();
                    gemm(&mut out, a, b, true, threads);
                    (product(a, b, threads), out)
                };
                let one = run(Threads::One);
                for pool in &pools {
                    let all = pool.install(|| run(Threads::All));
                    let threads = pool.current_num_threads();
                    assert!(one == all, "{m} x {k} x {n}, {transposed:?}, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn more_threads_cut_into_no_larger_parts() {
        let shapes = [[512, 768, 64], [1024, 4096, 16], [64, 768, 768], [32, 2048, 2048]];
        let more = [[256, 1024, 256], [128, 65536, 128], [3, 4096, 4096], [64, 65536, 64]];
        let sizes = || shapes.into_iter().chain(more);
        for ([m, k, n], unit) in sizes().zip(repeat(32)).chain(sizes().zip(repeat(64))) {
            let largest = |threads| {
                let [across, along] = grid([m, k, n], unit, threads);
                assert!(across * along <= threads);
                for (len, unit, parts) in [(m, ROWS, across), (n, unit, along)] {
                    let shares: Vec<_> = (0..parts).map(|i| share(len, unit, parts, i)).collect();
                    let lens = || shares.iter().map(Range::len);
                    assert_eq!(lens().sum::<usize>(), len);
                    assert_eq!(lens().min().unwrap(), smallest_share(len, unit, parts));
                    assert!(lens().max().unwrap() <= largest_share(len, unit, parts));
                }
                let [rows, cols] = [largest_share(m, ROWS, across), largest_share(n, unit, along)];
                rows * cols + READ_COST * (rows + cols)
            };
            assert!(largest(2) < largest(1), "{m} x {k} x {n} is cut for two threads");
            for threads in 2..64 {
                assert!(largest(threads) <= largest(threads - 1), "{m} x {k} x {n}, {threads}");
            }
        }
    }

    #[test]
    fn threads_change_no_bit_of_f32() {
        threads_change_no_bit::<f32>();
    }

    #[test]
    fn threads_change_no_bit_of_f64() {
        threads_change_no_bit::<f64>();
    }
}
