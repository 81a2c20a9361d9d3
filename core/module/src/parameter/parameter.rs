//! The parameter handle.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use candle_core::{DType, Device, Shape, Tensor, Var};

use super::grad_flow::GradFlow;
use super::grad_hook::GradHook;
use super::{GradReducer, Init, uses};
use crate::quantization::Packed;
use crate::{Error, Result};
use fulgurite_collective::shard::{Region, ShardSpec};
use fulgurite_tensor::autograd::{GradMode, storage};

/// A parameter's declaration.
#[derive(Debug, Clone)]
pub(crate) struct ParameterSpec {
    /// Fully qualified name, `model.layers.0.self_attn.q_proj.weight`.
    pub(crate) fqn: String,
    /// The global shape.
    pub(crate) shape: Vec<usize>,
    /// dtype of the values that the optimizer updates and checkpoints hold.
    pub(crate) dtype: DType,
    /// dtype of the tensor that layers compute with.
    pub(crate) compute_dtype: DType,
    /// The device of both.
    pub(crate) device: Device,
    /// The initial values.
    pub(crate) init: Init,
    /// Whether the parameter is trained.
    pub(crate) requires_grad: bool,
    /// Whether the declaring layer holds its compute tensor (`VarBuilder`). Its shape is then
    /// fixed, and its gradient comes from candle's graph.
    pub(crate) external: bool,
    /// Whether the parameter belongs to a layer's adapter.
    pub(crate) adapter: bool,
    /// The quantised weight, if the parameter is a packed part of one.
    pub(crate) packed: Option<Packed>,
}

/// The part of a parameter that this rank's optimizer updates.
#[derive(Debug, Clone)]
pub struct LocalShard {
    /// The values, flat. For an unsharded parameter they share the compute tensor's memory.
    pub values: Tensor,
    /// The shard's region in the global tensor.
    pub region: Region,
}

/// A handle to a parameter. Clones refer to the same parameter.
///
/// Models hold it and compute with [`tensor`](Self::tensor). A layer with a hand-written backward
/// takes the detached [`value`](Self::value), [records](super::record) its output in the graph, and
/// [accumulates](Self::accumulate) the gradient.
///
/// Like PyTorch's `DTensor`, it describes the parameter's distribution: the mesh's cuts
/// ([`spec`](Self::spec)), this rank's part ([`local`](Self::local)) and its gradient
/// ([`local_grad`](Self::local_grad)). Optimizers and checkpoints work on these. Strategies change
/// it through the parameter's [slot](super::ParameterSlot).
#[derive(Clone)]
pub struct Parameter(pub(super) Arc<Inner>);

/// A parameter's cut by tensor parallelism, before strategies cut it further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerCut {
    /// The region of the global tensor that this rank's layer computes with.
    pub(crate) region: Region,
    /// Whether replicating ranks have partial gradients, whose sum is the gradient.
    pub(crate) partial_grad: bool,
}

pub(super) struct Inner {
    declared: ParameterSpec,
    token: Tensor,
    spec: RwLock<ShardSpec>,
    layer_cut: RwLock<Option<LayerCut>>,
    compute: OnceLock<Tensor>,
    pub(super) local: RwLock<Option<LocalShard>>,
    pub(super) reducer: RwLock<Option<Arc<dyn GradReducer>>>,
    pub(super) flow: Mutex<GradFlow>,
    /// Whether a trainable parameter currently takes no gradient.
    paused: AtomicBool,
    /// See [`Parameter::optimizer`].
    optimizer: AtomicUsize,
    /// See [`Parameter::is_embedding_or_head`].
    embedding_or_head: AtomicBool,
    /// Whether another stage of a pipeline computes with it, and this rank holds nothing of it.
    elsewhere: AtomicBool,
    /// Whether its detached values were read where a backward was expected.
    was_read: AtomicBool,
    /// Whether a forward recorded it in a graph.
    was_recorded: AtomicBool,
}

/// The reason why a parameter has no gradient: [`Parameter::unused_because`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnusedBecause {
    /// No forward used it.
    NotUsed,
    /// Its values were only read with [`Parameter::value`], which are detached.
    Detached,
    /// A forward used it, or a candle_nn layer holds it, but no gradient arrived.
    Cut,
}

