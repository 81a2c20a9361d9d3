//! Element-wise loops over slices, on all threads.
#![allow(unsafe_code)] // memory that is not zeroed first: zeroing is a pass on one thread

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::vectorized;

/// Elements that a thread computes at a time.
const PIECE: usize = 16 * 1024;

/// Applies `f` to each element, in parallel.
pub fn map<A, B>(values: &[A], f: impl Fn(A) -> B + Copy + Sync) -> Vec<B>
where
    A: Copy + Sync,
    B: Copy + Send,
{
    let mut out = Vec::with_capacity(values.len());
    let room = &mut out.spare_capacity_mut()[..values.len()];
    let pieces = room.par_chunks_mut(PIECE).zip(values.par_chunks(PIECE));
    pieces.for_each(|(out, values)| write(out, values, f));
    // SAFETY: the pieces cover `room`, and `write` writes every element of a piece.
    unsafe { out.set_len(values.len()) };
    out
}

/// `out[i] = f(values[i])`, in parallel.
///
/// # Panics
/// If the lengths differ.
pub fn map_into<A, B>(out: &mut [B], values: &[A], f: impl Fn(A) -> B + Copy + Sync)
where
    A: Copy + Sync,
    B: Copy + Send,
{
    assert_eq!(out.len(), values.len(), "an output for each element");
    let pieces = out.par_chunks_mut(PIECE).zip(values.par_chunks(PIECE));
    pieces.for_each(|(out, values)| overwrite(out, values, f));
}

vectorized! {
    fn write[A: Copy, B, F: Fn(A) -> B](out: &mut [MaybeUninit<B>], values: &[A], f: F) {
        for (out, &value) in out.iter_mut().zip(values) {
            out.write(f(value));
        }
    }

    fn overwrite[A: Copy, B, F: Fn(A) -> B](out: &mut [B], values: &[A], f: F) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = f(value);
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
        let mut out = vec![0; values.len()];
        map_into(&mut out, &values, |x| u64::from(x) + 1);
        assert_eq!(out, expected);
        assert!(map::<u32, u32>(&[], |x| x).is_empty());
    }
}
