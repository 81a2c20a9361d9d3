//! Reproducible numbers for tests, in every dtype.

use bytemuck::Pod;
use candle_core::{Device, Tensor, WithDType};
use fulgurite_core::random::{Purpose, Stream};
use fulgurite_kernels::Float;
use half::{bf16, f16};

/// A candle dtype that kernels support.
pub(crate) trait Dtype: Pod + WithDType + PartialEq + std::fmt::Debug {
    const FLOAT: Float;
}

impl Dtype for f32 {
    const FLOAT: Float = Float::F32;
}
impl Dtype for f64 {
    const FLOAT: Float = Float::F64;
}
impl Dtype for bf16 {
    const FLOAT: Float = Float::Bf16;
}
impl Dtype for f16 {
    const FLOAT: Float = Float::F16;
}

/// Standard normal numbers.
pub(crate) fn normal<T: Dtype>(what: &str, n: usize) -> Vec<T> {
    let stream = Stream::new(11, Purpose::Sample, what);
    (0..n as u64).map(|i| T::from_f64(stream.normal(i))).collect()
}

/// A tensor on the CPU.
pub(crate) fn tensor<T: Dtype>(values: &[T], shape: impl Into<candle_core::Shape>) -> Tensor {
    Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
}