impl Parameter {
    pub(crate) fn new(declared: ParameterSpec) -> Result<Self> {
        let spec = RwLock::new(ShardSpec::new(declared.shape.clone()));
        let token = if declared.requires_grad {
            Var::zeros((), DType::F32, &declared.device)?.into_inner()
        } else {
            Tensor::zeros((), DType::F32, &declared.device)?
        };
        let inner = Arc::new(Inner {
            declared,
            token,
            spec,
            layer_cut: RwLock::default(),
            compute: OnceLock::new(),
            local: RwLock::new(None),
            reducer: RwLock::new(None),
            flow: Mutex::default(),
            paused: AtomicBool::new(false),
            optimizer: AtomicUsize::new(0),
            embedding_or_head: AtomicBool::new(false),
            elsewhere: AtomicBool::new(false),
            was_read: AtomicBool::new(false),
            was_recorded: AtomicBool::new(false),
        });
        let parameter = Self(inner);
        if parameter.0.declared.external {
            parameter.compute()?;
        }
        Ok(parameter)
    }

    /// The fully qualified name. A tied parameter has the name of its first declaration.
    pub fn fqn(&self) -> &str {
        &self.0.declared.fqn
    }

    /// The shape of the whole parameter.
    pub fn global_shape(&self) -> &[usize] {
        &self.0.declared.shape
    }

    /// dtype of the values that the optimizer updates and checkpoints hold.
    pub fn dtype(&self) -> DType {
        self.0.declared.dtype
    }

    /// dtype that layers compute with.
    pub fn compute_dtype(&self) -> DType {
        self.0.declared.compute_dtype
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.declared.device
    }

    /// The initial values.
    pub fn init(&self) -> Init {
        self.0.declared.init
    }

    /// Whether the parameter is trained, i.e. was not declared frozen.
    pub fn requires_grad(&self) -> bool {
        self.0.declared.requires_grad
    }

    /// Whether it belongs to an [adapter](crate::module::Adapters). Checkpoints of the model alone
    /// do not have it.
    pub fn is_adapter(&self) -> bool {
        self.0.declared.adapter
    }

