//! CPU tensors as slices, and the arithmetic of CPU kernels.

use std::ops::Deref;

use candle_core::{DType, Device, Storage, Tensor};
use half::{bf16, f16};

use crate::{Error, Result};
use fulgurite_engine::autograd::storage::HostElement;
use fulgurite_engine::execution::{read, transfer};
use fulgurite_engine::simd::{Half, vectorized};

/// Evaluates `$body` with `$T` as the Rust type of a dtype for kernel arithmetic.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::Error::other(format!(
                "layers compute in bf16, f16, f32 and f64; got {other:?}"
            ))),
        }
    };
}
pub(super) use with_float;

/// Evaluates `$body` with `$E` as the Rust type of a dtype that kernels read and write.
macro_rules! with_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $E = half::f16;
                $body
            }
            dtype => $crate::host::with_float!(dtype, $E => $body),
        }
    };
}
pub(super) use with_element;

/// A float that CPU kernels compute in.
#[allow(missing_docs)] // sealed: only its implementers' names are seen outside
pub trait Float: HostElement + Default + std::iter::Sum {
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    /// The exponential. Not called `exp`, because the standard library's method would win for a
    /// known type.
    fn fast_exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn erf(self) -> Self;
    fn tanh(self) -> Self;
    /// The maximum. Unlike the standard library's `max`, it returns a NaN in `self` and ignores one
    /// in `other`.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (Self::ZERO - self).fast_exp())
    }
}

impl Float for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = f32::INFINITY;

    /// Within 2 units in the last place, zero below -87.3 and infinite above 88.3. Without branches
    /// and calls, so loops over it are vectorised, unlike loops over the standard library's `exp`.
    #[inline(always)]
    fn fast_exp(self) -> Self {
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
        let x = self.clamp(-87.3, 88.3);
        let shifted = x * std::f32::consts::LOG2_E + MAGIC;
        let n = shifted - MAGIC;
        let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
        let mut p = 1.987_569_1e-4;
        p = p * r + 1.398_199_9e-3;
        p = p * r + 8.333_452e-3;
        p = p * r + 4.166_579_6e-2;
        p = p * r + 1.666_666_5e-1;
        p = p * r + 0.5;
        let y = p * r * r + r + 1.0;
        let exponent = (shifted.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
        let scale = f32::from_bits((exponent.wrapping_add(127) << 23) as u32);
        let y = if self < -87.3 { 0.0 } else { y * scale };
        if self > 88.3 { f32::INFINITY } else { y }
    }
    fn ln(self) -> Self {
        f32::ln(self)
    }
    fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    fn erf(self) -> Self {
        candle_core::cpu::erf::erf_f32(self)
    }

    /// Within 3 units in the last place. Near zero the difference from one has no digits left, so a
    /// polynomial goes on from there (coefficients of Cephes' `tanhf`).
    #[inline(always)]
    fn tanh(self) -> Self {
        let far = 1.0 - 2.0 / ((self + self).fast_exp() + 1.0);
        let square = self * self;
        let mut p = -5.704_988_7e-3;
        p = p * square + 2.063_909e-2;
        p = p * square - 5.373_971_6e-2;
        p = p * square + 1.333_144_2e-1;
        p = p * square - 3.333_328e-1;
        let near = p * square * self + self;
        if square < 0.390_625 { near } else { far }
    }
}

impl Float for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = f64::INFINITY;
    fn fast_exp(self) -> Self {
        f64::exp(self)
    }
    fn ln(self) -> Self {
        f64::ln(self)
    }
    fn sqrt(self) -> Self {
        f64::sqrt(self)
    }
    fn erf(self) -> Self {
        candle_core::cpu::erf::erf_f64(self)
    }
    fn tanh(self) -> Self {
        f64::tanh(self)
    }
}

/// A float that CPU kernels read and write; arithmetic is in [`Wide`](Self::Wide).
pub(crate) trait Element: HostElement {
    /// The type of the arithmetic.
    type Wide: Float;
    fn widen(self) -> Self::Wide;
    /// Rounds to nearest even. Not called `round`, which is a method of f32 that rounds to
    /// integers.
    fn narrow(x: Self::Wide) -> Self;
    /// The same elements, if arithmetic is in this type.
    #[inline(always)]
    fn as_wide(elements: &[Self]) -> Option<&[Self::Wide]> {
        let _ = elements;
        None
    }
}

