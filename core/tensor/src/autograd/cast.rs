//! Multi-threaded conversion between f32 and 16-bit floats on the CPU, vectorised for bf16. candle
//! converts on one thread, one element at a time.
//!
//! Rounds to nearest even, as candle does.

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::storage::{with_host, with_host_mut};
use crate::Result;
use crate::simd::{Half, map, update};

/// Evaluates `$widen` or `$round` for the pair of dtypes, with `$T` as the 16-bit float's type.
/// Evaluates `$other` for other pairs.
macro_rules! with_half {
    ($from:expr, $to:expr, $T:ident => $widen:expr, $round:expr, $other:expr) => {
        match ($from, $to) {
            (DType::BF16, DType::F32) => {
                type $T = bf16;
                $widen
            }
            (DType::F16, DType::F32) => {
                type $T = f16;
                $widen
            }
            (DType::F32, DType::BF16) => {
                type $T = bf16;
                $round
            }
            (DType::F32, DType::F16) => {
                type $T = f16;
                $round
            }
            _ => $other,
        }
    };
}

fn is_contiguous_on_cpu(tensor: &Tensor) -> bool {
    tensor.device().is_cpu() && tensor.is_contiguous()
}

/// Converts a contiguous CPU tensor between f32 and a 16-bit float. `None` for other tensors.
pub(super) fn converted(tensor: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    if tensor.elem_count() == 0 || !is_contiguous_on_cpu(tensor) {
        return Ok(None);
    }
    let shape = tensor.shape();
    with_half!(tensor.dtype(), dtype, T =>
        {
            let values = with_host(tensor, |values: &[T]| map(values, T::widen))?;
            Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
        },
        {
            let values = with_host(tensor, |values: &[f32]| map(values, T::narrow))?;
            Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
        },
        Ok(None)
    )
}

/// Converts `source` into `target`. Returns false, and writes nothing, if candle must convert.
pub(super) fn convert_into(target: &Tensor, source: &Tensor) -> Result<bool> {
    let size = target.elem_count();
    if size == 0
        || size != source.elem_count()
        || ![target, source].into_iter().all(is_contiguous_on_cpu)
    {
        return Ok(false);
    }
    // Tensors of different dtypes share no storage, so both locks can be held.
    with_half!(source.dtype(), target.dtype(), T =>
        {
            with_host(source, |values: &[T]| {
                with_host_mut(target, |out: &mut [f32]| update(out, values, |_, x| T::widen(x)))
            })??;
            Ok(true)
        },
        {
            with_host(source, |values: &[f32]| {
                with_host_mut(target, |out: &mut [T]| update(out, values, |_, x| T::narrow(x)))
            })??;
            Ok(true)
        },
        Ok(false)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_match_candle() {
        for n in [1, 7, 100_003] {
            let wide = Tensor::randn(0f32, 3., n, &Device::Cpu).unwrap();
            for dtype in [DType::BF16, DType::F16] {
                let half = converted(&wide, dtype).unwrap().unwrap();
                let expected = wide.to_dtype(dtype).unwrap();
                let bits = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
                assert_eq!(bits(&half), bits(&expected));
                let back = converted(&half, DType::F32).unwrap().unwrap();
                assert_eq!(bits(&back), bits(&expected));
                let target = Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap();
                assert!(convert_into(&target, &half).unwrap());
                assert_eq!(bits(&target), bits(&expected));
            }
        }
        let turned = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap().t().unwrap();
        assert!(converted(&turned, DType::BF16).unwrap().is_none());
        assert!(converted(&turned, DType::F64).unwrap().is_none());
    }
}