    /// Whether it belongs to an embedding, or to a layer that computes the model's outputs. Such a
    /// layer has an [edge to the loss](crate::module::ModuleBuilder::edge_to_loss), or is called
    /// `lm_head`, `score` or `classifier`. Known once the model's tree is finished. Embeddings of
    /// candle_nn are not recognised.
    pub fn is_embedding_or_head(&self) -> bool {
        self.0.embedding_or_head.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_embedding_or_head(&self) {
        self.0.embedding_or_head.store(true, Ordering::Relaxed);
    }

    /// The quantised weight, if this is a packed part of one. Its values and initial values are
    /// computed from the weight's.
    pub fn packed(&self) -> Option<&Packed> {
        self.0.declared.packed.as_ref()
    }

    /// Whether the parameter currently takes a gradient. It must be [trained](Self::requires_grad),
    /// not [paused](super::PausedGradients) for another optimizer's turn, and not
    /// [elsewhere](Self::is_elsewhere). Otherwise layers with a hand-written backward need not
    /// compute its gradient.
    pub fn takes_grad(&self) -> bool {
        self.requires_grad() && !self.0.paused.load(Ordering::Relaxed) && !self.is_elsewhere()
    }

    /// Whether the ranks of other stages of a pipeline hold it, and this one nothing. Its
    /// [`local`](Self::local) part is then empty.
    pub fn is_elsewhere(&self) -> bool {
        self.0.elsewhere.load(Ordering::Relaxed)
    }

    pub(super) fn set_elsewhere(&self) {
        self.0.elsewhere.store(true, Ordering::Relaxed);
    }

    /// The index of the optimizer that updates it, if a model has several; 0 for the first.
    /// Optimizers step and are [paused](super::PausedGradients) separately, so strategies reduce
    /// their gradients separately.
    pub fn optimizer(&self) -> usize {
        self.0.optimizer.load(Ordering::Relaxed)
    }

    pub(super) fn set_optimizer(&self, index: usize) {
        self.0.optimizer.store(index, Ordering::Relaxed);
    }

    /// Sets whether the parameter is paused, and returns whether it was.
    pub(super) fn set_paused(&self, paused: bool) -> bool {
        self.0.paused.swap(paused, Ordering::Relaxed)
    }

    /// Whether a layer of candle_nn took its compute tensor through `ModuleBuilder::var_builder`.
    pub fn is_external(&self) -> bool {
        self.0.declared.external
    }

    /// Number of model elements it represents. Codes of a quantised weight count as the weight;
    /// scales count as zero.
    pub fn model_elem_count(&self) -> usize {
        match self.packed() {
            None => self.elem_count(),
            Some(packed) => packed.model_elem_count(),
        }
    }

    /// Number of elements of the whole parameter.
    pub fn elem_count(&self) -> usize {
        self.global_shape().iter().product()
    }

    /// The mesh's cuts of the parameter.
    pub fn spec(&self) -> ShardSpec {
        self.0.spec.read().expect("no panic while reading").clone()
    }

    /// Sets the mesh's cuts of the parameter, before values exist.
    pub(super) fn set_spec(&self, spec: ShardSpec) {
        *self.0.spec.write().expect("no panic while writing") = spec;
    }

    /// Cuts the tensor that this rank's layer computes with. Cuts by data parallelism come later.
    ///
    /// # Errors
    /// If the compute tensor exists already.
    pub(crate) fn cut_layer(&self, spec: ShardSpec, cut: LayerCut) -> Result<()> {
        if self.0.compute.get().is_some() && cut.region != Region::full(self.global_shape()) {
            return Err(Error::parameter(
                self.fqn(),
                "cannot be cut by tensor parallelism: its tensor is in use already, by a candle_nn \
                 layer or by a strategy that has set it up",
            ));
        }
        self.set_spec(spec);
        *self.0.layer_cut.write().expect("no panic while writing") = Some(cut);
        Ok(())
    }

    /// The region of the global tensor that this rank's layer computes with: all of it, unless
    /// tensor parallelism cuts it.
    pub fn compute_region(&self) -> Region {
        let cut = self.0.layer_cut.read().expect("no panic while reading");
        cut.as_ref().map_or_else(|| Region::full(self.global_shape()), |cut| cut.region.clone())
    }

    /// The shape of [`compute_region`](Self::compute_region) and of the compute tensor.
    pub fn compute_shape(&self) -> Vec<usize> {
        self.compute_region().sizes
    }

    /// Whether tensor-parallel ranks hold the same values and partial gradients, as in a norm that
    /// computes on parts of the sequence. Strategies sum the gradients over the ranks of the
    /// replicating `tensor_parallel` cut in the [spec](Self::spec).
    pub fn has_partial_grad(&self) -> bool {
        let cut = self.0.layer_cut.read().expect("no panic while reading");
        cut.as_ref().is_some_and(|cut| cut.partial_grad)
    }

    /// The compute tensor: [`ParameterSlot::compute`].
    ///
    /// [`ParameterSlot::compute`]: super::ParameterSlot::compute
    pub(crate) fn compute(&self) -> Result<&Tensor> {
        if let Some(tensor) = self.0.compute.get() {
            return Ok(tensor);
        }
        let hook = GradHook {
            parameter: Arc::downgrade(&self.0),
            shape: Shape::from(self.compute_shape()),
            dtype: self.compute_dtype(),
        };
        let tensor = self.0.token.apply_op1(hook)?;
        Ok(self.0.compute.get_or_init(|| tensor))
    }

    /// Number of elements of [`compute_region`](Self::compute_region).
    pub fn compute_elem_count(&self) -> usize {
        self.compute_region().elem_count()
    }

    /// The one-element tensor that stands for the parameter in a graph. Pass it to
    /// [`function`](fulgurite_tensor::autograd::function) as an input, and return `None` as its
    /// gradient.
    pub fn token(&self) -> &Tensor {
        &self.0.token
    }

    /// The parameter as a tensor for plain candle operations, whose backward delivers the gradient.
    /// Under [`no_grad`](fulgurite_tensor::autograd::no_grad) it is detached.
    ///
    /// # Errors
    /// If the parameter currently has no values.
    pub fn tensor(&self) -> Result<Tensor> {
        let value = self.detached()?;
        if !self.takes_grad() {
            return Ok(value);
        }
        self.note_recorded();
        match GradMode::current() {
            GradMode::Disabled => Ok(value),
            GradMode::Deferred => {
                uses::note_tensor_use(self);
                Ok(value)
            }
            GradMode::Recomputing(_) => Ok(self.compute()?.clone()),
            GradMode::Offloading(_) => {
                uses::note_tensor_use(self);
                Ok(self.compute()?.clone())
            }
            GradMode::Enabled => {
                self.flow().pending_hook = true;
                Ok(self.compute()?.clone())
            }
        }
    }

    /// Whether the parameter currently has values. Not before a strategy has set it up, and under
    /// FSDP only inside its unit's forward and backward.
    pub fn has_value(&self) -> bool {
        self.0.compute.get().is_some_and(|tensor| !storage::is_released(tensor))
    }

    /// The parameter's **detached** values: results computed from them give it no gradient. For
    /// inspection, and for layers that deliver the gradient themselves. Models compute with
    /// [`tensor`](Self::tensor).
    ///
    /// # Errors
    /// If the parameter currently has no values, because it is used outside its unit's forward or
    /// before the strategy has set it up.
    pub fn value(&self) -> Result<Tensor> {
        if self.takes_grad() && GradMode::current().expects_backward() {
            self.0.was_read.store(true, Ordering::Relaxed);
        }
        self.detached()
    }

    /// The reason why the parameter has no gradient, as far as its uses tell.
    pub fn unused_because(&self) -> UnusedBecause {
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        match (self.is_external() || is_set(&self.0.was_recorded), is_set(&self.0.was_read)) {
            (true, _) => UnusedBecause::Cut,
            (false, true) => UnusedBecause::Detached,
            (false, false) => UnusedBecause::NotUsed,
        }
    }

    /// Marks the parameter as recorded in a graph by a forward.
    pub(super) fn note_recorded(&self) {
        self.0.was_recorded.store(true, Ordering::Relaxed);
    }

    fn detached(&self) -> Result<Tensor> {
        if self.is_elsewhere() {
            return Err(Error::parameter(
                self.fqn(),
                "has no values on this rank: it belongs to another stage of the pipeline. The model computes \
                 outside of a step of the trainer, or uses it before or behind its units without \
                 `module::stage`",
            ));
        }
        if !self.has_value() {
            return Err(Error::parameter(
                self.fqn(),
                "has no values here: it is used before the model was set up, or outside the \
                 forward of the unit that owns it",
            ));
        }
        Ok(self.compute()?.detach())
    }

    /// The part of the parameter that this rank's optimizer updates.
    ///
    /// # Errors
    /// Before a strategy has set the parameter up.
    pub fn local(&self) -> Result<LocalShard> {
        let local = self.0.local.read().expect("no panic while reading");
        local.clone().ok_or_else(|| Error::parameter(self.fqn(), "no strategy has set it up"))
    }

    /// This rank's reduced gradient, flat and parallel to [`local`](Self::local)'s values. `None`
    /// without a gradient in this step.
    pub fn local_grad(&self) -> Option<Tensor> {
        self.flow().local_grad.clone()
    }

    /// Replaces [`local_grad`](Self::local_grad), like assigning `p.grad` in PyTorch. Call it
    /// before the optimizer's step, on every rank for its own part. With `None`, the step does not
    /// update the parameter.
    pub fn set_local_grad(&self, grad: Option<Tensor>) {
        self.flow().local_grad = grad;
    }
}

impl PartialEq for Parameter {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Parameter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parameter")
            .field("fqn", &self.fqn())
            .field("shape", &self.global_shape())
            .field("dtype", &self.dtype())
            .field("requires_grad", &self.requires_grad())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::super::Init;
    use crate::module::{ModuleBuilder, ModuleInit};

    /// The counterpart of a torch parameter on the meta device.
    // checklist: torchtune: validate_no_params_on_meta_device
    #[test]
    fn parameter_without_setup_is_named() {
        let b = ModuleBuilder::new(ModuleInit::default());
        let parameter = b.parameter("layers.0.weight", [2], Init::ONES).unwrap();
        assert!(!parameter.has_value());
        assert_says!(parameter.value().unwrap_err(), "parameter `layers.0.weight` … no values …");
        assert_eq!(
            parameter.tensor().unwrap_err().to_string(),
            parameter.value().unwrap_err().to_string()
        );
        assert_says!(parameter.local().unwrap_err(), "parameter `layers.0.weight`: no strategy …");
    }
}
