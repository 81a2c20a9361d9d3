//! Element-wise updates on the CPU in one pass over memory.
//!
//! Work is cut into chunks of a fixed size and every element is a function of its own inputs, so
//! the bits do not depend on the number of threads.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::GradScale;
use super::state_dtype::{Noise, round};
use crate::autograd::storage::{HostElement, with_host, with_host_mut};
use crate::simd::vectorized;
use crate::{Error, Result};

/// Elements a task handles: small enough that its slices stay in the second-level cache.
const CHUNK: usize = 1 << 14;

/// Elements whose random words are made at once: few enough to stay in the first-level cache.
const BLOCK: usize = 1 << 10;

/// What updates are computed in.
pub(super) trait Real: HostElement {
    fn sqrt(self) -> Self;
    /// Clamped to plus or minus `bound`; NaN stays NaN.
    fn limit(self, bound: Self) -> Self;
}

/// A dtype that state may have.
pub(super) trait State<C>: HostElement {
    /// Whether it is rounded at random.
    const ROUNDED: bool;
    fn load(self) -> C;
    /// Rounded, if it is, by the low 16 bits of `word`.
    fn store(value: C, word: u32) -> Self;
}

/// A dtype that parameter values may have.
pub(super) trait Stored<C>: HostElement {
    fn load(self) -> C;
    fn store(value: C) -> Self;
}

macro_rules! real {
    ($ty:ty) => {
        impl Real for $ty {
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn limit(self, bound: Self) -> Self {
                // Not `clamp`: its check of the bounds keeps loops from becoming vector code.
                let below = if self > bound { bound } else { self };
                if below < -bound { -bound } else { below }
            }
        }
        impl State<$ty> for $ty {
            const ROUNDED: bool = false;
            fn load(self) -> $ty {
                self
            }
            fn store(value: $ty, _: u32) -> Self {
                value
            }
        }
        impl State<$ty> for bf16 {
            const ROUNDED: bool = true;
            #[inline(always)]
            fn load(self) -> $ty {
                f32::from_bits(u32::from(self.to_bits()) << 16) as $ty
            }
            #[inline(always)]
            fn store(value: $ty, word: u32) -> Self {
                round(value as f32, word)
            }
        }
        impl Stored<$ty> for $ty {
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
        impl Stored<f32> for $ty {
            fn load(self) -> f32 {
                self.to_f32()
            }
            fn store(value: f32) -> Self {
                Self::from_f32(value)
            }
        }
    };
}
stored_as_half!(bf16);
stored_as_half!(f16);

/// dtype of the arithmetic for parameters of dtype `values`, and of state that is not rounded.
pub(super) fn arithmetic_dtype(values: DType) -> Option<DType> {
    match values {
        DType::F64 => Some(DType::F64),
        DType::F32 | DType::F16 | DType::BF16 => Some(DType::F32),
        _ => None,
    }
}

/// Calls the generic function `$f::<P, C>` for the values' dtype, or `$f::<P, B, C>` for those of
/// values and state.
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
    ($values:expr, $state:expr, $f:ident($($arg:expr),* $(,)?)) => {
        match ($values, $state) {
            (candle_core::DType::F32, candle_core::DType::F32) => $f::<f32, f32, f32>($($arg),*),
            (candle_core::DType::F32, candle_core::DType::BF16) => $f::<f32, half::bf16, f32>($($arg),*),
            (candle_core::DType::F64, candle_core::DType::F64) => $f::<f64, f64, f64>($($arg),*),
            (candle_core::DType::F64, candle_core::DType::BF16) => $f::<f64, half::bf16, f64>($($arg),*),
            (candle_core::DType::BF16, candle_core::DType::F32) => $f::<half::bf16, f32, f32>($($arg),*),
            (candle_core::DType::BF16, candle_core::DType::BF16) => $f::<half::bf16, half::bf16, f32>($($arg),*),
            (candle_core::DType::F16, candle_core::DType::F32) => $f::<half::f16, f32, f32>($($arg),*),
            (candle_core::DType::F16, candle_core::DType::BF16) => $f::<half::f16, half::bf16, f32>($($arg),*),
            (values, state) => Err($crate::Error::other(format!(
                "no optimizer updates values of dtype {values:?} with state of dtype {state:?}"
            ))),
        }
    };
}
pub(super) use dispatch;

/// [`GradScale`] in the arithmetic's type.
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
        (grad * self.factor).limit(self.bound)
    }
}

/// The same as candle operations, for devices other than the CPU.
pub(super) fn scaled_grad(grad: &Tensor, scale: &GradScale) -> Result<Tensor> {
    let grad = (grad.detach() * scale.factor)?;
    Ok(match scale.clip_value {
        Some(bound) => grad.clamp(-bound, bound)?,
        None => grad,
    })
}

/// # Errors
/// If `clip_value` cannot be a bound.
pub(super) fn check_scale(scale: &GradScale) -> Result<()> {
    match scale.clip_value {
        Some(bound) if bound.is_nan() || bound < 0.0 => Err(Error::Config(format!(
            "trainer.gradient_clip_val must be zero or more when clipping by value, got {bound}"
        ))),
        _ => Ok(()),
    }
}

