//! The types of tensors in a GGUF file.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::storage::with_bytes;
use fulgurite_error::{Error, Result};

/// The type that most matrices of a GGUF file get.
///
/// Vectors and norms are always f32. Matrices whose rows do not fit a type's blocks get another
/// type, as in llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufDtype {
    /// 32 bits.
    F32,
    /// 16 bits, IEEE half precision.
    F16,
    /// 16 bits, the upper half of an f32.
    Bf16,
    /// 8.5 bits: blocks of 32 integers with a scale in f16.
    Q8_0,
    /// 4.5 bits: blocks of 256 with scales and minima. The output matrix gets Q6_K.
    Q4K,
}

impl GgufDtype {
    /// The number of `general.file_type`: `LLAMA_FTYPE` of llama.cpp.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            // Q4_K_S, which is "mostly Q4_K".
            Self::Q4K => 14,
            Self::Bf16 => 32,
        }
    }

    /// Returns the type of a matrix whose rows have this many elements, as `tensor_type_fallback`
    /// of llama.cpp chooses it. `is_output` is true for the matrix that gives the logits.
    pub(super) fn of_matrix(self, columns: usize, is_output: bool) -> GgmlDType {
        let fits = |dtype: GgmlDType| columns.is_multiple_of(dtype.block_size());
        let choices: &[GgmlDType] = match self {
            Self::F32 => &[GgmlDType::F32],
            Self::F16 => &[GgmlDType::F16],
            Self::Bf16 => &[GgmlDType::BF16],
            Self::Q8_0 => &[GgmlDType::Q8_0],
            Self::Q4K if is_output => &[GgmlDType::Q6K, GgmlDType::Q8_0],
            Self::Q4K => &[GgmlDType::Q4K, GgmlDType::Q5_0],
        };
        choices.iter().copied().find(|dtype| fits(*dtype)).unwrap_or(GgmlDType::F16)
    }
}

/// The name of a type in messages.
pub(super) fn type_name(dtype: GgmlDType) -> String {
    format!("{dtype:?}").to_lowercase().replace("4k", "4_k").replace("6k", "6_k")
}

/// The number of a type in a file: `ggml_type` of llama.cpp.
pub(super) fn type_number(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    }
}

/// Size of a tensor of so many elements, in bytes.
pub(super) fn size_of(dtype: GgmlDType, elements: usize) -> usize {
    elements / dtype.block_size() * dtype.type_size()
}

/// Returns the bytes of f32 values `[rows, columns]` or `[elements]` as this type.
///
/// # Errors
/// If a value is beyond the range of f16, or is not finite and would spoil its block.
pub(super) fn encoded(name: &str, values: &Tensor, dtype: GgmlDType) -> Result<Vec<u8>> {
    if matches!(dtype, GgmlDType::F32 | GgmlDType::BF16) {
        let to = if dtype == GgmlDType::F32 { DType::F32 } else { DType::BF16 };
        return with_bytes(&values.to_dtype(to)?.contiguous()?, <[u8]>::to_vec);
    }
    let largest = values.abs()?.flatten_all()?.max(0)?;
    let largest: f32 = with_bytes(&largest, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))?;
    let sum: f32 =
        with_bytes(&values.sum_all()?, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))?;
    let limit = 65_504.0;
    // The largest of values may leave NaN out.
    let fits = !sum.is_nan() && largest <= limit;
    if !fits {
        return Err(Error::other(format!(
            "tensor `{name}` has values that {} cannot hold (the largest is {largest}); write the file with `--dtype \
             bf16` or `--dtype f32`",
            type_name(dtype)
        )));
    }
    match dtype {
        GgmlDType::F16 => with_bytes(&values.to_dtype(DType::F16)?.contiguous()?, <[u8]>::to_vec),
        dtype => Ok(QTensor::quantize(&values.contiguous()?, dtype)?.data()?.into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn rows_choose_the_type() {
        let of = |dtype: GgufDtype, columns| type_name(dtype.of_matrix(columns, false));
        assert_eq!(of(GgufDtype::Q4K, 512), "q4_k");
        assert_eq!(of(GgufDtype::Q4K, 96), "q5_0");
        assert_eq!(of(GgufDtype::Q4K, 40), "f16");
        assert_eq!(of(GgufDtype::Q8_0, 96), "q8_0");
        assert_eq!(of(GgufDtype::Q8_0, 40), "f16");
        assert_eq!(type_name(GgufDtype::Q4K.of_matrix(512, true)), "q6_k");
        assert_eq!(type_name(GgufDtype::Q4K.of_matrix(96, true)), "q8_0");
    }

    #[test]
    fn values_beyond_f16_are_refused() {
        let values = |x: f32| Tensor::from_vec(vec![x; 32], (1, 32), &Device::Cpu).unwrap();
        for dtype in [GgmlDType::F16, GgmlDType::Q8_0] {
            for wrong in [1e6, f32::NAN, f32::NEG_INFINITY] {
                let error = encoded("w", &values(wrong), dtype).unwrap_err().to_string();
                assert!(error.contains("`w`") && error.contains("--dtype bf16"), "{error}");
            }
            let bytes = encoded("w", &values(1.5), dtype).unwrap();
            assert_eq!(bytes.len(), size_of(dtype, 32));
        }
        assert_eq!(encoded("w", &values(1e6), GgmlDType::BF16).unwrap().len(), 64);
    }
}
