//! Matrix products on slices, through the `gemm` crate that candle itself multiplies with.
#![allow(unsafe_code)] // the crate's one entry point takes raw pointers; bounds are checked here

use gemm::Parallelism;

use super::host::Float;

/// A row-major or transposed matrix in a slice.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A row-major matrix that fills the front of `data`.
    pub(super) fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transpose, without copying.
    pub(super) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// Who multiplies.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Threads {
    /// The calling thread.
    One,
    /// rayon's current pool.
    All,
}

/// `out = a b`, or `out += a b` if `add`; `out` is row-major.
///
/// # Panics
/// If a slice is too short for its shape or the shapes do not fit: callers have checked them.
pub(super) fn gemm<T: Float>(out: &mut [T], a: Mat<T>, b: Mat<T>, add: bool, threads: Threads) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner dimensions");
    assert!(out.len() >= m * n && a.data.len() >= m * k && b.data.len() >= k * n, "matrix bounds");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !add {
            out[..m * n].fill(T::ZERO);
        }
        return;
    }
    let parallelism = match (threads, candle_core::utils::get_num_threads()) {
        (Threads::One, _) | (_, 0 | 1) => Parallelism::None,
        (Threads::All, n) => Parallelism::Rayon(n),
    };
    // SAFETY: the assertion above bounds every element that the strides reach: `out` has m * n
    // elements row-major, and `a` and `b` are dense, row-major or transposed. `out` is borrowed
    // mutably, so it overlaps neither. `T` is f32 or f64, which the crate supports.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
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
    }
}
