//! Element-wise updates on the CPU in one pass over memory.
//!
//! Work is cut into chunks of a fixed size, and every element is a function of its own inputs. So
//! the bits do not depend on the number of threads.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::state_dtype::{Noise, round};
use super::step_scale::GradScale;
use crate::Result;
use fulgurite_module::parameter::accumulation_dtype;
use fulgurite_tensor::autograd::storage::{HostElement, with_host, with_host_mut};
use fulgurite_tensor::execution::dry_run::skips_pass;
use fulgurite_tensor::simd::{Half, vectorized};

/// Elements per task: few enough that the slices stay in the second-level cache.
const CHUNK: usize = 1 << 14;

/// Elements whose random words are made at once: few enough to stay in the first-level cache.
const BLOCK: usize = 1 << 10;

/// A type that updates are computed in.
pub(super) trait Real: HostElement + StateElement<Self> + Element<Self> {
    fn sqrt(self) -> Self;
    /// Clamps to plus or minus `bound`; NaN stays NaN.
    fn clamp(self, bound: Self) -> Self;
}

/// An element type of optimizer state.
pub(super) trait StateElement<C>: HostElement {
    /// Whether values of this type are rounded stochastically.
    const ROUNDED: bool;
    fn load(self) -> C;
    /// Rounds `value` by the low 16 bits of `word`, if [`ROUNDED`](Self::ROUNDED).
    fn store(value: C, word: u32) -> Self;
}

/// An element type of parameter values and gradients.
pub(super) trait Element<C>: HostElement {
    fn load(self) -> C;
    fn store(value: C) -> Self;
}

macro_rules! real {
    ($ty:ty) => {
        impl Real for $ty {
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn clamp(self, bound: Self) -> Self {
                // Not `f32::clamp`, whose assertion about the bounds prevents vectorization.
                let below = if self > bound { bound } else { self };
                if below < -bound { -bound } else { below }
            }
        }
        impl StateElement<$ty> for $ty {
            const ROUNDED: bool = false;
            fn load(self) -> $ty {
                self
            }
            fn store(value: $ty, _: u32) -> Self {
                value
            }
        }
        impl StateElement<$ty> for bf16 {
            const ROUNDED: bool = true;
            #[inline(always)]
            fn load(self) -> $ty {
                self.widen() as $ty
            }
            #[inline(always)]
            fn store(value: $ty, word: u32) -> Self {
                round(value as f32, word)
            }
        }
        impl Element<$ty> for $ty {
            fn load(self) -> $ty {
                self
            }
            fn store(value: $ty) -> Self {
                value
            }
        }
    };
}
real!(f32);
real!(f64);

macro_rules! stored_as_half {
    ($ty:ty) => {
        impl Element<f32> for $ty {
            #[inline(always)]
            fn load(self) -> f32 {
                self.widen()
            }
            #[inline(always)]
            fn store(value: f32) -> Self {
                Self::narrow(value)
            }
        }
    };
}
stored_as_half!(bf16);
stored_as_half!(f16);

