//! Products with a weight of shape `[out, in]`. `x` is `[.., in]`, results are `[.., out]`.

use std::ops::Range;

use candle_core::{D, DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::few_rows::{self, FEW};
use crate::backend::{to_accumulation_dtype, uses_cpu_kernels};
use crate::gemm::{Mat, Threads, gemm, product};
use crate::gemm_bf16::Bf16Gemm;
use crate::gradients::{accumulate_host, add_to};
use crate::host::{
    Element, Float, add_rows, host, rows_per_piece, tensor, with_element, with_float,
};
use crate::kv_cache::CachedTokens;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::dry_run::{skips_pass, skips_products};
use fulgurite_engine::module::ForwardScope;
use fulgurite_engine::parameter::Parameter;
use fulgurite_engine::parameter::accumulation_dtype;

/// Whether and where the gradient of an input is computed.
pub(crate) enum InputGrad {
    /// The gradient is not needed.
    Skip,
    /// A new tensor.
    New,
    /// The gradient added in place to this tensor, which has the input's shape and no other user.
    AddTo(Tensor),
}

impl InputGrad {
    /// [`New`](Self::New) if the gradient is wanted, else [`Skip`](Self::Skip).
    pub(crate) fn new(wanted: bool) -> Self {
        if wanted { Self::New } else { Self::Skip }
    }

    /// Adds the gradient to `sum`, if given.
    pub(crate) fn add_to(self, sum: Option<Tensor>) -> Self {
        match (self, sum) {
            (Self::New, Some(sum)) => Self::AddTo(sum),
            (into, _) => into,
        }
    }
}

/// Returns the number of rows and their width.
pub(super) fn rows(x: &Tensor) -> Result<(usize, usize)> {
    let width = x.dim(D::Minus1)?;
    Ok((x.elem_count() / width.max(1), width))
}

fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = width;
    }
    dims
}

/// Returns the CPU's bf16 product, if available and all tensors are in bf16. The choice depends on
/// nothing else, so small and large products get their bits in the same way.
pub(super) fn bf16_gemm(tensors: &[&Tensor]) -> Option<Bf16Gemm> {
    let all = tensors.iter().all(|tensor| tensor.dtype() == DType::BF16);
    Bf16Gemm::available().filter(|_| all)
}

/// `x weight^T + bias`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if ForwardScope::current().batch_invariant {
        return linear_invariant(x, weight, bias);
    }
    match CachedTokens::current() {
        Some(tokens) if uses_cpu_kernels(x) => linear_apart(x, weight, bias, &tokens),
        _ => linear_together(x, weight, bias),
    }
}

/// [`linear`] with the same bits for a row in any batch ([`ForwardScope::batch_invariant`]).
fn linear_invariant(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    if !uses_cpu_kernels(x) {
        return Err(Error::other(
            "batch-invariant products are for the CPU (`batch_invariant`), and the tensors are on another device",
        ));
    }
    let (n, inputs) = rows(x)?;
    let dims = with_width(x, weight.dim(0)?);
    Ok(linear_few(&x.detach().reshape((n, inputs))?, weight, bias)?.reshape(dims)?)
}

/// [`linear`] in a forward with a cache. Few rows are summed one by one, and others a sequence at a
/// time, so the bits of a sequence's rows do not depend on other sequences.
fn linear_apart(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    tokens: &CachedTokens,
) -> Result<Tensor> {
    let n = rows(x)?.0;
    // A plan that cuts the sequence leaves other rows.
    let counts: Vec<usize> = match tokens.tokens() == n {
        true => {
            let own = tokens.segments().iter().map(|segment| segment.at.len());
            let padding = n - tokens.segments().last().map_or(0, |segment| segment.at.end);
            own.chain((padding > 0).then_some(padding)).collect()
        }
        false => vec![n],
    };
    linear_by_counts(x, weight, bias, &counts)
}

