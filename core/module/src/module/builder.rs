//! The builder passed to the constructors of models.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::{DType, Device};

use super::dtypes::{self, ModuleDtype};
use super::keep_in_fp32;
use super::parallelize::Edge;
use super::pattern::{PATTERN_HELP, any_pattern_matches, pattern_matches};
use super::stage::Stages;
use super::tree::{ModuleInfo, ModuleTree, check_name};
use super::unit::{Unit, UnitHandle};
use super::var_builder::Recorder;
use super::{ActivationCheckpointing, Adapters, Experts, ForeignNames, Quantization};
use crate::parallel::{InputCast, LayerHandle, ParallelLayer};
use crate::parameter::{Buffer, BufferInit, BufferOptions, Init, Parameter, ParameterSpec};
use crate::quantization::{Packed, PackedPart, SCALE_SUFFIX, WeightFormat};
use crate::{Error, Result};
use fulgurite_collective::shard::checked_elem_count;

/// Limits of parameters and of units. Far above real models, but low enough to catch a mistyped
/// number in a configuration at once.
const MAX_PARTS: usize = 1 << 20;

/// Limit of elements: an address space filled with the widest dtype.
const MAX_ELEMENTS: usize = isize::MAX as usize / size_of::<f64>();

/// The kind of code that declares a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// A layer's own parameter.
    Layer,
    /// A parameter of the layer's adapter.
    Adapter,
    /// A candle_nn layer, which holds the compute tensor.
    VarBuilder,
}

/// Device, dtypes and options for building a model. A strategy may change them.
#[derive(Debug, Clone)]
pub struct ModuleInit {
    /// Device of the parameters.
    pub device: Device,
    /// dtype of the values that the optimizer updates.
    pub dtype: DType,
    /// dtype that layers compute with.
    pub compute_dtype: DType,
    /// Patterns of layers that compute in f32 in a half-precision model.
    pub keep_in_fp32: Vec<String>,
    /// Units and layers whose compute dtype differs from the model's.
    pub module_dtypes: Vec<ModuleDtype>,
    /// Patterns of parameters that get no gradient, as defined by
    /// [`pattern_matches`](super::pattern_matches).
    pub frozen: Vec<String>,
    /// Patterns of modules whose layers compute as in an evaluation, in training too, as
    /// [`ModuleBuilder::eval`] says.
    pub eval_mode: Vec<String>,
    /// Adapters. With them, all other parameters are frozen.
    pub adapters: Option<Adapters>,
    /// Quantisation of frozen weights.
    pub quantization: Option<Quantization>,
    /// The units that backward computes again.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Whether batch norms by default compute with the batches of all data-parallel ranks.
    pub sync_batchnorm: bool,
}

impl Default for ModuleInit {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            compute_dtype: DType::F32,
            keep_in_fp32: vec![],
            module_dtypes: vec![],
            frozen: vec![],
            eval_mode: vec![],
            adapters: None,
            quantization: None,
            activation_checkpointing: ActivationCheckpointing::default(),
            sync_batchnorm: false,
        }
    }
}

/// Declares modules and parameters under a path, without allocating memory.
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
    /// The adapters with patterns of the model's own names.
    translated_adapters: Arc<OnceLock<Adapters>>,
    path: String,
    unit: Option<usize>,
    /// Compute dtype of the surrounding unit, or of the model outside of units.
    compute_dtype: DType,
    frozen: bool,
    eval: bool,
}

impl ModuleBuilder {
    /// A builder at the root of an empty tree.
    pub fn new(init: ModuleInit) -> Self {
        Self {
            tree: Arc::default(),
            compute_dtype: init.compute_dtype,
            init: Arc::new(init),
            translated_adapters: Arc::default(),
            path: String::new(),
            unit: None,
            frozen: false,
            eval: false,
        }
    }

    /// The builder for submodule `name` (one or more segments, separated by dots).
    #[must_use]
    pub fn pp(&self, name: impl std::fmt::Display) -> Self {
        Self { path: self.join(&name.to_string()), ..self.clone() }
    }

