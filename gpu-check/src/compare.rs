//! Test values, and the difference between two lists of values.

use candle_core::{DType, Device, Tensor};
use fulgurite::core::execution::transfer;
use fulgurite::core::random::{Purpose, Stream};
use fulgurite_error::Result;

/// Normally distributed values on the host; the name is the seed.
pub(crate) fn randn(name: &str, shape: &[usize]) -> Result<Tensor> {
    let mut values = vec![0f64; shape.iter().product()];
    Stream::new(11, Purpose::Sample, name).fill_normal(0, &mut values);
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// The elements of a tensor on any device.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = transfer::to_host(&tensor.detach(), "comparison")?;
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// The largest difference between two lists, relative to the largest finite expected value.
/// Infinite if the lengths differ, or if unequal elements include a NaN or an infinity.
pub(crate) fn difference(got: &[f64], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let scale = want.iter().filter(|x| x.is_finite()).fold(1e-30, |most: f64, x| most.max(x.abs()));
    let apart = |(got, want): (&f64, &f64)| match got == want || (got.is_nan() && want.is_nan()) {
        true => 0.0,
        false if got.is_finite() && want.is_finite() => (got - want).abs() / scale,
        false => f64::INFINITY,
    };
    got.iter().zip(want).map(apart).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_is_relative_to_the_largest() {
        assert_eq!(difference(&[1.0, -4.5], &[1.0, -4.0]), 0.125);
        assert_eq!(difference(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY]), 0.0);
        assert_eq!(difference(&[f64::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[f64::NAN]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    }
}