/// [`linear`] without a bias in a forward with a cache, for rows of several sequences, `counts` of
/// each one after the other.
pub(super) fn linear_of_sequences(x: &Tensor, weight: &Tensor, counts: &[usize]) -> Result<Tensor> {
    match ForwardScope::current().batch_invariant {
        true => linear_invariant(x, weight, None),
        false => linear_by_counts(x, weight, None, counts),
    }
}

fn linear_by_counts(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    counts: &[usize],
) -> Result<Tensor> {
    let (n, inputs) = rows(x)?;
    let dims = with_width(x, weight.dim(0)?);
    let x = x.detach().reshape((n, inputs))?;
    let (mut outputs, mut start, mut few) = (Vec::new(), 0, 0);
    for count in counts.iter().copied().chain([FEW]) {
        if count < FEW {
            few += count;
            continue;
        }
        if few > 0 {
            outputs.push(linear_few(&x.narrow(0, start, few)?, weight, bias)?);
            start += std::mem::take(&mut few);
        }
        if start < n {
            outputs.push(linear_together(&x.narrow(0, start, count)?, weight, bias)?);
            start += count;
        }
    }
    match outputs.as_slice() {
        [output] => Ok(output.reshape(dims)?),
        outputs => Ok(Tensor::cat(outputs, 0)?.reshape(dims)?),
    }
}

/// [`linear`] for `x` `[rows, inputs]`; sums each row alone.
fn linear_few(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let ((n, inputs), outputs) = (rows(x)?, weight.dim(0)?);
    let (x, bias) = (to_accumulation_dtype(x)?, bias.map(to_accumulation_dtype).transpose()?);
    let weight = weight.detach().contiguous()?;
    let weight_dtype = weight.dtype();
    let y = with_element!(weight.dtype(), E => {
        let (x, weight) = (host(&x)?, host(&weight)?);
        let bias = bias.as_ref().map(host).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.slice()).transpose()?;
        let x = x.slice::<<E as Element>::Wide>()?;
        let y = match skips_products([n, inputs, outputs], 1, weight_dtype) {
            true => vec![<E as Element>::Wide::ZERO; n * outputs],
            false => few_rows::product::<E>(x, weight.slice()?, bias, inputs),
        };
        tensor(y, (n, outputs))
    })?;
    storage::cast(&y, weight.dtype())
}

fn linear_together(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, inputs) = rows(x)?;
    let outputs = weight.dim(0)?;
    let dims = with_width(x, outputs);
    if !uses_cpu_kernels(x) {
        let y = x.detach().reshape((n, inputs))?.matmul(&weight.t()?)?;
        let y = match bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        return Ok(y.reshape(dims)?);
    }
    if let Some(products) = bf16_gemm(&[x, weight, bias.unwrap_or(x)]) {
        let (x, weight) = (x.detach().contiguous()?, weight.detach().contiguous()?);
        let bias = bias.map(|bias| bias.detach().contiguous()).transpose()?;
        let (x, weight) = (host(&x)?, host(&weight)?);
        let bias = bias.as_ref().map(host).transpose()?;
        let x = Mat::new(x.slice::<bf16>()?, n, inputs);
        let weight = Mat::new(weight.slice()?, outputs, inputs).t();
        let bias = bias.as_ref().map(|bias| bias.slice()).transpose()?;
        let y = products.product(x, weight, bias, Threads::All);
        return Ok(Tensor::from_vec(y, dims, &Device::Cpu)?);
    }
    let dtype = x.dtype();
    let (x, weight) = (to_accumulation_dtype(x)?, to_accumulation_dtype(weight)?);
    let bias = bias.map(to_accumulation_dtype).transpose()?;
    let y = with_float!(x.dtype(), T => {
        let (x, weight) = (host(&x)?, host(&weight)?);
        let weight = Mat::new(weight.slice::<T>()?, outputs, inputs).t();
        let x = Mat::new(x.slice()?, n, inputs);
        let y = match &bias {
            None => product(x, weight, Threads::All),
            Some(bias) => {
                let mut y = match skips_pass(n * outputs * size_of::<T>()) {
                    true => vec![T::ZERO; n * outputs],
                    false => host(bias)?.slice::<T>()?.repeat(n),
                };
                gemm(&mut y, x, weight, true, Threads::All);
                y
            }
        };
        tensor(y, dims)
    })?;
    storage::cast(&y, dtype)
}

