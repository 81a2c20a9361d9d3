//! Compression of gradients to 16 bits.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::collective::{ProcessGroup, ReduceOp, Work};
use fulgurite_engine::memory::{self, MemoryKind};
use fulgurite_engine::strategy::{GradientBucket, GradientCompression, GradientCompressionConfig};
use fulgurite_error::Result;
use serde::{Deserialize, Serialize};

/// `gradient_compression = "bf16"` (PyTorch's `bf16_compress_hook`): gradients are rounded to
/// bfloat16. This repository's transports sum them in f32 and round the sum once more. bfloat16 has
/// the range of f32 and 8 bits of precision. Keeps no state.
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Bf16Compression {}

/// `gradient_compression = "fp16"` (PyTorch's `fp16_compress_hook`): the same in half precision,
/// which has 11 bits of precision and a maximum of 65504. A larger sum is infinite, and so is the
/// gradient norm. Keeps no state.
///
/// Gradients are divided before the sum by about the square root of the number of ranks, rounded to
/// a power of two (PyTorch FSDP's `gradient_predivide_factor`), and multiplied by it after.
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct Fp16Compression {}

impl GradientCompression for Bf16Compression {
    fn all_reduce(
        &mut self,
        bucket: GradientBucket,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        all_reduce_in(DType::BF16, bucket.values, group)
    }
}

impl GradientCompression for Fp16Compression {
    fn all_reduce(
        &mut self,
        bucket: GradientBucket,
        group: &Arc<dyn ProcessGroup>,
    ) -> Result<Work> {
        all_reduce_in(DType::F16, bucket.values, group)
    }

    fn predivide_factor(&self, ranks: usize) -> f64 {
        predivide_factor(ranks)
    }
}

/// Starts to sum `values`, sent in `dtype`, or unchanged if they are not wider.
fn all_reduce_in(dtype: DType, values: Tensor, group: &Arc<dyn ProcessGroup>) -> Result<Work> {
    if values.dtype().size_in_bytes() <= dtype.size_in_bytes() {
        return group.all_reduce(&values, ReduceOp::Sum);
    }
    let _kind = memory::of_kind(MemoryKind::Gradients);
    let rounded = group.empty(values.elem_count(), dtype, values.device())?;
    storage::copy_from(&rounded, &values)?;
    let work = group.all_reduce(&rounded, ReduceOp::Sum)?;
    Ok(Work::pending(move || {
        work.wait()?;
        storage::copy_from(&values, &rounded)
    }))
}

/// The factor of PyTorch FSDP's `_get_gradient_predivide_factor`: about the square root of the
/// number of ranks, so that the range before the sum equals the range after it.
fn predivide_factor(ranks: usize) -> f64 {
    let mut factor = 1;
    while ranks.is_multiple_of(factor) && ranks / factor > factor {
        factor *= 2;
    }
    factor as f64
}

#[typetag::serde(name = "bf16")]
impl GradientCompressionConfig for Bf16Compression {
    fn build(&self) -> Result<Box<dyn GradientCompression>> {
        Ok(Box::new(self.clone()))
    }
}

#[typetag::serde(name = "fp16")]
impl GradientCompressionConfig for Fp16Compression {
    fn build(&self) -> Result<Box<dyn GradientCompression>> {
        Ok(Box::new(self.clone()))
    }
}

fulgurite_config::register_gradient_compression!(
    "bf16",
    Bf16Compression,
    "replicas send gradients in bfloat16: half of the bytes",
    "\"bf16\""
);
fulgurite_config::register_gradient_compression!(
    "fp16",
    Fp16Compression,
    "replicas send gradients in half precision, divided before they are summed",
    "\"fp16\""
);

#[cfg(test)]
mod tests {
    use super::predivide_factor;

    /// Values of PyTorch's function.
    #[test]
    fn predivide_factor_is_about_the_square_root() {
        let factors = [1, 2, 3, 4, 6, 8, 12, 16, 64, 128].map(predivide_factor);
        assert_eq!(factors, [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0, 8.0, 16.0]);
    }
}
