//! Matrix products by cuBLAS.
#![allow(unsafe_code)] // calls of cuBLAS

use std::ffi::c_void;

use candle_core::cuda::gemm_reduced_precision_f32;
use candle_core::cuda_backend::WrapErr as _;
use candle_core::cuda_backend::cudarc::cublas::result::{gemm_ex, gemm_strided_batched_ex};
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t as Compute, cublasGemmAlgo_t as Algorithm, cublasOperation_t as Operation,
    cudaDataType_t as DataType,
};
use candle_core::{CudaDevice, DType, Tensor};
use fulgurite_error::{Error, Result};

use super::address;
use super::layers::taken;
use crate::{Float, Product};

/// Writes the gradient of a linear layer's weight, `grad^T x`, to `out`, or adds it. `x` is
/// `[rows, inputs]` and `grad` is `[rows, outputs]`, both in f32, bf16 or f16. `out` is in f32
/// whatever their dtype, so sums are not rounded. Returns false, and does nothing, for tensors of
/// other dtypes or devices.
///
/// # Errors
/// If shapes do not fit, or cuBLAS fails.
pub fn weight_grad(x: &Tensor, grad: &Tensor, out: &Tensor, add: bool) -> Result<bool> {
    let (Some((device, dtype)), Some((_, same))) = (taken(x), taken(grad)) else {
        return Ok(false);
    };
    let ((rows, inputs), (grad_rows, outputs)) = (x.dims2()?, grad.dims2()?);
    if grad_rows != rows || out.elem_count() != inputs * outputs {
        return Err(Error::other(format!(
            "the gradient of a weight from {:?} and {:?} is not {:?}",
            x.dims(),
            grad.dims(),
            out.dims()
        )));
    }
    let there = [grad, out].iter().all(|t| t.device().same_device(x.device()));
    if !there || dtype != same || out.dtype() != DType::F32 || !out.is_contiguous() {
        return Ok(false);
    }
    let (x, grad) = (x.contiguous()?, grad.contiguous()?);
    let addresses = [address(&x)?, address(&grad)?, address(out)?];
    let Some(product) = Product::weight_grad(dtype, addresses, [rows, inputs, outputs], add) else {
        return Ok(false);
    };
    // SAFETY: the three tensors are held until the call is queued, in the order of the device's one
    // stream, and their sizes are the product's.
    unsafe { run_product(&product, addresses, device) }?;
    Ok(true)
}

/// Adds the gradient of a linear layer's input, `grad weight`, to `sum`. `grad` is
/// `[rows, outputs]`, `weight` is `[outputs, inputs]` and `sum` is `[rows, inputs]`, all of one
/// dtype: f32, bf16 or f16. The sum is rounded once. Returns false, and does nothing, for tensors
/// of other dtypes or devices, or if `sum` is not contiguous.
///
/// # Errors
/// If shapes do not fit, or cuBLAS fails.
pub fn add_input_grad(grad: &Tensor, weight: &Tensor, sum: &Tensor) -> Result<bool> {
    let Some((device, dtype)) = taken(grad) else { return Ok(false) };
    let ((rows, outputs), (weight_outputs, inputs)) = (grad.dims2()?, weight.dims2()?);
    if weight_outputs != outputs || sum.dims() != [rows, inputs] {
        return Err(Error::other(format!(
            "the gradient of an input from {:?} and a weight of {:?} is not {:?}",
            grad.dims(),
            weight.dims(),
            sum.dims()
        )));
    }
    let alike = |t: &&Tensor| t.dtype() == grad.dtype() && t.device().same_device(grad.device());
    if ![weight, sum].iter().all(alike) || !sum.is_contiguous() || inputs == 0 {
        return Ok(false);
    }
    let held = [grad.contiguous()?, weight.contiguous()?];
    let [grad, weight, sum] = [address(&held[0])?, address(&held[1])?, address(sum)?];
    let sizes = [rows, inputs, outputs];
    let Some(product) = Product::add_input_grad(dtype, [grad, weight, sum], sizes) else {
        return Ok(false);
    };
    // SAFETY: the tensors are held until the call is queued, in the order of the device's one
    // stream, and their sizes are the product's. Its first matrix is the weight.
    unsafe { run_product(&product, [weight, grad, sum], device) }?;
    Ok(true)
}

/// Queues a product on the device's stream.
///
/// # Safety
/// `a`, `b` and `c` must be addresses of memory on this device with the product's sizes. The memory
/// must stay allocated until the work now queued on the stream is done.
pub(super) unsafe fn run_product(
    product: &Product,
    [a, b, c]: [u64; 3],
    device: &CudaDevice,
) -> Result<()> {
    let data_type = |dtype| match dtype {
        Float::F32 => Ok(DataType::CUDA_R_32F),
        Float::Bf16 => Ok(DataType::CUDA_R_16BF),
        Float::F16 => Ok(DataType::CUDA_R_16F),
        Float::F64 => Err(Error::other("sums of a product are in f32, got f64")),
    };
    let (dtype, out) = (data_type(product.dtype)?, data_type(product.out)?);
    // As in candle's own products, TF32 is for f32 only.
    let compute = match product.dtype == Float::F32 && gemm_reduced_precision_f32() {
        true => Compute::CUBLAS_COMPUTE_32F_FAST_TF32,
        false => Compute::CUBLAS_COMPUTE_32F,
    };
    let operation = |transposed| match transposed {
        true => Operation::CUBLAS_OP_T,
        false => Operation::CUBLAS_OP_N,
    };
    let [transpose_a, transpose_b] = product.transposed.map(operation);
    let [lda, ldb, ldc] = product.leading;
    let [stride_a, stride_b, stride_c] = product.strides;
    let (alpha, beta) = ((&raw const product.alpha).cast(), (&raw const product.beta).cast());
    let (a, b, c) = (a as *const c_void, b as *const c_void, c as *mut c_void);
    let (m, n, k) = (product.m, product.n, product.k);
    let algorithm = Algorithm::CUBLAS_GEMM_DEFAULT_TENSOR_OP;
    device.cuda_stream().context().bind_to_thread().w()?;
    let blas = device.cublas_handle();
    // SAFETY: the caller's promise; alpha and beta are f32, as the compute type requires, and read
    // before the call returns.
    unsafe {
        match product.batch {
            1 => gemm_ex(
                *blas.handle(),
                transpose_a,
                transpose_b,
                m,
                n,
                k,
                alpha,
                a,
                dtype,
                lda,
                b,
                dtype,
                ldb,
                beta,
                c,
                out,
                ldc,
                compute,
                algorithm,
            ),
            batch => gemm_strided_batched_ex(
                *blas.handle(),
                transpose_a,
                transpose_b,
                m,
                n,
                k,
                alpha,
                a,
                dtype,
                lda,
                stride_a,
                b,
                dtype,
                ldb,
                stride_b,
                beta,
                c,
                out,
                ldc,
                stride_c,
                batch,
                compute,
                algorithm,
            ),
        }
    }
    .w()?;
    Ok(())
}