/// Computes the gradient of `x`: `grad weight`.
pub(crate) fn input_grad(
    grad: &Tensor,
    weight: &Tensor,
    into: InputGrad,
) -> Result<Option<Tensor>> {
    let (n, outputs) = rows(grad)?;
    let inputs = weight.dim(1)?;
    let dims = with_width(grad, inputs);
    let sum = match into {
        InputGrad::Skip => return Ok(None),
        InputGrad::New => None,
        InputGrad::AddTo(sum) => Some(sum),
    };
    #[cfg(feature = "cuda")]
    if let Some(sum) = &sum
        && grad.device().is_cuda()
    {
        // Adding within the product rounds once, and needs no launch for the addition.
        let (rows, into) = (grad.reshape((n, outputs))?, sum.reshape((n, inputs))?);
        if fulgurite_kernels::cuda::add_input_grad(&rows, weight, &into)? {
            return Ok(Some(sum.clone()));
        }
    }
    if uses_cpu_kernels(grad)
        && let Some(products) = bf16_gemm(&[grad, weight, sum.as_ref().unwrap_or(grad)])
    {
        let (grad, weight) = (grad.detach().contiguous()?, weight.detach().contiguous()?);
        let (grad, weight) = (host(&grad)?, host(&weight)?);
        let grad = Mat::new(grad.slice::<bf16>()?, n, outputs);
        let weight = Mat::new(weight.slice()?, outputs, inputs);
        let Some(sum) = sum else {
            let dx = products.product(grad, weight, None, Threads::All);
            return Ok(Some(Tensor::from_vec(dx, dims, &Device::Cpu)?));
        };
        storage::with_host_mut(&sum, |out: &mut [bf16]| {
            products.add_product(out, grad, weight, Threads::All);
        })?;
        return Ok(Some(sum));
    }
    let native = grad.dtype() == accumulation_dtype(grad.dtype());
    if !uses_cpu_kernels(grad) || (sum.is_some() && !native) {
        let fresh = match uses_cpu_kernels(grad) {
            true => return add(sum, input_grad(grad, weight, InputGrad::New)?),
            false => grad.reshape((n, outputs))?.matmul(weight)?.reshape(dims)?,
        };
        return add(sum, Some(fresh));
    }
    let dtype = grad.dtype();
    let (grad, weight) = (to_accumulation_dtype(grad)?, to_accumulation_dtype(weight)?);
    let dx = with_float!(grad.dtype(), T => {
        let (grad, weight) = (host(&grad)?, host(&weight)?);
        let grad = Mat::new(grad.slice::<T>()?, n, outputs);
        let weight = Mat::new(weight.slice()?, outputs, inputs);
        match sum {
            Some(sum) => {
                storage::with_host_mut(&sum, |out: &mut [T]| {
                    gemm(out, grad, weight, true, Threads::All);
                })?;
                Ok(sum)
            }
            None => {
                tensor(product(grad, weight, Threads::All), dims)
            }
        }
    })?;
    Ok(Some(storage::cast(&dx, dtype)?))
}

fn add(sum: Option<Tensor>, fresh: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (sum, fresh) {
        (Some(sum), Some(fresh)) => Some(add_to(fresh, &sum)?),
        (sum, fresh) => sum.or(fresh),
    })
}

