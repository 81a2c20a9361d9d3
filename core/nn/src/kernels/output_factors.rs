//! Passes over the outputs of a linear layer, `[.., outputs]`, with a factor for each output, as
//! DoRA has.

use candle_core::Tensor;
use rayon::prelude::*;

use super::matmul::{add_column_sums, bias_grad, rows};
use crate::Result;
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gradients::accumulate_host;
use crate::host::{Element, host, rows_per_piece, tensor, with_element};
use fulgurite_engine::execution::dry_run::skips_pass;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::simd::vectorized;

vectorized! {
    /// Writes `x * factors` for each row of `x`.
    fn scale_rows[E: Element](out: &mut [E], x: &[E], factors: &[E]) {
        let width = factors.len().max(1);
        for (out, x) in out.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            for ((out, &x), &factor) in out.iter_mut().zip(x).zip(factors) {
                *out = E::narrow(x.widen() * factor.widen());
            }
        }
    }

    /// Adds `x * y * factors` of all rows to `out`.
    fn add_rows_of_products[E: Element](
        out: &mut [E::Wide],
        x: &[E],
        y: &[E],
        factors: &[E::Wide],
    ) {
        let width = factors.len().max(1);
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact(width)) {
            for (((out, &x), &y), &factor) in out.iter_mut().zip(x).zip(y).zip(factors) {
                *out += x.widen() * y.widen() * factor;
            }
        }
    }
}

/// `x * factors`; `factors` is `[outputs]`, of the dtype of `x`.
pub(crate) fn scale(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    if !uses_cpu_kernels(x) {
        return Ok(x.broadcast_mul(factors)?);
    }
    let (x, factors) = (x.detach().contiguous()?, factors.detach().contiguous()?);
    with_element!(x.dtype(), E => {
        let (host_x, factors) = (host(&x)?, host(&factors)?);
        let (values, factors) = (host_x.slice::<E>()?, factors.slice::<E>()?);
        let mut y = vec![E::default(); values.len()];
        if !skips_pass(2 * size_of_val(values)) {
            let piece = rows_per_piece(rows(&x)?.0) * factors.len().max(1);
            y.par_chunks_mut(piece).zip(values.par_chunks(piece)).for_each(|(y, x)| {
                scale_rows(y, x, factors);
            });
        }
        tensor(y, x.shape())
    })
}

/// Adds the sums of `grad * y * factors` over all rows to the gradient of `parameter`, `[outputs]`,
/// without ending the use. `factors` is in the accumulation dtype.
pub(crate) fn factor_grad(
    parameter: &Parameter,
    grad: &Tensor,
    y: &Tensor,
    factors: &Tensor,
) -> Result<()> {
    if !parameter.takes_grad() {
        return Ok(());
    }
    if !uses_cpu_kernels(grad) {
        let terms = (to_accumulation_dtype(grad)? * to_accumulation_dtype(y)?)?;
        return bias_grad(parameter, &terms.broadcast_mul(factors)?);
    }
    let (grad, y) = (grad.detach().contiguous()?, y.detach().contiguous()?);
    let (n, outputs) = rows(&grad)?;
    with_element!(grad.dtype(), E => {
        let (grad, y, factors) = (host(&grad)?, host(&y)?, host(factors)?);
        let (grad, y) = (grad.slice::<E>()?, y.slice::<E>()?);
        let factors = factors.slice::<<E as Element>::Wide>()?;
        accumulate_host::<<E as Element>::Wide>(parameter, |out, add| {
            if !skips_pass(size_of_val(grad) + size_of_val(y)) {
                add_column_sums(out, n, add, |rows, sum| {
                    let range = rows.start * outputs..rows.end * outputs;
                    add_rows_of_products(sum, &grad[range.clone()], &y[range], factors);
                });
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{DType, Device};
    use fulgurite_engine::module::{ModuleBuilder, ModuleInit};
    use fulgurite_engine::parameter::{GradReducer as _, Init, LocalGrads};

    use super::*;

    const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
    const SHAPES: [&[usize]; 5] = [&[7, 33], &[2, 3, 5], &[100, 6], &[0, 4], &[3, 0]];

    fn random(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::randn(0.0f32, 1.0, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u64> {
        let values = x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
        values.into_iter().map(f64::to_bits).collect()
    }

    #[test]
    fn scaled_outputs_are_those_of_candle() {
        for dtype in DTYPES {
            for shape in SHAPES {
                let (x, factors) = (random(shape, dtype), random(&shape[shape.len() - 1..], dtype));
                let expected = x.broadcast_mul(&factors).unwrap();
                let y = scale(&x, &factors).unwrap();
                assert_eq!(y.dims(), expected.dims());
                assert_eq!(bits(&y), bits(&expected), "{dtype:?} {shape:?}");
            }
        }
    }

    /// Computes a gradient twice, and adds the second to the first.
    fn twice(outputs: usize, dtype: DType, add: impl Fn(&Parameter) -> Result<()>) -> Vec<u64> {
        let init = ModuleInit { dtype, compute_dtype: dtype, ..ModuleInit::default() };
        let b = ModuleBuilder::new(init);
        b.parameter("magnitude", [outputs], Init::ZEROS).unwrap();
        let slot = b.finish().unwrap().slots().remove(0);
        let grads = Arc::new(LocalGrads::default());
        slot.set_reducer(grads.clone());
        for _ in 0..2 {
            add(slot.parameter()).unwrap();
        }
        bits(&grads.buffer(&slot).unwrap())
    }

    #[test]
    fn gradients_of_factors_are_those_of_candle() {
        for dtype in DTYPES {
            for shape in SHAPES {
                let outputs = shape[shape.len() - 1];
                let (grad, y) = (random(shape, dtype), random(shape, dtype));
                let factors = to_accumulation_dtype(&random(&[outputs], dtype)).unwrap();
                let wide = |x: &Tensor| to_accumulation_dtype(x).unwrap();
                let terms = (wide(&grad) * wide(&y)).unwrap().broadcast_mul(&factors).unwrap();
                let expected = twice(outputs, dtype, |p| bias_grad(p, &terms));
                let found = twice(outputs, dtype, |p| factor_grad(p, &grad, &y, &factors));
                assert_eq!(found, expected, "{dtype:?} {shape:?}");
            }
        }
    }
}