    /// A copy of this builder whose parameters get no gradient.
    #[must_use]
    pub fn frozen(&self) -> Self {
        Self { frozen: true, ..self.clone() }
    }

    /// A copy of this builder whose layers compute as in an evaluation, in training too, as after
    /// PyTorch's `module.eval()`: without dropout, and batch norms with their running statistics,
    /// which stay as they are.
    ///
    /// Parameters are trained unless they are [`frozen`](Self::frozen). `trainer.eval_mode` does
    /// the same by name.
    ///
    /// ```
    /// use fulgurite_core::module::{ForwardScope, Module as _, ModuleBuilder, ModuleInit};
    /// use fulgurite_core::nn::Dropout;
    /// # use candle_core::{DType, Device, Tensor};
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let dropout = Dropout::new(&b.pp("backbone").frozen().eval().pp("dropout"), 0.5)?;
    /// let x = Tensor::ones((4, 8), DType::F32, &Device::Cpu)?;
    /// let training = ForwardScope { training: true, ..ForwardScope::default() };
    /// assert_eq!(training.run(|| dropout.forward(&x))?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    #[must_use]
    pub fn eval(&self) -> Self {
        Self { eval: true, ..self.clone() }
    }

    /// The path so far.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The parameters' device.
    pub fn device(&self) -> &Device {
        &self.init.device
    }

    /// The compute dtype of a layer at this path: the surrounding unit's, or f32 if the layer is
    /// [kept](ModuleInit::keep_in_fp32) in f32.
    pub fn compute_dtype(&self) -> DType {
        match dtypes::is_half(self.compute_dtype) && self.is_in_fp32() {
            true => DType::F32,
            false => self.compute_dtype,
        }
    }

    /// Whether a pattern requests f32 for the module at this path.
    fn is_in_fp32(&self) -> bool {
        keep_in_fp32::keeps(&self.init.keep_in_fp32, &self.path)
            || dtypes::of(&self.init.module_dtypes, &self.path) == Some(DType::F32)
    }

    /// Builds the submodule at `name` as a unit.
    ///
    /// # Errors
    /// Inside another unit, since units do not nest. If the name is empty or has a space or `*`. If
    /// the model exceeds the limit of units.
    pub fn unit<M>(&self, name: &str, build: impl FnOnce(&Self) -> Result<M>) -> Result<Unit<M>> {
        let path = self.join(name);
        if self.unit.is_some() {
            let message = "a unit cannot be built inside another unit".to_owned();
            return Err(Error::Module { path, message });
        }
        check_name(&path).map_err(|message| Error::module(&path, message))?;
        let model = self.init.compute_dtype;
        let compute_dtype = dtypes::of_unit(&self.init.module_dtypes, &path).unwrap_or(model);
        let handle = {
            let mut tree = self.tree();
            if tree.units.len() >= MAX_PARTS {
                return Err(too_many(path, "units"));
            }
            let dtypes = [compute_dtype, model];
            let handle = UnitHandle::new(tree.units.len(), path.clone(), kind_of::<M>(), dtypes);
            tree.units.push(handle.clone());
            handle
        };
        let builder = Self { path, unit: Some(handle.index()), compute_dtype, ..self.clone() };
        Ok(Unit::new(build(&builder)?, handle))
    }

    /// Declares that the model computes these units one after the other, with
    /// [`stage::through`](super::stage::through), so that a pipeline can cut it between them. The
    /// modules `before`, paths below this builder's, compute before the first unit. All other
    /// modules outside of the units compute behind the last.
    pub fn stages<M>(&self, before: &[impl AsRef<str>], units: &[Unit<M>]) {
        let before = before.iter().map(|name| self.join(name.as_ref())).collect();
        let units = units.iter().map(|unit| unit.handle().index()).collect();
        let mut tree = self.tree();
        if tree.stages.replace(Stages { before, units }).is_some() {
            let because = "it has two models with units of their own, and a pipeline cuts one";
            tree.no_stages.get_or_insert(because.to_owned());
        }
    }

