//! Element-wise reductions over the ranks, in rank order.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use candle_core::DType;
use fulgurite_core::collective::ReduceOp;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::{Arch, Simd, WithSimd};

/// Elements that are reduced over all ranks at a time, few enough for the L1 cache.
const BLOCK: usize = 2048;

/// Reduces `sources`, one of each rank in rank order, into `out`.
///
/// All have the same length, a whole number of elements of `dtype`, and its alignment. Integers
/// wrap around. bf16 and f16 are accumulated in f32 and rounded once. Does nothing for unsupported
/// dtypes, which `check::tensor` has refused.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, sources: &[&[u8]], out: &mut [u8]) {
    Arch::new().dispatch(Reduction { dtype, op, sources, out });
}

/// The arguments of [`reduce`], whose loops are compiled for the CPU that runs them.
struct Reduction<'a> {
    dtype: DType,
    op: ReduceOp,
    sources: &'a [&'a [u8]],
    out: &'a mut [u8],
}

impl WithSimd for Reduction<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { dtype, op, sources, out } = self;
        match dtype {
            DType::F32 => native::<f32>(op, sources, out),
            DType::F64 => native::<f64>(op, sources, out),
            DType::U8 => native::<u8>(op, sources, out),
            DType::U32 => native::<u32>(op, sources, out),
            DType::I32 => native::<i32>(op, sources, out),
            DType::I64 => native::<i64>(op, sources, out),
            DType::BF16 => halves::<bf16>(op, sources, out),
            DType::F16 => halves::<f16>(op, sources, out),
            _ => debug_assert!(false, "a dtype that `check::tensor` lets through is missing here"),
        }
    }
}

trait Number: Pod {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn reduce_min(self, other: Self) -> Self;
    fn reduce_max(self, other: Self) -> Self;
}

macro_rules! floats {
    ($($ty:ty),*) => { $(impl Number for $ty {
        #[inline(always)]
        fn sum(self, other: Self) -> Self { self + other }
        #[inline(always)]
        fn product(self, other: Self) -> Self { self * other }
        #[inline(always)]
        fn reduce_min(self, other: Self) -> Self {
            if self.is_nan() || self < other { self } else { other }
        }
        #[inline(always)]
        fn reduce_max(self, other: Self) -> Self {
            if self.is_nan() || self > other { self } else { other }
        }
    })* };
}

macro_rules! integers {
    ($($ty:ty),*) => { $(impl Number for $ty {
        #[inline(always)]
        fn sum(self, other: Self) -> Self { self.wrapping_add(other) }
        #[inline(always)]
        fn product(self, other: Self) -> Self { self.wrapping_mul(other) }
        #[inline(always)]
        fn reduce_min(self, other: Self) -> Self { self.min(other) }
        #[inline(always)]
        fn reduce_max(self, other: Self) -> Self { self.max(other) }
    })* };
}

floats!(f32, f64);
integers!(u8, u32, i32, i64);

#[inline(always)]
fn native<T: Number>(op: ReduceOp, sources: &[&[u8]], out: &mut [u8]) {
    match op {
        ReduceOp::Sum => native_with::<T>(sources, out, T::sum),
        ReduceOp::Product => native_with::<T>(sources, out, T::product),
        ReduceOp::Min => native_with::<T>(sources, out, T::reduce_min),
        ReduceOp::Max => native_with::<T>(sources, out, T::reduce_max),
    }
}

#[inline(always)]
fn native_with<T: Number>(sources: &[&[u8]], out: &mut [u8], f: impl Fn(T, T) -> T) {
    let out: &mut [T] = cast_slice_mut(out);
    let of = |i: usize| -> &[T] { cast_slice(sources[i]) };
    if sources.len() == 1 {
        out.copy_from_slice(of(0));
        return;
    }
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let range = block * BLOCK..block * BLOCK + out.len();
        let (first, second) = (&of(0)[range.clone()], &of(1)[range.clone()]);
        for ((out, &a), &b) in out.iter_mut().zip(first).zip(second) {
            *out = f(a, b);
        }
        for i in 2..sources.len() {
            for (out, &b) in out.iter_mut().zip(&of(i)[range.clone()]) {
                *out = f(*out, b);
            }
        }
    }
}