macro_rules! elements {
    ($($T:ty: $Wide:ty, $x:ident => $widen:expr, $round:expr $(, $as_wide:expr)?;)*) => {$(
        impl Element for $T {
            type Wide = $Wide;
            #[inline(always)]
            fn widen(self) -> $Wide {
                let $x = self;
                $widen
            }
            #[inline(always)]
            fn narrow($x: $Wide) -> Self {
                $round
            }
            $(
                #[inline(always)]
                fn as_wide(elements: &[Self]) -> Option<&[$Wide]> {
                    ($as_wide)(elements)
                }
            )?
        }
    )*};
}

elements! {
    f32: f32, x => x, x, Some;
    f64: f64, x => x, x, Some;
    bf16: f32, x => Half::widen(x), Half::narrow(x);
    f16: f32, x => Half::widen(x), Half::narrow(x);
}

const LANES: usize = 8;

/// The sum of `f` over two slices of one length, in eight independent lanes.
#[inline(always)]
pub(super) fn sum2<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    // Values are computed in a separate loop, because a loop with both `f` and the lanes is not
    // vectorised.
    const BLOCK: usize = 8 * LANES;
    let mut values = [T::ZERO; BLOCK];
    let mut lanes = [T::ZERO; LANES];
    let mut tail = T::ZERO;
    for (a, b) in a.chunks(BLOCK).zip(b.chunks(BLOCK)) {
        let values = &mut values[..a.len()];
        for (value, (&a, &b)) in values.iter_mut().zip(a.iter().zip(b)) {
            *value = f(a, b);
        }
        let whole = values.chunks_exact(LANES);
        // Only the last block can have a remainder.
        whole.remainder().iter().for_each(|&value| tail += value);
        for chunk in whole {
            for i in 0..LANES {
                lanes[i] += chunk[i];
            }
        }
    }
    lanes.into_iter().sum::<T>() + tail
}

/// The sum of `f` over a slice.
#[inline(always)]
pub(super) fn sum1<T: Float>(a: &[T], f: impl Fn(T) -> T) -> T {
    sum2(a, a, |a, _| f(a))
}

/// The dot product.
#[inline(always)]
pub(super) fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    sum2(a, b, |a, b| a * b)
}

/// The largest element; minus infinity for an empty slice.
#[inline(always)]
pub(super) fn max<T: Float>(a: &[T]) -> T {
    let lowest = T::ZERO - T::INFINITY;
    let mut lanes = [lowest; LANES];
    let chunks = a.chunks_exact(LANES);
    let tail = chunks.remainder().iter().fold(lowest, |m, &x| Float::max(m, x));
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = Float::max(lanes[i], chunk[i]);
        }
    }
    lanes.into_iter().fold(tail, Float::max)
}

/// Replaces each element by `exp(element - shift)` and returns their sum.
#[inline(always)]
pub(super) fn exp_in_place<T: Float>(row: &mut [T], shift: T) -> T {
    row.iter_mut().for_each(|x| *x = (*x - shift).fast_exp());
    sum1(row, |x| x)
}

vectorized! {
    /// Adds rows, each as long as `out`, to `out`.
    pub(super) fn add_rows[T: Float](out: &mut [T], rows: &[T]) {
        for row in rows.chunks_exact(out.len().max(1)) {
            out.iter_mut().zip(row).for_each(|(out, &x)| *out += x);
        }
    }
}

/// Returns the number of rows per piece of a row-wise kernel. It depends on the shape alone, so
/// sums over rows do not depend on the number of threads.
pub(super) fn rows_per_piece(rows: usize) -> usize {
    rows.div_ceil(32).max(1)
}

/// Read access to the elements of a CPU tensor; `G` is candle's read lock.
pub(super) struct Host<G> {
    guard: G,
    start: usize,
    end: Option<usize>,
}