    /// Declares that the module at this path has `count` experts, which expert parallelism can
    /// divide among ranks, and that a row goes to `per_row` of them. The module
    /// [adds](Experts::add) the parameters whose first dimension is the experts, and computes with
    /// the [ranks](Experts::ranks) that have them.
    pub fn experts(&self, count: usize, per_row: usize) -> Experts {
        let experts = Experts::new(self.path.clone(), count, per_row);
        self.tree().experts.push(experts.clone());
        experts
    }

    /// Says why no pipeline can cut the model, although it has [stages](Self::stages) otherwise.
    pub fn no_stages(&self, because: &str) {
        self.tree().no_stages = Some(because.to_owned());
    }

    /// Records the kind of the layer at this path, the tensor-parallel plans it supports and the
    /// dtype it casts its input to, and returns its handle. Layers of `nn` call it themselves.
    ///
    /// # Errors
    /// If this path already has a layer.
    pub fn declare(&self, parallel: impl ParallelLayer) -> Result<LayerHandle> {
        let cast = parallel.input_cast();
        let in_fp32 = cast == InputCast::Own && self.is_in_fp32();
        let dtype = match cast {
            InputCast::Own => Some(self.compute_dtype()),
            InputCast::To(dtype) => Some(dtype),
            InputCast::None => None,
        };
        let keeps_fp32 = in_fp32 && dtypes::is_half(self.compute_dtype);
        let in_eval = self.eval || any_pattern_matches(&self.init.eval_mode, &self.path);
        let layer = LayerHandle::new(self.path.clone(), dtype, keeps_fp32, in_eval);
        let (kind, parallel) = (parallel.kind(), Arc::new(parallel));
        let info = ModuleInfo { kind, unit: self.unit, layer: layer.clone(), parallel };
        let mut tree = self.tree();
        tree.declare(&self.path, info)?;
        if in_fp32 {
            tree.in_fp32.insert(self.path.clone());
        }
        Ok(layer)
    }

    /// Declares an edge: the input of the module `to` is computed from the output of one of the
    /// modules `from`, or from their sum, by operations that keep the layout over tensor-parallel
    /// ranks, such as additions and activation functions. All are paths below this builder's.
    ///
    /// Plans are checked along declared edges before any rank starts
    /// ([`check_edges`](super::ModuleTree::check_edges)). Edges that are not declared are checked
    /// in the first forward, so a model may declare all, some or none.
    ///
    /// ```
    /// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// use fulgurite_core::nn::{Embedding, Linear, RmsNorm};
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// Embedding::new(&b.pp("embedding"), 16, 8)?;
    /// RmsNorm::new(&b.pp("norm"), 8, 1e-5)?;
    /// Linear::new(&b.pp("head"), 8, 16)?;
    /// b.edge(&["embedding"], "norm");
    /// b.edge(&["norm"], "head");
    /// b.edge_to_loss(&["head"]);
    /// b.finish()?;
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    pub fn edge(&self, from: &[impl AsRef<str>], to: &str) {
        self.declare_edge(from, Some(self.join(to)));
    }

    /// As [`edge`](Self::edge), to a loss, which takes whole logits, or those of a head with
    /// [`loss_parallel`](crate::parallel::Colwise::loss_parallel).
    pub fn edge_to_loss(&self, from: &[impl AsRef<str>]) {
        self.declare_edge(from, None);
    }

    fn declare_edge(&self, from: &[impl AsRef<str>], to: Option<String>) {
        let from = from.iter().map(|from| self.join(from.as_ref())).collect();
        self.tree().edges.push(Edge { from, to });
    }