trait Half: Pod {
    fn to_f32(from: &[Self], to: &mut [f32]);
    fn from_f32(from: &[f32], to: &mut [Self]);
}

impl Half for f16 {
    #[inline(always)]
    fn to_f32(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    #[inline(always)]
    fn from_f32(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// bf16 is the upper half of f32. Branch-free, so that loops are vectorised. The
/// conversions of the `half` crate are not vectorised, and took more than half of an all-reduce's
/// time.
impl Half for bf16 {
    #[inline(always)]
    fn to_f32(from: &[Self], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn from_f32(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            // To nearest, ties to even. A NaN is made quiet, since rounding could make it infinite.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet = bits >> 16 | 0x40;
            *to = Self::from_bits(if from.is_nan() { quiet } else { rounded } as u16);
        }
    }
}

#[inline(always)]
fn halves<T: Half>(op: ReduceOp, sources: &[&[u8]], out: &mut [u8]) {
    match op {
        ReduceOp::Sum => halves_with::<T>(sources, out, f32::sum),
        ReduceOp::Product => halves_with::<T>(sources, out, f32::product),
        ReduceOp::Min => halves_with::<T>(sources, out, f32::reduce_min),
        ReduceOp::Max => halves_with::<T>(sources, out, f32::reduce_max),
    }
}

#[inline(always)]
fn halves_with<T: Half>(sources: &[&[u8]], out: &mut [u8], f: impl Fn(f32, f32) -> f32) {
    let mut sum = [0f32; BLOCK];
    let mut wide = [0f32; BLOCK];
    let out: &mut [T] = cast_slice_mut(out);
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let range = block * BLOCK..block * BLOCK + out.len();
        let (sum, wide) = (&mut sum[..out.len()], &mut wide[..out.len()]);
        T::to_f32(&cast_slice(sources[0])[range.clone()], sum);
        for source in &sources[1..] {
            T::to_f32(&cast_slice(source)[range.clone()], wide);
            for (a, &b) in sum.iter_mut().zip(wide.iter()) {
                *a = f(*a, b);
            }
        }
        T::from_f32(sum, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The result is the left fold of each column, regardless of blocks.
        #[test]
        fn is_a_left_fold(ranks in 1usize..6, n in 0usize..5000, seed in any::<u32>()) {
            let value = |r: usize, i: usize| ((i as u32 ^ seed).wrapping_mul(2654435761) >> (r % 7)) as f32;
            let rows: Vec<Vec<f32>> = (0..ranks).map(|r| (0..n).map(|i| value(r, i)).collect()).collect();
            let sources: Vec<&[u8]> = rows.iter().map(|row| cast_slice(row)).collect();
            let mut out = vec![0f32; n];
            reduce(DType::F32, ReduceOp::Sum, &sources, cast_slice_mut(&mut out));
            for i in 0..n {
                let mut expected = rows[0][i];
                rows[1..].iter().for_each(|row| expected += row[i]);
                prop_assert_eq!(out[i].to_bits(), expected.to_bits());
            }
        }
    }

    proptest! {
        #[test]
        fn bf16_rounds_like_half(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let mut from_f32 = [bf16::ZERO];
            Half::from_f32(&[x], &mut from_f32);
            prop_assert_eq!(from_f32[0].to_bits(), bf16::from_f32(x).to_bits());
            let mut wide = [0f32];
            Half::to_f32(&from_f32, &mut wide);
            prop_assert!(wide[0].to_bits() == from_f32[0].to_f32().to_bits());
        }
    }

    #[test]
    fn bf16_ties_and_extremes_round_like_half() {
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(high << 16 | low);
                let mut from_f32 = [bf16::ZERO];
                Half::from_f32(&[x], &mut from_f32);
                assert_eq!(from_f32[0].to_bits(), bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn halves_round_once() {
        // 256 + 1 + 1 = 258 in f32; in bf16 (8 bits) each 1 would be lost on its own.
        let rows = [256.0, 1.0, 1.0].map(|x| [bf16::from_f32(x)]);
        let sources: Vec<&[u8]> = rows.iter().map(|row| cast_slice(row)).collect();
        let mut out = [bf16::ZERO];
        reduce(DType::BF16, ReduceOp::Sum, &sources, cast_slice_mut(&mut out));
        assert_eq!(out[0].to_f32(), 258.0);
    }
}