/// `state = f(state, values)`.
pub(super) fn follow<P: Stored<C>, C: Real>(
    state: &Tensor,
    values: &Tensor,
    f: impl Fn(C, C) -> C + Copy + Sync,
) -> Result<()> {
    with_host(values, |p: &[P]| {
        with_host_mut(state, |s: &mut [C]| {
            s.par_chunks_mut(CHUNK).zip(p.par_chunks(CHUNK)).for_each(|(s, p)| {
                follow_chunk(s, p, f);
            });
        })
    })
    .flatten()
}

/// `values = f(values, grad)`.
pub(super) fn update0<P: Stored<C>, C: Real>(
    values: &Tensor,
    grad: &Tensor,
    f: impl Fn(C, C) -> C + Copy + Sync,
) -> Result<()> {
    with_host(grad, |g: &[C]| {
        with_host_mut(values, |p: &mut [P]| {
            p.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).for_each(|(p, g)| {
                update0_chunk(p, g, f);
            });
        })
    })
    .flatten()
}

/// `(values, a) = f(values, grad, a)`.
pub(super) fn update1<P: Stored<C>, B: State<C>, C: Real>(
    values: &Tensor,
    grad: &Tensor,
    a: &Tensor,
    noise: &Noise,
    f: impl Fn(C, C, C) -> (C, C) + Copy + Sync,
) -> Result<()> {
    with_host(grad, |g: &[C]| {
        with_host_mut(a, |a: &mut [B]| {
            with_host_mut(values, |p: &mut [P]| {
                let chunks = p.par_chunks_mut(CHUNK).zip(a.par_chunks_mut(CHUNK));
                chunks.zip(g.par_chunks(CHUNK)).enumerate().for_each(|(i, ((p, a), g))| {
                    let blocks = p.chunks_mut(BLOCK).zip(a.chunks_mut(BLOCK)).zip(g.chunks(BLOCK));
                    let mut words = [0; BLOCK];
                    for (j, ((p, a), g)) in blocks.enumerate() {
                        let words = &mut words[..g.len()];
                        if B::ROUNDED {
                            noise.fill(i * CHUNK + j * BLOCK, words);
                        }
                        update1_block(p, g, a, words, f);
                    }
                });
            })
        })
        .flatten()
    })
    .flatten()
}

/// `(values, a, b) = f(values, grad, a, b)`.
pub(super) fn update2<P: Stored<C>, B: State<C>, C: Real>(
    values: &Tensor,
    grad: &Tensor,
    [a, b]: [&Tensor; 2],
    noise: &Noise,
    f: impl Fn(C, C, C, C) -> (C, C, C) + Copy + Sync,
) -> Result<()> {
    with_host(grad, |g: &[C]| {
        with_host_mut(a, |a: &mut [B]| {
            with_host_mut(b, |b: &mut [B]| {
                with_host_mut(values, |p: &mut [P]| {
                    let states = a.par_chunks_mut(CHUNK).zip(b.par_chunks_mut(CHUNK));
                    let chunks = p.par_chunks_mut(CHUNK).zip(states).zip(g.par_chunks(CHUNK));
                    chunks.enumerate().for_each(|(i, ((p, (a, b)), g))| {
                        let states = a.chunks_mut(BLOCK).zip(b.chunks_mut(BLOCK));
                        let blocks = p.chunks_mut(BLOCK).zip(states).zip(g.chunks(BLOCK));
                        let mut words = [0; BLOCK];
                        for (j, ((p, (a, b)), g)) in blocks.enumerate() {
                            let words = &mut words[..g.len()];
                            if B::ROUNDED {
                                noise.fill(i * CHUNK + j * BLOCK, words);
                            }
                            update2_block(p, g, a, b, words, f);
                        }
                    });
                })
            })
            .flatten()
        })
        .flatten()
    })
    .flatten()
}

vectorized! {
    fn follow_chunk[P: Stored<C>, C: Real, F: Fn(C, C) -> C](s: &mut [C], p: &[P], f: F) {
        for (s, &p) in s.iter_mut().zip(p) {
            *s = f(*s, p.load());
        }
    }

    fn update0_chunk[P: Stored<C>, C: Real, F: Fn(C, C) -> C](p: &mut [P], g: &[C], f: F) {
        for (p, &g) in p.iter_mut().zip(g) {
            *p = P::store(f(p.load(), g));
        }
    }

    fn update1_block[P: Stored<C>, B: State<C>, C: Real, F: Fn(C, C, C) -> (C, C)](
        p: &mut [P],
        g: &[C],
        a: &mut [B],
        words: &[u32],
        f: F,
    ) {
        for (((p, a), &g), &word) in p.iter_mut().zip(a).zip(g).zip(words) {
            let (new_p, new_a) = f(p.load(), g, a.load());
            (*p, *a) = (P::store(new_p), B::store(new_a, word));
        }
    }

    fn update2_block[P: Stored<C>, B: State<C>, C: Real, F: Fn(C, C, C, C) -> (C, C, C)](
        p: &mut [P],
        g: &[C],
        a: &mut [B],
        b: &mut [B],
        words: &[u32],
        f: F,
    ) {
        for ((((p, a), b), &g), &word) in p.iter_mut().zip(a).zip(b).zip(g).zip(words) {
            let (new_p, new_a, new_b) = f(p.load(), g, a.load(), b.load());
            (*p, *a, *b) = (P::store(new_p), B::store(new_a, word), B::store(new_b, word >> 16));
        }
    }
}
