//! Sums of two tensors, products with numbers and copies, on all threads of the CPU, vectorised for
//! bf16.
//! On CPUs with AVX512-BF16, candle converts every eight elements of bf16 in a function call, and
//! rounds denormals to zero.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::storage::{HostElement, with_host, with_host_mut};
use crate::Result;
use crate::execution::dry_run::skips_pass;
use crate::simd::{Half, map, map2, update};

/// Evaluates `$body` with `$T` as the element's type and `$add` as its sum, rounded to nearest
/// even. Evaluates `$other` for dtypes that candle adds.
macro_rules! with_sum {
    ($dtype:expr, ($T:ident, $add:ident) => $body:expr, $other:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                let $add = |a: f32, b: f32| a + b;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                let $add = |a: bf16, b: bf16| bf16::narrow(a.widen() + b.widen());
                $body
            }
            DType::F16 => {
                type $T = f16;
                let $add = |a: f16, b: f16| f16::narrow(a.widen() + b.widen());
                $body
            }
            DType::F64 => {
                type $T = f64;
                let $add = |a: f64, b: f64| a + b;
                $body
            }
            _ => $other,
        }
    };
}

/// Whether the tensors are added here, and not by candle.
fn adds(a: &Tensor, b: &Tensor) -> bool {
    let known = matches!(a.dtype(), DType::F32 | DType::F64 | DType::BF16 | DType::F16);
    let alike = a.dims() == b.dims() && a.dtype() == b.dtype();
    known && alike && a.device().is_cpu() && a.elem_count() > 0 && a.is_contiguous()
}

fn sum_of_elements<T: HostElement + bytemuck::Zeroable + Send + Sync>(
    a: &Tensor,
    b: &Tensor,
    add: impl Fn(T, T) -> T + Copy + Sync,
) -> Result<Tensor> {
    let values = with_host(a, |x: &[T]| with_host(b, |y: &[T]| map2(x, y, add)))??;
    Ok(Tensor::from_vec(values, a.shape(), a.device())?)
}

/// Returns `a + b` in new memory, outside the graph. candle computes it on GPUs, of integers, and
/// of tensors that are not contiguous.
///
/// # Errors
/// If the shapes, dtypes or devices differ.
pub fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.detach(), b.detach());
    if !adds(&a, &b) {
        return Ok((a + b)?);
    }
    let b = b.contiguous()?;
    with_sum!(a.dtype(), (T, add) => sum_of_elements::<T>(&a, &b, add), Ok((a + b)?))
}

/// Returns `sum + x`, of one shape and dtype, for a `sum` outside of any graph. The memory of `sum`
/// may be reused, so `sum` must not have another user, and `x` must use other memory.
///
/// # Errors
/// As [`sum`](sum()).
pub fn add_to(sum: Tensor, x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    if !adds(&sum, &x) {
        return Ok((sum.detach() + x)?);
    }
    let x = x.contiguous()?;
    with_sum!(sum.dtype(), (T, add) => {
        with_host(&x, |x: &[T]| with_host_mut(&sum, |sum: &mut [T]| update(sum, x, add)))??;
        Ok(sum)
    }, Ok((sum.detach() + x)?))
}

/// Adds `x` to `target`, a contiguous tensor or view of the same shape and dtype, in place.
///
/// # Errors
/// As [`sum`](sum()).
pub fn add_into(target: &Tensor, x: &Tensor) -> Result<()> {
    let x = x.detach();
    if adds(target, &x) {
        add_to(target.clone(), &x).map(drop)
    } else {
        super::storage::copy_from(target, &(target.detach() + x)?)
    }
}

/// Returns `factor * x` outside the graph, computed in f32 for 16-bit floats and rounded to nearest
/// even: PyTorch's product of a tensor and a number. candle rounds the factor to the tensor's
/// dtype. The result is `x` itself if the factor is 1, and else in new memory.
///
/// # Errors
/// If candle cannot multiply the dtype.
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let x = x.detach();
    if factor == 1.0 {
        return Ok(x);
    }
    let on_host = x.device().is_cpu() && x.elem_count() > 0 && x.is_contiguous();
    let narrow = factor as f32;
    match x.dtype() {
        DType::F32 if on_host => mapped(&x, |x: f32| x * narrow),
        DType::BF16 if on_host => mapped(&x, |x: bf16| bf16::narrow(x.widen() * narrow)),
        DType::F16 if on_host => mapped(&x, |x: f16| f16::narrow(x.widen() * narrow)),
        DType::BF16 | DType::F16 => {
            let wide = (super::storage::cast(&x, DType::F32)? * factor)?;
            super::storage::cast(&wide, x.dtype())
        }
        _ => Ok((x * factor)?),
    }
}