/// Read access to a contiguous tensor.
pub(super) fn host(tensor: &Tensor) -> Result<Host<impl Deref<Target = Storage>>> {
    let (guard, layout) = tensor.storage_and_layout();
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(Host { guard, start, end: Some(end) }),
        None => Err(Error::other("host access needs a contiguous tensor")),
    }
}

/// Read access to a tensor of any layout: its storage, starting at its first element.
pub(super) fn strided_host(tensor: &Tensor) -> Host<impl Deref<Target = Storage>> {
    let (guard, layout) = tensor.storage_and_layout();
    Host { guard, start: layout.start_offset(), end: None }
}

impl<G: Deref<Target = Storage>> Host<G> {
    /// The elements, which must be of type `T`.
    pub(super) fn slice<T: HostElement>(&self) -> Result<&[T]> {
        let Storage::Cpu(storage) = &*self.guard else {
            return Err(Error::other("host access to a tensor that is not on the CPU"));
        };
        let all = T::cpu_storage_as_slice(storage)?;
        all.get(self.start..self.end.unwrap_or(all.len()))
            .ok_or_else(|| Error::other("host access to a tensor whose memory is released"))
    }
}

/// Returns the ids or indices of a `u32` or `i64` tensor, on the host.
pub(super) fn indices(ids: &Tensor, what: &'static str) -> Result<Vec<i64>> {
    match ids.dtype() {
        DType::U32 | DType::I64 => integers(ids, what),
        other => Err(Error::other(format!("{what} must be u32 or i64, got {other:?}"))),
    }
}

/// Returns the elements of a tensor of integers, on the host.
pub(super) fn integers(ids: &Tensor, what: &'static str) -> Result<Vec<i64>> {
    let list = |ids: &Tensor| ids.detach().flatten_all()?.to_dtype(DType::I64);
    match transfer::sent(ids) {
        Some(ids) => read::host(&list(&ids)?),
        None => read::vec1(&list(ids)?, what),
    }
}

/// Makes a CPU tensor of these elements without copying them.
pub(super) fn tensor<T: HostElement>(
    values: Vec<T>,
    shape: impl Into<candle_core::Shape>,
) -> Result<Tensor> {
    let shape: candle_core::Shape = shape.into();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_exp_is_close_over_its_range() {
        let mut worst = 0f64;
        for i in -87_000..88_000 {
            let x = i as f32 * 1e-3;
            let (got, want) = (f64::from(Float::fast_exp(x)), f64::from(x).exp());
            worst = worst.max((got / want - 1.0).abs());
        }
        assert!(worst < 2.5e-7, "{worst}");
        assert_eq!(Float::fast_exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::fast_exp(f32::INFINITY), f32::INFINITY);
        assert!(Float::fast_exp(f32::NAN).is_nan());
        assert_eq!(Float::fast_exp(0f32), 1.0);
    }

    #[test]
    fn tanh_is_close_near_zero_too() {
        let mut worst = 0f64;
        for i in -200_000i32..200_000 {
            // From 1e-12 to 20, with both signs.
            let x = 10f32.powf(i.abs() as f32 * 6.65e-5 - 12.0).copysign(i as f32);
            let (got, want) = (f64::from(Float::tanh(x)), f64::from(x).tanh());
            worst = worst.max((got / want - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst}");
        assert_eq!((Float::tanh(50f32), Float::tanh(-50f32)), (1.0, -1.0));
        assert_eq!((Float::tanh(f32::INFINITY), Float::tanh(0f32)), (1.0, 0.0));
        assert!(Float::tanh(f32::NAN).is_nan());
    }

    #[test]
    fn lanes_agree_with_plain_loops() {
        let a: Vec<f64> = (0..37).map(|i| f64::from(i * 7 % 11) - 4.0).collect();
        assert_eq!(sum1(&a, |x| x), a.iter().sum::<f64>());
        assert_eq!(max(&a), 6.0);
        assert_eq!(max::<f64>(&[]), f64::NEG_INFINITY);
        assert_eq!(dot(&a, &a), a.iter().map(|x| x * x).sum::<f64>());
    }
}
