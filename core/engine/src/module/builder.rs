//! The builder that a model's constructors take.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Device};

use super::ActivationCheckpointing;
use super::pattern::pattern_matches;
use super::tree::{ModuleInfo, ModuleTree};
use super::unit::{Unit, UnitHandle};
use super::var_builder::Recorder;
use crate::parallel::LayerHandle;
use crate::parallel::ParallelLayer;
use crate::parameter::{Init, Parameter, ParameterSpec};
use crate::{Error, Result};

/// Device, dtypes and options that a model is built with; a strategy may change them.
#[derive(Debug, Clone)]
pub struct ModuleInit {
    /// Device of the parameters.
    pub device: Device,
    /// dtype of the values that the optimizer updates.
    pub dtype: DType,
    /// dtype that layers compute with.
    pub compute_dtype: DType,
    /// Patterns of parameters that get no gradient, as
    /// [`pattern_matches`](super::pattern_matches) reads them.
    pub frozen: Vec<String>,
    /// Which units are computed again in backward.
    pub activation_checkpointing: ActivationCheckpointing,
}

impl Default for ModuleInit {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            compute_dtype: DType::F32,
            frozen: vec![],
            activation_checkpointing: ActivationCheckpointing::default(),
        }
    }
}

/// Declares modules and parameters under a path, and allocates nothing.
///
/// ```
/// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::Linear;
///
/// let b = ModuleBuilder::new(ModuleInit::default());
/// let head = Linear::new(&b.pp("lm_head"), 4096, 128_000)?; // no memory yet
/// let tree = b.finish()?;
/// assert_eq!(tree.parameters()[0].fqn(), "lm_head.weight");
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ModuleBuilder {
    tree: Arc<Mutex<ModuleTree>>,
    init: Arc<ModuleInit>,
    path: String,
    unit: Option<usize>,
    frozen: bool,
}

impl ModuleBuilder {
    /// A builder at the root of an empty tree.
    pub fn new(init: ModuleInit) -> Self {
        Self {
            tree: Arc::default(),
            init: Arc::new(init),
            path: String::new(),
            unit: None,
            frozen: false,
        }
    }

    /// The builder for the submodule `name` (one segment or several, separated by dots).
    #[must_use]
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self { path: self.join(&name.to_string()), ..self.clone() }
    }

    /// This builder, for parameters that get no gradient.
    #[must_use]
    pub fn frozen(&self) -> Self {
        Self { frozen: true, ..self.clone() }
    }

    /// The path so far.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The device that parameters will live on.
    pub fn device(&self) -> &Device {
        &self.init.device
    }

    /// The dtype that layers compute with.
    pub fn compute_dtype(&self) -> DType {
        self.init.compute_dtype
    }

    /// Builds the submodule at `name` as a unit.
    ///
    /// # Errors
    /// Inside another unit: units do not nest.
    pub fn unit<M>(&self, name: &str, build: impl FnOnce(&Self) -> Result<M>) -> Result<Unit<M>> {
        let path = self.join(name);
        if self.unit.is_some() {
            let message = "a unit cannot be built inside another unit".to_owned();
            return Err(Error::Module { path, message });
        }
        let handle = {
            let mut tree = self.tree();
            let handle = UnitHandle::new(tree.units.len(), path.clone());
            tree.units.push(handle.clone());
            handle
        };
        let builder = Self { path, unit: Some(handle.index()), ..self.clone() };
        Ok(Unit::new(build(&builder)?, handle))
    }

    /// Records the kind of the layer at this path and what tensor-parallel plans may do to it, and
    /// returns the layer's handle. Layers of `nn` call it themselves.
    ///
    /// # Errors
    /// If there is a layer at this path already.
    pub fn declare(&self, parallel: impl ParallelLayer) -> Result<LayerHandle> {
        let layer = LayerHandle::new(self.path.clone());
        let (kind, parallel) = (parallel.kind(), Arc::new(parallel));
        let info = ModuleInfo { kind, unit: self.unit, layer: layer.clone(), parallel };
        self.tree().declare(&self.path, info)?;
        Ok(layer)
    }

    /// Declares the parameter `name` of this module.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn parameter(
        &self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        init: Init,
    ) -> Result<Parameter> {
        self.add_parameter(name, shape.into(), init, false)
    }

    pub(super) fn add_parameter(
        &self,
        name: &str,
        shape: Vec<usize>,
        init: Init,
        external: bool,
    ) -> Result<Parameter> {
        let fqn = self.join(name);
        let frozen = self.frozen || self.init.frozen.iter().any(|p| pattern_matches(p, &fqn));
        let parameter = Parameter::new(ParameterSpec {
            fqn,
            shape,
            dtype: self.init.dtype,
            compute_dtype: self.init.compute_dtype,
            device: self.init.device.clone(),
            init,
            requires_grad: !frozen,
            external,
        })?;
        self.tree().add_parameter(parameter.clone(), self.unit)?;
        Ok(parameter)
    }

    /// Declares `name` of this module as another name of `parameter` (tied weights). A parameter
    /// that is tied across units belongs to the root unit.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn tie(&self, name: &str, parameter: &Parameter) -> Result<()> {
        self.tree().tie(&self.join(name), parameter, self.unit)
    }

    /// A `candle_nn::VarBuilder` at this path: unmodified layers and models of candle_nn and
    /// candle-transformers take their parameters from it. Asking twice for one name ties.
    pub fn var_builder(&self) -> candle_nn::VarBuilder<'static> {
        let recorder: Box<dyn candle_nn::var_builder::SimpleBackend> =
            Box::new(Recorder(Self { path: String::new(), ..self.clone() }));
        let builder = candle_nn::VarBuilder::from_backend(
            recorder,
            self.init.compute_dtype,
            self.init.device.clone(),
        );
        self.path.split('.').filter(|s| !s.is_empty()).fold(builder, |b, segment| b.pp(segment))
    }

    /// Returns the recorded tree. Later declarations through clones of this builder are lost.
    ///
    /// # Errors
    /// If no parameter was declared, or the units whose activations are to be checkpointed are not
    /// there.
    pub fn finish(&self) -> Result<ModuleTree> {
        let tree = std::mem::take(&mut *self.tree());
        if tree.parameters().is_empty() {
            return Err(Error::Module {
                path: self.path.clone(),
                message: "the model declared no parameters; build its layers from the \
                          ModuleBuilder that configure_model is given"
                    .to_owned(),
            });
        }
        self.init.activation_checkpointing.apply(&tree, &self.init.device)?;
        Ok(tree)
    }

    /// Records that a layer here holds the parameter's compute tensor itself.
    pub(super) fn expose_tensor(&self, parameter: &Parameter) {
        self.tree().expose_tensor(parameter, self.unit);
    }

    pub(super) fn join(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    pub(super) fn tree(&self) -> MutexGuard<'_, ModuleTree> {
        self.tree.lock().expect("no panic while recording")
    }
}
