//! Converting values to a dtype of a smaller range.

use std::path::Path;

use candle_core::{DType, Tensor};

use super::shard_file::on_host;
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::execution::read;

/// Converts the values of the tensor `name`. `location` is the checkpoint, for messages.
///
/// # Errors
/// If a finite value would become infinite, naming tensor, value and dtype.
pub(super) fn converted(
    location: &Path,
    name: &str,
    values: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let narrow = values.to_dtype(dtype)?;
    if !narrows(values.dtype(), dtype)
        || !storage::with_bytes(&on_host(&narrow)?, |bytes| has_infinite(bytes, dtype))?
    {
        return Ok(narrow);
    }
    let wide = read::host::<f64>(&on_host(values)?.to_dtype(DType::F64)?)?;
    let found = read::host::<f64>(&on_host(&narrow)?.to_dtype(DType::F64)?)?;
    let lost = wide.iter().zip(found).find(|(wide, found)| wide.is_finite() && found.is_infinite());
    match lost {
        None => Ok(narrow),
        Some((value, _)) => Err(Error::checkpoint(
            location,
            format!(
                "tensor `{name}`: the value {} does not fit into {dtype:?}, whose largest is {}; take {}",
                shown(*value),
                shown(largest(dtype)),
                if dtype == DType::F16 { "bf16 or f32" } else { "the dtype that it is stored in" }
            ),
        )),
    }
}

/// Whether finite values of a dtype may be too large for another one.
fn narrows(from: DType, to: DType) -> bool {
    // The largest exponent.
    let range = |dtype| match dtype {
        DType::F16 => Some(15),
        DType::BF16 => Some(127),
        DType::F32 => Some(128),
        DType::F64 => Some(1024),
        _ => None,
    };
    match (range(from), range(to)) {
        (Some(from), Some(to)) => from > to,
        _ => false,
    }
}

/// Whether there are infinities or NaN, by their exponents.
fn has_infinite(bytes: &[u8], dtype: DType) -> bool {
    let words = |mask: u16| {
        let (words, _) = bytes.as_chunks::<2>();
        words.iter().fold(false, |any, word| any | (u16::from_le_bytes(*word) & mask == mask))
    };
    match dtype {
        DType::F16 => words(0x7c00),
        DType::BF16 => words(0x7f80),
        _ => {
            let (words, _) = bytes.as_chunks::<4>();
            let mask = 0x7f80_0000;
            words.iter().fold(false, |any, word| any | (u32::from_le_bytes(*word) & mask == mask))
        }
    }
}

/// Formats a value for a message.
fn shown(value: f64) -> String {
    if value.abs() < 1e7 { value.to_string() } else { format!("{value:.3e}") }
}

/// The largest finite value of a dtype.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        // f32's largest value in 8 bits of precision.
        DType::BF16 => f64::from(f32::from_bits(0x7f7f_0000)),
        _ => f64::from(f32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use fulgurite_test_message::assert_says;

    #[test]
    fn values_out_of_range_are_named() {
        let floats = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap();
        let error = |values: &[f32], dtype| {
            converted(Path::new("full"), "w", &floats(values), dtype).unwrap_err().to_string()
        };
        assert_says!(error(&[1.0, -70000.0], DType::F16), "checkpoint full … `w` … -70000 … F16 …");
        assert_says!(error(&[f32::MAX], DType::BF16), "checkpoint full … `w` … 3.403e38 … BF16 …");
        let wide = Tensor::new(&[1e300f64], &Device::Cpu).unwrap();
        assert_says!(
            converted(Path::new("full"), "w", &wide, DType::F32).unwrap_err(),
            "checkpoint full: tensor `w` … 1.000e300 does not fit into F32 … dtype …"
        );
        // Values that are not finite before the conversion stay.
        let kept = converted(
            Path::new("full"),
            "w",
            &floats(&[f32::INFINITY, f32::NAN, 65504.0]),
            DType::F16,
        )
        .unwrap();
        let kept = kept.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert!(kept[0].is_infinite() && kept[1].is_nan() && kept[2] == 65504.0);
        let ids = Tensor::new(&[70000u32], &Device::Cpu).unwrap();
        assert!(converted(Path::new("full"), "ids", &ids, DType::F32).is_ok());
    }
}
