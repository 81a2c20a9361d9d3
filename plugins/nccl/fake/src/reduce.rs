//! Reductions in an arbitrary order, rounded to the dtype after each step, like NCCL's.

use std::ffi::{c_int, c_void};

use half::{bf16, f16};

/// Bytes of an element of an NCCL dtype, or `None` if the dtype does not exist.
pub(crate) fn size(dtype: c_int) -> Option<usize> {
    match dtype {
        0 | 1 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

trait Element: Copy {
    fn reduce(op: c_int, a: Self, b: Self) -> Self;
}

macro_rules! integers {
    ($($ty:ty),*) => { $(impl Element for $ty {
        fn reduce(op: c_int, a: Self, b: Self) -> Self {
            match op {
                0 => a.wrapping_add(b),
                1 => a.wrapping_mul(b),
                2 => a.max(b),
                _ => a.min(b),
            }
        }
    })* };
}
integers!(u8, i32, u32, i64);

macro_rules! floats {
    ($($ty:ty, $wide:ty, $widen:expr, $narrow:expr);*) => { $(impl Element for $ty {
        fn reduce(op: c_int, a: Self, b: Self) -> Self {
            let (a, b): ($wide, $wide) = ($widen(a), $widen(b));
            // `max` and `min` ignore NaN, like NCCL's.
            $narrow(match op {
                0 => a + b,
                1 => a * b,
                2 => a.max(b),
                _ => a.min(b),
            })
        }
    })* };
}
floats! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, |x: f16| x.to_f32(), f16::from_f32;
    bf16, f32, |x: bf16| x.to_f32(), bf16::from_f32
}

/// Reduces `count` elements of each input, in the given order, to one vector of bytes.
///
/// # Safety
/// Each input has that many elements, and no thread writes to it meanwhile.
pub(crate) unsafe fn reduce(
    inputs: &[*const c_void],
    count: usize,
    dtype: c_int,
    op: c_int,
) -> Vec<u8> {
    // SAFETY: as the caller promises.
    unsafe {
        match dtype {
            1 => of::<u8>(inputs, count, op),
            2 => of::<i32>(inputs, count, op),
            3 => of::<u32>(inputs, count, op),
            4 => of::<i64>(inputs, count, op),
            6 => of::<f16>(inputs, count, op),
            7 => of::<f32>(inputs, count, op),
            8 => of::<f64>(inputs, count, op),
            _ => of::<bf16>(inputs, count, op),
        }
    }
}

/// # Safety
/// As [`reduce`].
unsafe fn of<T: Element>(inputs: &[*const c_void], count: usize, op: c_int) -> Vec<u8> {
    let size = std::mem::size_of::<T>();
    let mut bytes = vec![0; count * size];
    for i in 0..count {
        // SAFETY: as the caller promises; addresses of parts of a buffer need not be aligned.
        let value = |input: &*const c_void| unsafe { input.cast::<T>().add(i).read_unaligned() };
        let values = inputs.iter().map(value);
        if let Some(sum) = values.reduce(|a, b| T::reduce(op, a, b)) {
            // SAFETY: within `bytes`.
            unsafe { bytes.as_mut_ptr().add(i * size).cast::<T>().write_unaligned(sum) };
        }
    }
    bytes
}
