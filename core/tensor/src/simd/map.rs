//! Element-wise loops over slices, on all threads.
#![allow(unsafe_code)] // memory that is not zeroed first: zeroing is a pass on one thread

use std::mem::MaybeUninit;

use bytemuck::Zeroable;
use bytemuck::allocation::zeroed_vec;
use rayon::prelude::*;

use super::vectorized;
use crate::execution::dry_run::skips_pass;

/// Elements that a thread computes at a time.
const PIECE: usize = 16 * 1024;

/// Applies `f` to each element, in parallel.
pub fn map<A, B>(values: &[A], f: impl Fn(A) -> B + Copy + Sync) -> Vec<B>
where
    A: Copy + Sync,
    B: Copy + Send + Zeroable,
{
    if skips_pass(values.len() * (size_of::<A>() + size_of::<B>())) {
        return zeroed_vec(values.len());
    }
    let mut out = Vec::with_capacity(values.len());
    let room = &mut out.spare_capacity_mut()[..values.len()];
    each_piece(room, values, &|out, values| write(out, values, f));
    // SAFETY: the pieces cover `room`, and `write` writes every element of a piece.
    unsafe { out.set_len(values.len()) };
    out
}

/// Applies `f` to each pair of elements, in parallel.
///
/// # Panics
/// If the lengths differ.
pub fn map2<A, B>(a: &[A], b: &[A], f: impl Fn(A, A) -> B + Copy + Sync) -> Vec<B>
where
    A: Copy + Sync,
    B: Copy + Send + Zeroable,
{
    assert_eq!(a.len(), b.len(), "inputs of one length");
    if skips_pass(a.len() * (2 * size_of::<A>() + size_of::<B>())) {
        return zeroed_vec(a.len());
    }
    let mut out = Vec::with_capacity(a.len());
    let room = &mut out.spare_capacity_mut()[..a.len()];
    each_piece2(room, a, b, &|out, a, b| write2(out, a, b, f));
    // SAFETY: the pieces cover `room`, each is as long as its piece of `a` and of `b`, and `write2`
    // writes every element of a piece.
    unsafe { out.set_len(a.len()) };
    out
}

/// Computes two elements from three. A trait rather than a closure, because the compiler may leave
/// a long closure out of line, and call it for each element. Mark the method `#[inline(always)]`.
pub trait TwoOfThree<T>: Copy + Sync {
    /// Returns the two elements.
    fn of(self, a: T, b: T, c: T) -> (T, T);
}

/// Computes two outputs from three inputs, in parallel.
///
/// # Panics
/// If the lengths differ.
pub fn map3_2<T>([a, b, c]: [&[T]; 3], f: impl TwoOfThree<T>) -> (Vec<T>, Vec<T>)
where
    T: Copy + Send + Sync + Zeroable,
{
    let n = a.len();
    assert!(b.len() == n && c.len() == n, "inputs of one length");
    if skips_pass(5 * n * size_of::<T>()) {
        return (zeroed_vec(n), zeroed_vec(n));
    }
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

/// `out[i] = f(out[i], values[i])`, in parallel.
///
/// # Panics
/// If the lengths differ.
pub fn update<A, B>(out: &mut [B], values: &[A], f: impl Fn(B, A) -> B + Copy + Sync)
where
    A: Copy + Sync,
    B: Copy + Send,
{
    assert_eq!(out.len(), values.len(), "an output for each element");
    if skips_pass(values.len() * (size_of::<A>() + 2 * size_of::<B>())) {
        return;
    }
    each_piece(out, values, &|out, values| overwrite(out, values, f));
}

/// Calls `f` with the pieces of two slices of one length, in parallel. Compiled once for all
/// closures with these types.
fn each_piece<A: Sync, B: Send>(out: &mut [B], a: &[A], f: &(dyn Fn(&mut [B], &[A]) + Sync)) {
    let pieces = out.par_chunks_mut(PIECE).zip(a.par_chunks(PIECE));
    pieces.for_each(|(out, a)| f(out, a));
}

type OnPieces<'a, A, B> = dyn Fn(&mut [B], &[A], &[A]) + Sync + 'a;

/// [`each_piece`] of three slices.
fn each_piece2<A: Sync, B: Send>(out: &mut [B], a: &[A], b: &[A], f: &OnPieces<'_, A, B>) {
    let inputs = a.par_chunks(PIECE).zip(b.par_chunks(PIECE));
    out.par_chunks_mut(PIECE).zip(inputs).for_each(|(out, (a, b))| f(out, a, b));
}

vectorized! {
    fn write[A: Copy, B, F: Fn(A) -> B](out: &mut [MaybeUninit<B>], values: &[A], f: F) {
        for (out, &value) in out.iter_mut().zip(values) {
            out.write(f(value));
        }
    }

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

    fn overwrite[A: Copy, B: Copy, F: Fn(B, A) -> B](out: &mut [B], values: &[A], f: F) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = f(*out, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_written_across_pieces() {
        let values: Vec<u32> = (0..2 * PIECE as u32 + 3).collect();
        let expected: Vec<u64> = values.iter().map(|&x| u64::from(x) + 1).collect();
        assert_eq!(map(&values, |x| u64::from(x) + 1), expected);
        assert!(map::<u32, u32>(&[], |x| x).is_empty());
        let sums = map2(&values, &values, |x, y| x + y);
        assert!(sums.len() == values.len() && sums.iter().zip(&values).all(|(y, x)| *y == 2 * x));
        let mut out = vec![1; values.len()];
        update(&mut out, &values, |old, x| old + u64::from(x));
        assert_eq!(out, expected);
        #[derive(Clone, Copy)]
        struct SumAndFirst;
        impl TwoOfThree<u32> for SumAndFirst {
            fn of(self, x: u32, y: u32, z: u32) -> (u32, u32) {
                (x + y + z, x)
            }
        }
        let (left, right) = map3_2([&values, &values, &values], SumAndFirst);
        assert!(left.iter().zip(&values).all(|(y, x)| *y == 3 * x));
        assert_eq!((left.len(), &right), (values.len(), &values));
    }
}
