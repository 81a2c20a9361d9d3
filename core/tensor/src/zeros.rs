//! Zeros that nobody writes: the system's pages have them.

use bytemuck::allocation::zeroed_vec;
use candle_core::{DType, Device, Result, Shape, Tensor};

/// `Tensor::zeros` in the host's memory. candle writes zeros of some types one by one.
pub(crate) fn on_host(shape: &Shape, dtype: DType) -> Result<Tensor> {
    let elements = shape.elem_count();
    match dtype {
        DType::BF16 => Tensor::from_vec(zeroed_vec::<half::bf16>(elements), shape, &Device::Cpu),
        DType::F16 => Tensor::from_vec(zeroed_vec::<half::f16>(elements), shape, &Device::Cpu),
        _ => Tensor::zeros(shape, dtype, &Device::Cpu),
    }
}