/// Adds `grad^T x` to the gradient of a weight, without ending the use.
pub(crate) fn weight_grad(weight: &Parameter, x: &Tensor, grad: &Tensor) -> Result<()> {
    if !weight.takes_grad() {
        return Ok(());
    }
    let ((n, inputs), (_, outputs)) = (rows(x)?, rows(grad)?);
    if !uses_cpu_kernels(x) {
        let (x, grad) = (x.reshape((n, inputs))?, grad.reshape((n, outputs))?);
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && n > 0 {
            return weight.accumulate_with(|out, add| {
                if fulgurite_kernels::cuda::weight_grad(&x, &grad, out, add)? {
                    return Ok(());
                }
                // Other dtypes: the same path as on other devices.
                let product = grad.t()?.matmul(&x)?.flatten_all()?.to_dtype(out.dtype())?;
                let sum = if add { (out + product)? } else { product };
                storage::copy_from(out, &sum)
            });
        }
        return weight.accumulate(&grad.t()?.matmul(&x)?);
    }
    if let Some(products) = bf16_gemm(&[x, grad]) {
        let (x, grad) = (x.detach().contiguous()?, grad.detach().contiguous()?);
        let (x, grad) = (host(&x)?, host(&grad)?);
        let x = Mat::new(x.slice::<bf16>()?, n, inputs);
        let grad = Mat::new(grad.slice()?, n, outputs);
        return accumulate_host::<f32>(weight, |out, add| {
            products.gemm(out, grad.t(), x, add, Threads::All);
            Ok(())
        });
    }
    let (x, grad) = (to_accumulation_dtype(x)?, to_accumulation_dtype(grad)?);
    with_float!(x.dtype(), T => {
        let (x, grad) = (host(&x)?, host(&grad)?);
        let x = Mat::new(x.slice::<T>()?, n, inputs);
        let grad = Mat::new(grad.slice::<T>()?, n, outputs);
        accumulate_host::<T>(weight, |out, add| {
            gemm(out, grad.t(), x, add, Threads::All);
            Ok(())
        })
    })
}

/// Adds the sum over the rows of `grad` to the gradient of a bias, without ending the use.
pub(crate) fn bias_grad(bias: &Parameter, grad: &Tensor) -> Result<()> {
    if !bias.takes_grad() {
        return Ok(());
    }
    let (n, outputs) = rows(grad)?;
    if !uses_cpu_kernels(grad) {
        return bias.accumulate(&to_accumulation_dtype(grad)?.reshape((n, outputs))?.sum(0)?);
    }
    let grad = to_accumulation_dtype(grad)?;
    with_float!(grad.dtype(), T => {
        let grad = host(&grad)?;
        let grad = grad.slice::<T>()?;
        accumulate_host::<T>(bias, |out, add| {
            column_sums(out, grad, add);
            Ok(())
        })
    })
}

/// Sums the rows of `grad` into `out`.
fn column_sums<T: Float>(out: &mut [T], grad: &[T], add: bool) {
    if skips_pass(size_of_val(grad)) {
        return;
    }
    let width = out.len();
    add_column_sums(out, grad.len() / width.max(1), add, |rows, sum| {
        add_rows(sum, &grad[rows.start * width..rows.end * width]);
    });
}