    /// Declares the parameter `name` of this module. The module computes with
    /// [`Parameter::tensor`].
    ///
    /// ```
    /// use candle_core::Tensor;
    /// use fulgurite_core::Result;
    /// use fulgurite_core::module::{Module, ModuleBuilder};
    /// use fulgurite_core::parameter::{Init, Parameter};
    ///
    /// struct Scale(Parameter);
    ///
    /// impl Scale {
    ///     fn new(b: &ModuleBuilder, width: usize) -> Result<Self> {
    ///         Ok(Self(b.parameter("scale", [width], Init::ONES)?))
    ///     }
    /// }
    ///
    /// impl Module for Scale {
    ///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
    ///         Ok(x.broadcast_mul(&self.0.tensor()?)?)
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// If the name is taken, empty, or has a space or `*`, or the initial values are invalid. If
    /// the model would exceed 1,048,576 parameters, or the number of elements that can be
    /// addressed.
    pub fn parameter(
        &self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        init: Init,
    ) -> Result<Parameter> {
        self.add_parameter(name, shape.into(), init, Origin::Layer)
    }

    /// The adapters of the model, if it has any.
    pub fn adapters(&self) -> Option<&Adapters> {
        self.translated_adapters.get().or(self.init.adapters.as_ref())
    }

    /// Says how files of another library name the model's parameters. Patterns of
    /// [`Adapters`] may then be in these names, and files of adapters are translated. Call it
    /// before the first layer; another call changes nothing.
    pub fn set_foreign_names(&self, names: Arc<dyn ForeignNames>) {
        if let Some(adapters) = &self.init.adapters {
            let _ = self.translated_adapters.set(adapters.translated(&*names));
        }
        self.tree().foreign_names.get_or_insert(names);
    }

    /// The adapter requested for the layer at this path, if it is a target of the model's
    /// [`Adapters`]. A layer that calls this declares the adapter's parameters with
    /// [`adapter_parameter`](Self::adapter_parameter), and computes with them.
    pub fn adapter(&self) -> Option<&Adapters> {
        self.adapter_if(Adapters::targets)
    }

    /// Like [`adapter`](Self::adapter), for a linear layer.
    pub fn linear_adapter(&self) -> Option<&Adapters> {
        self.adapter_if(Adapters::targets_linear)
    }

    fn adapter_if(&self, targets: impl Fn(&Adapters, &str) -> bool) -> Option<&Adapters> {
        let adapters = self.adapters().filter(|all| targets(all, &self.path))?;
        self.tree().adapted.insert(self.path.clone());
        Some(adapters)
    }

    /// Declares a parameter of this layer's adapter, which is trained even though the layer is
    /// frozen.
    ///
    /// # Errors
    /// As [`parameter`](Self::parameter).
    pub fn adapter_parameter(
        &self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        init: Init,
    ) -> Result<Parameter> {
        self.add_parameter(name, shape.into(), init, Origin::Adapter)
    }

    /// Declares the magnitudes of the rows of `weight` (`[out, in]`) as a parameter `[out]` of this
    /// layer's adapter. They start as ones. When the weight has values, Fabric or the trainer sets
    /// them to the norms of its rows, from [`ModuleTree::magnitudes`].
    ///
    /// # Errors
    /// As [`parameter`](Self::parameter).
    pub fn adapter_magnitude(&self, name: &str, weight: &Parameter) -> Result<Parameter> {
        let magnitude = self.adapter_parameter(name, [weight.global_shape()[0]], Init::ONES)?;
        self.tree().magnitudes.push((magnitude.clone(), weight.clone()));
        Ok(magnitude)
    }

    pub(super) fn add_parameter(
        &self,
        name: &str,
        shape: Vec<usize>,
        init: Init,
        origin: Origin,
    ) -> Result<Parameter> {
        let fqn = self.join(name);
        if self.check_size(&fqn, &shape)? > 0 {
            init.check().map_err(|message| Error::parameter(&fqn, message))?;
        }
        let requires_grad = !self.freezes(&fqn, origin);
        let compute_dtype = match origin {
            // candle_nn layers do not cast.
            Origin::VarBuilder => self.compute_dtype,
            Origin::Layer | Origin::Adapter => self.compute_dtype(),
        };
        let parameter = Parameter::new(ParameterSpec {
            fqn,
            shape,
            dtype: self.init.dtype,
            compute_dtype,
            device: self.init.device.clone(),
            init,
            requires_grad,
            external: origin == Origin::VarBuilder,
            adapter: origin == Origin::Adapter,
            packed: None,
        })?;
        self.tree().add_parameter(parameter.clone(), self.unit)?;
        Ok(parameter)
    }

