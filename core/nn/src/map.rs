//! Element-wise kernels with outputs in new memory that is not zeroed first.
#![allow(unsafe_code)] // memory that is not zeroed first: zeroing is a pass on one thread

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::host::Float;
use fulgurite_engine::simd::vectorized;

/// Elements that an element-wise kernel computes at a time.
const PIECE: usize = 16 * 1024;

/// `out[i] = f(a[i], b[i])`, in parallel; the inputs have the same length.
pub(super) fn map2<A: Copy + Sync, B: Copy + Send>(
    a: &[A],
    b: &[A],
    f: impl Fn(A, A) -> B + Copy + Sync,
) -> Vec<B> {
    assert_eq!(a.len(), b.len(), "inputs of one length");
    let mut out = Vec::with_capacity(a.len());
    let inputs = a.par_chunks(PIECE).zip(b.par_chunks(PIECE));
    let room = &mut out.spare_capacity_mut()[..a.len()];
    room.par_chunks_mut(PIECE).zip(inputs).for_each(|(out, (a, b))| write2(out, a, b, f));
    // SAFETY: the pieces make up `room`, each is as long as its piece of `a` and `b`, and `write2`
    // writes all of a piece.
    unsafe { out.set_len(a.len()) };
    out
}

/// Two elements from three. A trait rather than a closure, because the compiler may not inline a
/// long closure, and call it for each element. Mark the method `#[inline(always)]`.
pub(super) trait TwoOfThree<T>: Copy + Sync {
    fn of(self, a: T, b: T, c: T) -> (T, T);
}

/// Two outputs from three inputs of the same length, in parallel.
pub(super) fn map3_2<T: Copy + Send + Sync>(
    [a, b, c]: [&[T]; 3],
    f: impl TwoOfThree<T>,
) -> (Vec<T>, Vec<T>) {
    let n = a.len();
    assert!(b.len() == n && c.len() == n, "inputs of one length");
    let (mut left, mut right) = (Vec::with_capacity(n), Vec::with_capacity(n));
    let inputs = a.par_chunks(PIECE).zip(b.par_chunks(PIECE)).zip(c.par_chunks(PIECE));
    let left_room = &mut left.spare_capacity_mut()[..n];
    let right_room = &mut right.spare_capacity_mut()[..n];
    let outputs = left_room.par_chunks_mut(PIECE).zip(right_room.par_chunks_mut(PIECE));
    outputs.zip(inputs).for_each(|((left, right), ((a, b), c))| {
        write3_2(left, right, a, b, c, f);
    });
    // SAFETY: as in `map2`, for both outputs.
    unsafe {
        left.set_len(n);
        right.set_len(n);
    }
    (left, right)
}

/// Returns a vector of `len` elements in rows of `width`, written by `write` in parallel.
///
/// # Safety
/// `write` gets the index of the first row of some rows, and must write all elements of these rows.
pub(super) unsafe fn rows<T: Float>(
    len: usize,
    width: usize,
    rows_a_piece: usize,
    write: impl Fn(usize, &mut [MaybeUninit<T>]) + Sync,
) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    let room = &mut out.spare_capacity_mut()[..len];
    room.par_chunks_mut(rows_a_piece.saturating_mul(width).max(1))
        .enumerate()
        .for_each(|(i, rows)| write(i * rows_a_piece, rows));
    // SAFETY: the pieces make up `room`; the caller promises that they are written.
    unsafe { out.set_len(len) };
    out
}

vectorized! {
    fn write2[A: Copy, B, F: Fn(A, A) -> B](out: &mut [MaybeUninit<B>], a: &[A], b: &[A], f: F) {
        for (out, (&a, &b)) in out.iter_mut().zip(a.iter().zip(b)) {
            out.write(f(a, b));
        }
    }

    fn write3_2[T: Copy, F: TwoOfThree<T>](
        left: &mut [MaybeUninit<T>],
        right: &mut [MaybeUninit<T>],
        a: &[T],
        b: &[T],
        c: &[T],
        f: F,
    ) {
        let outputs = left.iter_mut().zip(right);
        for ((left, right), ((&a, &b), &c)) in outputs.zip(a.iter().zip(b).zip(c)) {
            let (x, y) = f.of(a, b, c);
            left.write(x);
            right.write(y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_written_across_pieces() {
        let n = 2 * PIECE + 3;
        let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
        assert!(map2(&a, &a, |x, y| x + y).iter().zip(&a).all(|(y, x)| *y == 2.0 * x));
        #[derive(Clone, Copy)]
        struct SumAndFirst;
        impl TwoOfThree<f32> for SumAndFirst {
            fn of(self, x: f32, y: f32, z: f32) -> (f32, f32) {
                (x + y + z, x)
            }
        }
        let (left, right) = map3_2([&a, &a, &a], SumAndFirst);
        assert!(left.iter().zip(&a).all(|(y, x)| *y == 3.0 * x) && right == a);
        // SAFETY: all elements are written.
        let rows = unsafe {
            rows(15, 3, 2, |first, rows| {
                for (i, x) in rows.iter_mut().enumerate() {
                    x.write((3 * first + i) as f64);
                }
            })
        };
        assert_eq!(rows, (0..15).map(f64::from).collect::<Vec<_>>());
    }
}
