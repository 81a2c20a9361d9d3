//! dtypes of parameters, gradients and activations.

use candle_core::DType;
use fulgurite_engine::module::{ModuleDtype, innermost_match};
use fulgurite_error::{Error, Result};
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Whether a unit's floating-point inputs are cast to the dtype that it computes in. Layers in it cast theirs
    /// in any case.
    pub cast_forward_inputs: bool,
    /// Units and layers with other dtypes, as FSDP2 has where `fully_shard` is given a policy for a module.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<DtypeOverride>,
}

/// Other dtypes for some units or layers. What is left out is as for the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DtypeOverride {
    /// Pattern that names units or layers. Of several that name a module, or modules around it, the
    /// one for the innermost counts, and of those the last.
    pub modules: String,
    /// dtype that their parameters are gathered in and computed with. A unit casts its inputs to that, and its outputs to
    /// the dtype of the others; a layer alone can be in f32 where the others are in half precision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param_dtype: Option<DTypeName>,
    /// dtype that their gradients are accumulated and reduced in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<DTypeName>,
}

impl MixedPrecisionPolicy {
    /// Whether it changes nothing.
    pub(crate) fn is_empty(&self) -> bool {
        let dtypes = self.param_dtype.or(self.reduce_dtype).or(self.output_dtype);
        dtypes.is_none() && self.overrides.is_empty()
    }

    /// Checks what can be said without a model.
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

    /// The dtypes of modules that compute in another one than the model. Each override is among them, so that its pattern
    /// is compared with the model.
    pub(crate) fn module_dtypes(&self) -> Vec<ModuleDtype> {
        let of = |over: &DtypeOverride| ModuleDtype {
            modules: over.modules.clone(),
            compute_dtype: over.param_dtype.map(DType::from),
        };
        self.overrides.iter().map(of).collect()
    }

    /// dtype that the gradient of the parameter with this name is accumulated and reduced in; `None`: that of the
    /// optimizer's values.
    pub(crate) fn reduce_dtype_of(&self, fqn: &str) -> Option<DType> {
        let overrides = || self.overrides.iter().filter(|over| over.reduce_dtype.is_some());
        let found = innermost_match(overrides().map(|over| over.modules.as_str()), fqn);
        let over = found.and_then(|found| overrides().nth(found));
        over.and_then(|over| over.reduce_dtype).or(self.reduce_dtype).map(DType::from)
    }
}

impl Default for MixedPrecisionPolicy {
    fn default() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
            overrides: Vec::new(),
        }
    }
}