    /// Whether a parameter is frozen.
    fn freezes(&self, fqn: &str, origin: Origin) -> bool {
        let of_base = || {
            let adapters = self.adapters();
            self.frozen || adapters.is_some_and(|adapters| !adapters.trains(fqn))
        };
        any_pattern_matches(&self.init.frozen, fqn) || (origin != Origin::Adapter && of_base())
    }

    /// The format requested for the layer's weight, the frozen parameter `name`, by the model's
    /// [`Quantization`]. If `Some`, the layer declares
    /// [packed parameters](Self::packed_parameters).
    pub fn quantization(&self, name: &str) -> Option<WeightFormat> {
        let quantization = self.init.quantization.as_ref().filter(|all| all.targets(&self.path))?;
        if !self.freezes(&self.join(name), Origin::Layer) {
            return None;
        }
        self.tree().quantized.insert(self.path.clone());
        Some(quantization.format)
    }

    /// Declares codes (`name`) and scales (`name_scale`) of a quantised frozen weight of this
    /// shape, `[.., rows, columns]`. Their initial values are the values of `init`, packed.
    ///
    /// # Errors
    /// As [`parameter`](Self::parameter), and if weights of this shape cannot be packed.
    pub fn packed_parameters(
        &self,
        name: &str,
        shape: &[usize],
        init: Init,
        format: WeightFormat,
    ) -> Result<[Parameter; 2]> {
        let weight = self.join(name);
        self.check_size(&weight, shape)?;
        init.check().map_err(|message| Error::parameter(&weight, message))?;
        let columns = shape.last().copied().unwrap_or(0);
        format.check(columns).map_err(|message| {
            let advice = "leave the layer out with `trainer.quantization.exclude`";
            Error::module(&self.path, format!("{message}; {advice}, or choose another size"))
        })?;
        let declare = |fqn: String, part| -> Result<Parameter> {
            let dtype = WeightFormat::dtype(part);
            let parameter = Parameter::new(ParameterSpec {
                fqn,
                shape: format.shape(part, shape),
                dtype,
                compute_dtype: dtype,
                device: self.init.device.clone(),
                init,
                requires_grad: false,
                external: false,
                adapter: false,
                packed: Some(Packed {
                    weight: weight.clone(),
                    shape: shape.to_vec(),
                    format,
                    part,
                }),
            })?;
            self.tree().add_parameter(parameter.clone(), self.unit)?;
            Ok(parameter)
        };
        let codes = declare(weight.clone(), PackedPart::Codes)?;
        Ok([codes, declare(format!("{weight}{SCALE_SUFFIX}"), PackedPart::Scales)?])
    }

    /// Declares the buffer `name` of this module: untrained values, whole on every rank.
    ///
    /// ```
    /// use candle_core::DType;
    /// use fulgurite_core::module::{ModuleBuilder, ModuleInit};
    /// use fulgurite_core::parameter::{BufferOptions, Init};
    ///
    /// let b = ModuleBuilder::new(ModuleInit::default());
    /// let mean = b.buffer("running_mean", [8], Init::ZEROS, BufferOptions::default())?;
    /// let integer = BufferOptions::dtype(DType::I64);
    /// let batches = b.buffer("num_batches_tracked", [], Init::ZEROS, integer)?;
    /// let angles = candle_core::Tensor::arange(0f32, 4., b.device())?;
    /// b.buffer("angles", [4], angles, BufferOptions::default().not_persistent())?;
    /// # Ok::<(), fulgurite_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the name is taken, the values have another shape, the dtype cannot be communicated, or
    /// the buffer is too large.
    pub fn buffer(
        &self,
        name: &str,
        shape: impl Into<Vec<usize>>,
        init: impl Into<BufferInit>,
        options: BufferOptions,
    ) -> Result<Buffer> {
        self.add_buffer(name, shape.into(), init.into(), options, false)
    }