/// Returns `x` in new memory, contiguous and outside the graph.
///
/// # Errors
/// If candle cannot copy it.
pub fn copy(x: &Tensor) -> Result<Tensor> {
    let x = x.detach();
    let is_whole = x.elem_count() > 0 && x.is_contiguous();
    match (x.dtype(), x.device()) {
        (DType::F32, Device::Cpu) if is_whole => mapped(&x, |x: f32| x),
        (DType::BF16, Device::Cpu) if is_whole => mapped(&x, |x: bf16| x),
        (dtype, Device::Cpu) if skips_pass(2 * x.elem_count() * dtype.size_in_bytes()) => {
            super::storage::zeros(x.shape(), dtype, x.device())
        }
        _ => Ok(x.force_contiguous()?),
    }
}

fn mapped<T: HostElement + bytemuck::Zeroable + Send + Sync>(
    x: &Tensor,
    f: impl Fn(T) -> T + Copy + Sync,
) -> Result<Tensor> {
    let values = with_host(x, |x: &[T]| map(x, f))?;
    Ok(Tensor::from_vec(values, x.shape(), x.device())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: (usize, usize) = (3, 40_000);

    fn values(from: f32) -> Tensor {
        let elements = SHAPE.0 * SHAPE.1;
        let values: Vec<f32> = (0..elements).map(|i| (from + i as f32).sin()).collect();
        Tensor::from_vec(values, SHAPE, &Device::Cpu).unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        let values = x.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
        values.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
    }

    #[test]
    fn sums_have_candles_bits() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let [a, b] = [0.0, 7.0].map(|from| values(from).to_dtype(dtype).unwrap());
            let expected = bits(&(&a + &b).unwrap());
            assert_eq!(bits(&sum(&a, &b).unwrap()), expected, "{dtype:?}");
            assert_eq!(bits(&sum(&a, &a).unwrap()), bits(&(&a + &a).unwrap()), "{dtype:?}");
            let into = a.copy().unwrap();
            add_into(&into, &b).unwrap();
            assert_eq!(bits(&into), expected, "into, {dtype:?}");
            let copy = copy(&a).unwrap();
            assert_eq!(bits(&copy), bits(&a), "a copy, {dtype:?}");
            assert_eq!(bits(&add_to(copy.clone(), &b).unwrap()), expected, "{dtype:?}");
            assert_eq!(bits(&copy), expected, "in place, {dtype:?}");
        }
    }

    #[test]
    fn views_are_added_too() {
        let (a, b) = (values(0.0), values(1.0));
        let (turned, narrowed) = (a.t().unwrap(), a.narrow(0, 1, 2).unwrap());
        let other = b.t().unwrap().contiguous().unwrap();
        let expected = (&turned + &other).unwrap();
        assert_eq!(bits(&sum(&turned, &other).unwrap()), bits(&expected));
        assert_eq!(bits(&sum(&other, &turned).unwrap()), bits(&expected));
        let b = b.narrow(0, 0, 2).unwrap();
        assert_eq!(bits(&sum(&narrowed, &b).unwrap()), bits(&(narrowed + b).unwrap()));
    }

    #[test]
    fn denormals_of_bf16_are_kept() {
        let tiny = bf16::from_bits(3);
        let x = Tensor::from_vec(vec![tiny; 64], 64, &Device::Cpu).unwrap();
        let twice = sum(&x, &x).unwrap().to_vec1::<bf16>().unwrap();
        assert_eq!(twice, vec![bf16::from_bits(6); 64]);
    }

    #[test]
    fn factors_keep_their_precision() {
        let x = values(0.0);
        assert_eq!(bits(&scale(&x, 1.2).unwrap()), bits(&(&x * 1.2).unwrap()));
        let half = x.to_dtype(DType::BF16).unwrap();
        let wide = (half.to_dtype(DType::F32).unwrap() * 1.2).unwrap();
        let expected = bits(&wide.to_dtype(DType::BF16).unwrap());
        assert_eq!(bits(&scale(&half, 1.2).unwrap()), expected);
        assert_ne!(bits(&(&half * 1.2).unwrap()), expected, "candle rounds the factor");
    }

    #[test]
    fn other_shapes_and_dtypes_are_errors() {
        let a = values(0.0);
        sum(&a, &a.narrow(0, 0, 2).unwrap()).unwrap_err();
        add_to(a.clone(), &a.to_dtype(DType::F64).unwrap()).unwrap_err();
    }
}