/// Adds sums over rows to `out`, or stores them there. `add_rows_of` adds a range of the rows to its
/// slice, which is as long as `out`. The sums of the ranges are added in order. The caller records
/// the pass.
pub(super) fn add_column_sums<T: Float>(
    out: &mut [T],
    rows: usize,
    add: bool,
    add_rows_of: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let piece = rows_per_piece(rows);
    let sums: Vec<Vec<T>> = (0..rows.div_ceil(piece))
        .into_par_iter()
        .map(|i| {
            let mut sum = vec![T::ZERO; out.len()];
            add_rows_of(i * piece..rows.min((i + 1) * piece), &mut sum);
            sum
        })
        .collect();
    if !add {
        out.fill(T::ZERO);
    }
    sums.iter().for_each(|sum| add_rows(out, sum));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fulgurite_engine::module::{ModuleBuilder, ModuleInit};
    use fulgurite_engine::parameter::{GradReducer, Init, LocalGrads};

    use super::*;
    use crate::gemm_bf16::use_model;

    const BF16: DType = DType::BF16;

    fn values(shape: &[usize], seed: usize) -> Tensor {
        let value = |i: usize| ((i * 7919 + seed * 271) % 1013) as f32 / 511.0 - 1.0;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(BF16).unwrap()
    }

    /// Runs `linear`, `input_grad` into a new tensor and into a sum, and `weight_grad` twice.
    fn run(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, grad: &Tensor) -> [Vec<f32>; 4] {
        let init = ModuleInit { dtype: BF16, compute_dtype: BF16, ..ModuleInit::default() };
        let b = ModuleBuilder::new(init);
        b.parameter("w", weight.dims(), Init::ZEROS).unwrap();
        let slot = b.finish().unwrap().slots().remove(0);
        let grads = Arc::new(LocalGrads::default());
        slot.set_reducer(grads.clone());
        for _ in 0..2 {
            weight_grad(slot.parameter(), x, grad).unwrap();
        }
        let sum = x.copy().unwrap();
        input_grad(grad, weight, InputGrad::AddTo(sum.clone())).unwrap();
        let dx = input_grad(grad, weight, InputGrad::New).unwrap().unwrap();
        let y = linear(x, weight, bias).unwrap();
        assert_eq!((y.dtype(), dx.dtype()), (BF16, BF16));
        assert_eq!((y.dims(), dx.dims()), (grad.dims(), x.dims()));
        let flat = |x: &Tensor| -> Vec<f32> {
            x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
        };
        [flat(&y), flat(&dx), flat(&sum), flat(&grads.buffer(&slot).unwrap())]
    }

    #[test]
    fn bf16_products_agree_with_f32() {
        let (x, grad) = (values(&[3, 4, 50], 1), values(&[3, 4, 70], 2));
        let (weight, bias) = (values(&[70, 50], 3), values(&[70], 4));
        for bias in [None, Some(&bias)] {
            let wide =
                [&x, &weight, bias.unwrap_or(&x), &grad].map(|x| x.to_dtype(DType::F32).unwrap());
            let _model = use_model();
            let got = run(&x, &weight, bias, &grad);
            let [x, weight, other, grad] = &wide;
            let y = linear(x, weight, bias.map(|_| other)).unwrap();
            let dx = input_grad(grad, weight, InputGrad::New).unwrap().unwrap();
            let dw = grad.flatten_to(1).unwrap().t().unwrap().matmul(&x.flatten_to(1).unwrap());
            let expected = [&y, &dx, &(&dx + x).unwrap(), &(dw.unwrap() * 2.0).unwrap()];
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
                assert_eq!(got.len(), expected.len());
                for (got, expected) in got.iter().zip(&expected) {
                    let error = (got - expected).abs();
                    assert!(error <= expected.abs() / 128.0 + 1e-5, "{i}: {got}, not {expected}");
                }
            }
        }
    }

    /// The instructions treat denormals as zeros, unlike products in f32.
    #[test]
    fn bf16_products_are_used_where_there_are_any() {
        let full = |value: f32, shape: &[usize]| {
            Tensor::full(value, shape, &Device::Cpu).unwrap().to_dtype(BF16).unwrap()
        };
        let (small, one) = (full(1e-39, &[2, 4]), full(1.0, &[2, 4]));
        let run = || {
            let [y, _, _, dw] = run(&small, &full(1.0, &[4, 4]), None, &one);
            let [_, dx, sum, _] = run(&one, &full(1e-39, &[4, 4]), None, &one);
            [y[0], dx[0], sum[0] - 1.0, dw[0]]
        };
        let _model = use_model();
        assert_eq!(run(), [0.0; 4]);
    }
}