    pub(super) fn add_buffer(
        &self,
        name: &str,
        shape: Vec<usize>,
        init: BufferInit,
        options: BufferOptions,
        is_variable: bool,
    ) -> Result<Buffer> {
        let fqn = self.join(name);
        self.check_size(&fqn, &shape)?;
        let buffer = Buffer::new(fqn, shape, init, options, (&self.init.device, is_variable))?;
        self.tree().add_buffer(buffer.clone())?;
        Ok(buffer)
    }

    /// Whether batch norms by default compute with the batches of all data-parallel ranks
    /// (`trainer.sync_batchnorm`).
    pub fn sync_batchnorm(&self) -> bool {
        self.init.sync_batchnorm
    }

    /// Declares that a layer computes with the batches of all data-parallel ranks, so that the
    /// [`ForwardScope`](super::ForwardScope) gets a process group for it.
    pub fn synchronise_batches(&self) {
        self.tree().synchronise_batches();
    }

    /// Records that a layer here holds the buffer's tensor directly and changes it.
    pub(super) fn expose_buffer(&self, buffer: &Buffer) -> Result<()> {
        self.tree().expose_buffer(buffer, self.unit)
    }

    /// Number of elements of a new parameter. Checks the model's limits.
    fn check_size(&self, fqn: &str, shape: &[usize]) -> Result<usize> {
        let tree = self.tree();
        if tree.parameters().len() >= MAX_PARTS {
            return Err(too_many(fqn.to_owned(), "parameters"));
        }
        let elements = checked_elem_count(shape).filter(|&elements| {
            tree.elem_count().checked_add(elements).is_some_and(|all| all <= MAX_ELEMENTS)
        });
        elements.ok_or_else(|| {
            Error::parameter(
                fqn,
                format!(
                    "has the shape {shape:?}, with which the model has more than {MAX_ELEMENTS} \
                     elements: no machine can address them; make the sizes in `[model]` smaller"
                ),
            )
        })
    }

    /// Declares `name` of this module as another name of `parameter` (tied weights). A parameter
    /// tied across units belongs to the root unit.
    ///
    /// # Errors
    /// If the name is taken.
    pub fn tie(&self, name: &str, parameter: &Parameter) -> Result<()> {
        self.tree().tie(&self.join(name), parameter, self.unit)
    }

    /// A `candle_nn::VarBuilder` at this path. Unmodified layers and models of candle_nn and
    /// candle-transformers take their parameters from it. Requests for the same name are tied.
    pub fn var_builder(&self) -> candle_nn::VarBuilder<'static> {
        let recorder: Box<dyn candle_nn::var_builder::SimpleBackend> =
            Box::new(Recorder(Self { path: String::new(), ..self.clone() }));
        let builder = candle_nn::VarBuilder::from_backend(
            recorder,
            self.compute_dtype,
            self.init.device.clone(),
        );
        self.path.split('.').filter(|s| !s.is_empty()).fold(builder, |b, segment| b.pp(segment))
    }

    /// Returns the recorded tree. Later declarations through clones of this builder are lost.
    ///
    /// # Errors
    /// If no parameter was declared, or the units to checkpoint or the ends of an
    /// [edge](Self::edge) do not exist.
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
        tree.check_ends()?;
        tree.check_stages()?;
        if let (Some(adapters), Some(given)) = (self.adapters(), &self.init.adapters) {
            adapters.check(given, &tree, &tree.adapted)?;
        }
        keep_in_fp32::check(&self.init.keep_in_fp32, &tree, &tree.in_fp32)?;
        for pattern in &self.init.eval_mode {
            if !tree.modules().keys().any(|path| pattern_matches(pattern, path)) {
                return Err(Error::Config(format!(
                    "`trainer.eval_mode`: no layer of the model matches `{pattern}`. {PATTERN_HELP}"
                )));
            }
        }
        let model = self.init.compute_dtype;
        dtypes::check(&self.init.module_dtypes, model, &tree, &tree.in_fp32)?;
        if let Some(quantization) = &self.init.quantization {
            quantization.check(&tree, &tree.quantized)?;
        }
        self.init.activation_checkpointing.apply(&tree)?;
        tree.mark_embeddings_and_heads();
        Ok(tree)
    }

    /// Records that a layer here holds the parameter's compute tensor directly.
    pub(super) fn expose_tensor(&self, parameter: &Parameter) -> Result<()> {
        self.tree().expose_tensor(parameter, self.unit)
    }

    pub(super) fn join(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    pub(super) fn tree(&self) -> MutexGuard<'_, ModuleTree> {
        self.tree.lock().expect("no panic while recording")
    }
}

