//! dtypes of parameters, gradients and activations.

use candle_core::DType;
use fulgurite_engine::module::{ModuleDtype, innermost_match};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// A floating-point dtype, as configuration files spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeName {
    /// bfloat16. Emulated on a CPU: layers compute in f32 and round.
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

/// Like PyTorch FSDP2's `MixedPrecisionPolicy`. Missing fields change nothing.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct MixedPrecisionPolicy {
    /// dtype for gathering and computing parameters. The optimizer's values keep their dtype.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub param_dtype: Option<DTypeName>,
    /// dtype for accumulating and reducing gradients; by default the dtype of the optimizer's
    /// values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<DTypeName>,
    /// dtype to which a unit's output is cast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_dtype: Option<DTypeName>,
    /// Whether a unit's floating-point inputs are cast to its compute dtype. Layers in the unit
    /// always cast their inputs.
    #[default(true)]
    pub cast_forward_inputs: bool,
    /// Units and layers with other dtypes, like FSDP2's `fully_shard` with a policy for a module.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<DtypeOverride>,
}

/// Other dtypes for some units or layers. Missing fields keep the common dtypes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DtypeOverride {
    /// Pattern of units or layers. If several match a module or modules around it, the match of the
    /// innermost module wins; among these the last.
    pub modules: String,
    /// dtype for gathering and computing their parameters. A unit casts its inputs to it and its
    /// outputs back to the common dtype. A single layer can be in f32 while others are in half
    /// precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param_dtype: Option<DTypeName>,
    /// dtype for accumulating and reducing their gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<DTypeName>,
}

impl MixedPrecisionPolicy {
    /// Whether the policy changes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        let dtypes = self.param_dtype.or(self.reduce_dtype).or(self.output_dtype);
        dtypes.is_none() && self.overrides.is_empty()
    }

    /// Checks the policy without a model.
    ///
    /// # Errors
    /// If an override overrides nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let empty = |over: &&DtypeOverride| over.param_dtype.or(over.reduce_dtype).is_none();
        match self.overrides.iter().find(empty) {
            None => Ok(()),
            Some(over) => Err(Error::Config(format!(
                "`trainer.strategy.mixed_precision.overrides`: the one for {:?} has neither `param_dtype` nor \
                 `reduce_dtype`, so it overrides nothing",
                over.modules
            ))),
        }
    }

    /// The dtypes of all overrides, so that each pattern is checked against the model.
    pub(crate) fn module_dtypes(&self) -> Vec<ModuleDtype> {
        let of = |over: &DtypeOverride| ModuleDtype {
            modules: over.modules.clone(),
            compute_dtype: over.param_dtype.map(DType::from),
        };
        self.overrides.iter().map(of).collect()
    }

    /// dtype for accumulating and reducing this parameter's gradient; `None` for the dtype of the
    /// optimizer's values.
    pub(crate) fn reduce_dtype_of(&self, fqn: &str) -> Option<DType> {
        let overrides = || self.overrides.iter().filter(|over| over.reduce_dtype.is_some());
        let found = innermost_match(overrides().map(|over| over.modules.as_str()), fqn);
        let over = found.and_then(|found| overrides().nth(found));
        over.and_then(|over| over.reduce_dtype).or(self.reduce_dtype).map(DType::from)
    }
}
