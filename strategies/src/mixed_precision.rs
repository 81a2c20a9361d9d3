//! dtypes of parameters, gradients and activations.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// A floating-point dtype, as configuration files spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// bfloat16. On a CPU it is emulated: layers compute in f32 and round.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
}

impl From<DTypeName> for DType {
    fn from(name: DTypeName) -> Self {
        match name {
            DTypeName::Bf16 => DType::BF16,
            DTypeName::F16 => DType::F16,
            DTypeName::F32 => DType::F32,
            DTypeName::F64 => DType::F64,
        }
    }
}

/// As PyTorch FSDP2's `MixedPrecisionPolicy`. A field that is left out changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MixedPrecisionPolicy {
    /// dtype that parameters are gathered in and computed with. The optimizer's values keep theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub param_dtype: Option<DTypeName>,
    /// dtype that gradients are accumulated and reduced in; that of the optimizer's values unless
    /// given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<DTypeName>,
    /// dtype that a unit's output is cast to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_dtype: Option<DTypeName>,
    /// Whether a unit's floating-point input is cast to `param_dtype`.
    pub cast_forward_inputs: bool,
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }
}