fn too_many(path: String, parts: &str) -> Error {
    let message = format!(
        "the model has more than {MAX_PARTS} {parts}, which is taken for a mistake; make the numbers of \
         layers in `[model]` smaller"
    );
    Error::Module { path, message }
}

/// The name of a type, without its path and parameters.
fn kind_of<M>() -> &'static str {
    let name = std::any::type_name::<M>();
    let name = name.split('<').next().unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;

    #[test]
    fn impossible_sizes_are_refused() {
        let b = ModuleBuilder::new(ModuleInit::default());
        let error = |shape: &[usize], init| b.parameter("w", shape, init).unwrap_err();
        assert_says!(error(&[1 << 40, 1 << 40], Init::ONES), "parameter `w` … `[model]` smaller");
        assert!(
            error(&[1 << 40, 1 << 40, 0], Init::ONES)
                .to_string()
                .contains("no machine can address")
        );
        assert_says!(
            error(&[2], Init::Normal { mean: 0.0, std: -1.0 }),
            "parameter `w`: cannot start as Normal … std: -1.0 … deviation 0 or more …"
        );
        assert!(b.parameter("w", [2], Init::Uniform { low: 1.0, high: f64::INFINITY }).is_err());
        b.parameter("nothing", [0], Init::Const(f64::NAN)).unwrap();
        b.parameter("half", [MAX_ELEMENTS / 2], Init::ONES).unwrap();
        b.parameter("rest", [MAX_ELEMENTS / 2], Init::ONES).unwrap();
        assert_says!(
            b.parameter("more", [2], Init::ONES).unwrap_err(),
            "parameter `more` … shape [2] … more than 1152921504606846975 … `[model]` …"
        );
    }

    #[test]
    fn unmatchable_names_are_refused() {
        let b = ModuleBuilder::new(ModuleInit::default());
        assert_says!(
            b.parameter("", [2], Init::ONES).unwrap_err(),
            "parameter ``: a name has segments … at least one character … `*`"
        );
        for name in ["a..b", ".a", "a.", "a b", "a*", "a\n"] {
            assert!(b.pp("layer").parameter(name, [2], Init::ONES).is_err(), "{name:?}");
            assert!(b.pp(name).parameter("weight", [2], Init::ONES).is_err(), "{name:?}");
            assert!(b.buffer(name, [2], Init::ONES, BufferOptions::default()).is_err(), "{name:?}");
            assert!(b.unit(name, |_| Ok(())).is_err(), "{name:?}");
        }
        assert!(b.unit("", |_| Ok(())).is_err());
        b.pp("").parameter("layers.0.größe-1/2", [2], Init::ONES).unwrap();
    }

    #[test]
    fn too_many_units_are_refused() {
        let b = ModuleBuilder::new(ModuleInit::default());
        let error = (0..).find_map(|i| b.unit(&format!("layers.{i}"), |_| Ok(())).err()).unwrap();
        assert_says!(error, "module `layers.1048576` … more than 1048576 units … `[model]` …");
    }
}