/// Returns the dtype of the arithmetic, and of unrounded state, for parameters of dtype `values`.
///
/// `None` for dtypes that no optimizer updates.
pub(super) fn arithmetic_dtype(values: DType) -> Option<DType> {
    let is_updated = matches!(values, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    is_updated.then(|| accumulation_dtype(values))
}

/// Calls `$f::<P, C>` for the dtype of the values, or `$f::<R, N, P, B, C>` for the dtypes of
/// values and state. The latter is written `$f[R, N]`.
macro_rules! dispatch {
    ($values:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match $values {
            candle_core::DType::F32 => $f::<f32, f32>($($arg),*),
            candle_core::DType::F64 => $f::<f64, f64>($($arg),*),
            candle_core::DType::BF16 => $f::<half::bf16, f32>($($arg),*),
            candle_core::DType::F16 => $f::<half::f16, f32>($($arg),*),
            other => Err($crate::Error::other(format!("no optimizer updates dtype {other:?}"))),
        }
    };
    ($values:expr, $state:expr, $f:ident[$($first:ident),+]($($arg:expr),* $(,)?)) => {
        match ($values, $state) {
            (candle_core::DType::F32, candle_core::DType::F32) => $f::<$($first,)+ f32, f32, f32>($($arg),*),
            (candle_core::DType::F32, candle_core::DType::BF16) => $f::<$($first,)+ f32, half::bf16, f32>($($arg),*),
            (candle_core::DType::F64, candle_core::DType::F64) => $f::<$($first,)+ f64, f64, f64>($($arg),*),
            (candle_core::DType::F64, candle_core::DType::BF16) => $f::<$($first,)+ f64, half::bf16, f64>($($arg),*),
            (candle_core::DType::BF16, candle_core::DType::F32) => $f::<$($first,)+ half::bf16, f32, f32>($($arg),*),
            (candle_core::DType::BF16, candle_core::DType::BF16) => $f::<$($first,)+ half::bf16, half::bf16, f32>($($arg),*),
            (candle_core::DType::F16, candle_core::DType::F32) => $f::<$($first,)+ half::f16, f32, f32>($($arg),*),
            (candle_core::DType::F16, candle_core::DType::BF16) => $f::<$($first,)+ half::f16, half::bf16, f32>($($arg),*),
            (values, state) => Err($crate::Error::other(format!(
                "no optimizer updates values of dtype {values:?} with state of dtype {state:?}"
            ))),
        }
    };
}
pub(super) use dispatch;

/// A [`GradScale`] in the arithmetic's type.
#[derive(Clone, Copy)]
pub(super) struct Scale<C> {
    factor: C,
    bound: C,
}

impl<C: Real> Scale<C> {
    pub(super) fn new(scale: &GradScale) -> Self {
        Self {
            factor: C::from_f64(scale.factor),
            bound: C::from_f64(scale.clip_value.unwrap_or(f64::INFINITY)),
        }
    }

    pub(super) fn apply(self, grad: C) -> C {
        (grad * self.factor).clamp(self.bound)
    }
}

/// Computes `(values, states) = f(values, inputs, states)` by element, for `N` states of one
/// parameter.
///
/// All tensors have one length. `noise` rounds the states: the `k`-th by bits `16 k` to `16 k + 15`
/// of each word. It is not used if `N` is 0 or the states are not rounded. A word has bits for two
/// states, so three states are not rounded.
pub(super) fn update<const N: usize, P: Element<C>, G: Element<C>, B: StateElement<C>, C: Real>(
    values: &Tensor,
    inputs: &Tensor,
    states: [&Tensor; N],
    noise: Option<&Noise>,
    f: impl Fn(C, C, [C; N]) -> (C, [C; N]) + Copy + Sync,
) -> Result<()> {
    let element = 2 * size_of::<P>() + size_of::<G>() + 2 * N * size_of::<B>();
    if skips_pass(values.elem_count() * element) {
        return Ok(());
    }
    let noise = noise.filter(|_| N > 0 && B::ROUNDED);
    let on_block = |p: &mut [P], g: &[G], states: [&mut [B]; N], words: &[u32]| {
        update_block(p, g, states, words, C::from_f64(0.0), f);
    };
    each_block(values, inputs, states, noise, &on_block)
}

/// The elements of values, inputs and `N` states of a block, with a random word for each element.
type OnBlock<'a, const N: usize, P, G, B> =
    dyn Fn(&mut [P], &[G], [&mut [B]; N], &[u32]) + Sync + 'a;

/// Calls `f` with each block, on all threads. Compiled once for the dtypes of all rules.
fn each_block<const N: usize, P: HostElement, G: HostElement, B: HostElement>(
    values: &Tensor,
    inputs: &Tensor,
    states: [&Tensor; N],
    noise: Option<&Noise>,
    f: &OnBlock<'_, N, P, G, B>,
) -> Result<()> {
    let on_slices = |p: &mut [P], g: &[G], states: Vec<&mut [B]>| {
        let mut states = states.into_iter();
        let states: [_; N] = std::array::from_fn(|_| states.next().unwrap_or_default());
        let chunks: Vec<_> = parts(p, g, states, CHUNK).collect();
        chunks.into_par_iter().enumerate().for_each(|(i, (p, g, states))| {
            let mut words = [0; BLOCK];
            for (j, (p, g, states)) in parts(p, g, states, BLOCK).enumerate() {
                let words = &mut words[..p.len()];
                if let Some(noise) = noise {
                    noise.fill(i * CHUNK + j * BLOCK, words);
                }
                f(p, g, states, words);
            }
        });
    };
    with_host(inputs, |g: &[G]| {
        with_all_mut(&states, Vec::with_capacity(N), &mut |states| {
            with_host_mut(values, |p: &mut [P]| on_slices(p, g, states))
        })
        .flatten()
    })
    .flatten()
}

/// Calls `f` with the mutable elements of all tensors.
fn with_all_mut<T: HostElement, R>(
    tensors: &[&Tensor],
    slices: Vec<&mut [T]>,
    f: &mut dyn FnMut(Vec<&mut [T]>) -> R,
) -> Result<R> {
    let Some((first, others)) = tensors.split_first() else { return Ok(f(slices)) };
    with_host_mut(first, |slice: &mut [T]| {
        let mut slices: Vec<&mut [T]> = slices;
        slices.push(slice);
        with_all_mut(others, slices, f)
    })
    .flatten()
}

/// Cuts slices of one length into parts of `len` elements.
fn parts<'a, const N: usize, P, G, B>(
    p: &'a mut [P],
    g: &'a [G],
    states: [&'a mut [B]; N],
    len: usize,
) -> impl Iterator<Item = (&'a mut [P], &'a [G], [&'a mut [B]; N])> {
    let mut states = states.map(|state| state.chunks_mut(len));
    p.chunks_mut(len)
        .zip(g.chunks(len))
        .map(move |(p, g)| (p, g, states.each_mut().map(|state| state.next().unwrap_or_default())))
}

vectorized! {
    fn update_block[
        const N: usize,
        P: Element<C>,
        G: Element<C>,
        B: StateElement<C>,
        C: Real,
        F: Fn(C, C, [C; N]) -> (C, [C; N]),
    ](p: &mut [P], g: &[G], states: [&mut [B]; N], words: &[u32], zero: C, f: F) {
        const { assert!(N <= 3, "an optimizer has three states at most") };
        let mut states = states.into_iter();
        let [first, second, third] = [(); 3].map(|()| states.next().unwrap_or_default());
        // Slices of one known length, each in a variable: the compiler drops bounds checks and
        // vectorizes.
        let n = p.len();
        let (p, g, words) = (&mut p[..n], &g[..n], &words[..n]);
        let first = if N > 0 { &mut first[..n] } else { first };
        let second = if N > 1 { &mut second[..n] } else { second };
        let third = if N > 2 { &mut third[..n] } else { third };
        for i in 0..n {
            let mut old = [zero; N];
            if N > 0 {
                old[0] = first[i].load();
            }
            if N > 1 {
                old[1] = second[i].load();
            }
            if N > 2 {
                old[2] = third[i].load();
            }
            let (value, new) = f(p[i].load(), g[i].load(), old);
            p[i] = P::store(value);
            if N > 0 {
                first[i] = B::store(new[0], words[i]);
            }
            if N > 1 {
                second[i] = B::store(new[1], words[i] >> 16);
            }
            if N > 2 {
                third[i] = B::store(new[2], words[i]);
            }
        }
    }
}
