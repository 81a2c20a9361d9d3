//! The parameter handle.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};

use candle_core::{DType, Device, Shape, Tensor, Var};

use super::tap::ParamTap;
use super::{GradReducer, Init, uses};
use crate::autograd::{GradMode, storage};
use crate::shard::{Region, ShardSpec};
use crate::{Error, Result};

/// What a parameter is declared with.
#[derive(Debug, Clone)]
pub struct ParameterSpec {
    /// Fully qualified name, `model.layers.0.self_attn.q_proj.weight`.
    pub fqn: String,
    /// The global shape.
    pub shape: Vec<usize>,
    /// dtype of the values that the optimizer updates and checkpoints hold.
    pub dtype: DType,
    /// dtype of the tensor that layers compute with.
    pub compute_dtype: DType,
    /// The device of both.
    pub device: Device,
    /// The initial values.
    pub init: Init,
    /// Whether a gradient is computed for it.
    pub requires_grad: bool,
    /// Whether its compute tensor was handed out when it was declared (`VarBuilder`), so that its
    /// shape is fixed and its gradient comes through the tap.
    pub external: bool,
}

/// The part of a parameter that this rank's optimizer updates.
#[derive(Debug, Clone)]
pub struct LocalShard {
    /// The values, flat. For a parameter that is not sharded this shares the compute tensor's
    /// memory.
    pub values: Tensor,
    /// Where they lie in the global tensor.
    pub region: Region,
}

/// A handle on a parameter; clones are the same parameter.
#[derive(Clone)]
pub struct Parameter(pub(super) Arc<Inner>);

/// What tensor parallelism makes of a parameter, before strategies cut it further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerCut {
    /// The part of the global tensor that this rank's layer computes with.
    pub(crate) region: Region,
    /// Whether each rank's gradient is a summand along the cuts that replicate.
    pub(crate) partial_grad: bool,
}

pub(super) struct Inner {
    declared: ParameterSpec,
    token: Tensor,
    spec: RwLock<ShardSpec>,
    layer_cut: RwLock<Option<LayerCut>>,
    compute: OnceLock<Tensor>,
    local: RwLock<Option<LocalShard>>,
    reducer: RwLock<Option<Arc<dyn GradReducer>>>,
    flow: Mutex<GradFlow>,
}

/// The state of a parameter's gradient within a step.
#[derive(Debug, Default)]
struct GradFlow {
    /// Uses by fused layers that have not delivered yet.
    pending_uses: usize,
    /// Whether the tap has still to deliver, in the backward of the graph.
    pending_tap: bool,
    /// The units (`None`: what is in no unit) whose layers hold the compute tensor itself and are
    /// part of the graph: uses of it are not seen, so each step's backward is taken to reach the tap.
    tap_holders: BTreeSet<Option<usize>>,
    /// Whether the buffer holds a gradient already, so that the next one is added.
    accumulated: bool,
    /// Whether anything was delivered in the backward that is running.
    delivered_now: bool,
    /// Whether `ready` was called in the backward that is running.
    ready: bool,
    /// This rank's reduced gradient, flat, as the optimizer takes it.
    local_grad: Option<Tensor>,
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
        });
        let parameter = Self(inner);
        if parameter.0.declared.external {
            parameter.compute()?;
        }
        Ok(parameter)
    }

    /// The fully qualified name. A tied parameter keeps the name it was first declared with.
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

    /// Whether a gradient is computed for it.
    pub fn requires_grad(&self) -> bool {
        self.0.declared.requires_grad
    }

    /// Whether the layer that holds it is not one of `nn` but took it through
    /// `ModuleBuilder::var_builder`.
    pub fn is_external(&self) -> bool {
        self.0.declared.external
    }

    /// Number of elements of the whole parameter.
    pub fn elem_count(&self) -> usize {
        self.global_shape().iter().product()
    }

    /// How the mesh cuts it.
    pub fn spec(&self) -> ShardSpec {
        self.0.spec.read().expect("no panic while reading").clone()
    }

    /// Sets how the mesh cuts it. For strategies and `ParallelizeFn`s, before values exist.
    pub fn set_spec(&self, spec: ShardSpec) {
        *self.0.spec.write().expect("no panic while writing") = spec;
    }

    /// Cuts what this rank's layer computes with; each cut comes before those of data parallelism.
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

    /// The part of the global tensor that this rank's layer computes with: all of it, unless
    /// tensor parallelism cuts it.
    pub fn compute_region(&self) -> Region {
        let cut = self.0.layer_cut.read().expect("no panic while reading");
        cut.as_ref().map_or_else(|| Region::full(self.global_shape()), |cut| cut.region.clone())
    }

    /// The shape of [`compute`](Self::compute), that of [`compute_region`](Self::compute_region).
    pub fn compute_shape(&self) -> Vec<usize> {
        self.compute_region().sizes
    }

    /// Whether each tensor-parallel rank's gradient is a summand, although they hold the same
    /// values (a norm that computes on a part of the sequence): strategies sum it over the ranks
    /// along the [spec](Self::spec)'s `tensor_parallel` cut that replicates.
    pub fn has_partial_grad(&self) -> bool {
        let cut = self.0.layer_cut.read().expect("no panic while reading");
        cut.as_ref().is_some_and(|cut| cut.partial_grad)
    }

    /// The compute tensor: what graphs refer to, with or without memory at the moment. Its shape is
    /// the global shape, or under tensor parallelism that of this rank's part.
    pub fn compute(&self) -> Result<&Tensor> {
        if let Some(tensor) = self.0.compute.get() {
            return Ok(tensor);
        }
        let tap = ParamTap {
            parameter: Arc::downgrade(&self.0),
            shape: Shape::from(self.compute_shape()),
            dtype: self.compute_dtype(),
        };
        let tensor = self.0.token.apply_op1(tap)?;
        Ok(self.0.compute.get_or_init(|| tensor))
    }

    /// Number of elements of the compute tensor.
    pub fn compute_elem_count(&self) -> usize {
        self.compute_region().elem_count()
    }

    /// The one-element tensor that stands for the parameter in a graph: pass it to
    /// [`function`](crate::autograd::function) as an input and return `None` as its gradient.
    pub fn token(&self) -> &Tensor {
        &self.0.token
    }

    /// The parameter as a tensor for plain candle operations. Its gradient comes back by itself.
    /// Under [`no_grad`](crate::autograd::no_grad) it is detached.
    ///
    /// # Errors
    /// If the parameter has no values at the moment.
    pub fn tensor(&self) -> Result<Tensor> {
        let value = self.value()?;
        if !self.requires_grad() {
            return Ok(value);
        }
        match GradMode::current() {
            GradMode::Disabled => Ok(value),
            GradMode::Deferred => {
                uses::note_tap(self);
                Ok(value)
            }
            GradMode::Recomputing(_) => Ok(self.compute()?.clone()),
            GradMode::Enabled => {
                self.flow().pending_tap = true;
                Ok(self.compute()?.clone())
            }
        }
    }

    /// The parameter's values, detached: for layers that deliver the gradient themselves.
    ///
    /// # Errors
    /// If the parameter has no values at the moment: it was used outside its unit's forward, or
    /// before the strategy set it up.
    pub fn value(&self) -> Result<Tensor> {
        let tensor = self.compute()?;
        if storage::is_released(tensor) {
            return Err(Error::parameter(
                self.fqn(),
                "has no values here: it is used before the model was set up, or outside the \
                 forward of the unit that owns it",
            ));
        }
        Ok(tensor.detach())
    }

    /// Counts one use in a forward whose backward will call [`end_use`](Self::end_use). Nothing is
    /// counted when there will be no backward, and, in a unit that is computed again for its
    /// backward, nothing a second time.
    pub fn begin_use(&self) {
        if !self.requires_grad() {
            return;
        }
        match GradMode::current() {
            GradMode::Enabled => self.flow().pending_uses += 1,
            GradMode::Deferred => {
                uses::note();
                self.flow().pending_uses += 1;
            }
            GradMode::Disabled | GradMode::Recomputing(_) => {}
        }
    }

    /// Notes whether the layers of a unit (`None`: those in no unit) hold the compute tensor itself
    /// and are part of the graph, which those of a unit with checkpointed activations are not.
    pub(crate) fn set_tap_holder(&self, unit: Option<usize>, in_graph: bool) {
        let mut flow = self.flow();
        match in_graph {
            true => flow.tap_holders.insert(unit),
            false => flow.tap_holders.remove(&unit),
        };
        flow.pending_tap = self.requires_grad() && !flow.tap_holders.is_empty();
    }

    /// Lets `write` add a gradient to the parameter's buffer: it gets the flat buffer, and whether
    /// to add to its content (`true`) or to overwrite it. Does nothing for a frozen parameter.
    pub fn accumulate_with(&self, write: impl FnOnce(&Tensor, bool) -> Result<()>) -> Result<()> {
        if !self.requires_grad() {
            return Ok(());
        }
        if self.flow().ready && GradMode::current().recomputation().is_some() {
            return Err(Error::parameter(
                self.fqn(),
                "got a gradient after its last one: a unit whose activations are checkpointed used \
                 it more often when it was computed again than in its forward, where what it \
                 computes must depend on its input and on what its closure captured alone; or the \
                 loss joins the graph of a forward from before the last backward with that of a \
                 newer one",
            ));
        }
        let buffer = self.reducer()?.buffer(self)?;
        let accumulated = {
            let mut flow = self.flow();
            flow.delivered_now = true;
            std::mem::replace(&mut flow.accumulated, true)
        };
        write(&buffer, accumulated)
    }

    /// Adds a gradient of the parameter's shape, any layout and float dtype.
    pub fn accumulate(&self, grad: &Tensor) -> Result<()> {
        let shape = self.compute_shape();
        if grad.dims() != shape {
            let message = format!("got a gradient of shape {:?}, not {shape:?}", grad.dims());
            return Err(Error::parameter(self.fqn(), message));
        }
        self.accumulate_with(|buffer, add| {
            let grad = grad.flatten_all()?.to_dtype(buffer.dtype())?.contiguous()?;
            let sum = if add { (buffer + &grad)? } else { grad };
            storage::copy_from(buffer, &sum)
        })
    }

    /// One counted use has delivered. When it was the last one, the strategy hears that the
    /// gradient is ready.
    pub fn end_use(&self) -> Result<()> {
        if !self.requires_grad() {
            return Ok(());
        }
        let complete = {
            let mut flow = self.flow();
            // A use that is not counted (its forward was before the last backward's end) tells
            // nothing of how many more there are.
            let counted = flow.pending_uses > 0;
            flow.pending_uses = flow.pending_uses.saturating_sub(1);
            counted && flow.complete()
        };
        if complete { self.ready() } else { Ok(()) }
    }

    pub(super) fn deliver_tap(&self, grad: &Tensor) -> Result<()> {
        if GradMode::current().recomputation().is_some() {
            // The unit ends the use of what its forward noted.
            uses::check_tap(self)?;
            return self.accumulate(grad);
        }
        self.accumulate(grad)?;
        let complete = {
            let mut flow = self.flow();
            let counted = std::mem::replace(&mut flow.pending_tap, false);
            counted && flow.complete()
        };
        if complete { self.ready() } else { Ok(()) }
    }

    fn ready(&self) -> Result<()> {
        self.flow().ready = true;
        self.reducer()?.ready(self)
    }

    fn reducer(&self) -> Result<Arc<dyn GradReducer>> {
        let reducer = self.0.reducer.read().expect("no panic while reading");
        reducer.clone().ok_or_else(|| {
            Error::parameter(
                self.fqn(),
                "got a gradient before a strategy set it up, or after its Fabric was dropped",
            )
        })
    }

    /// Sets where gradients go. For strategies.
    pub fn set_reducer(&self, reducer: Arc<dyn GradReducer>) {
        *self.0.reducer.write().expect("no panic while writing") = Some(reducer);
    }

    /// Ends what [`set_reducer`](Self::set_reducer) began: gradients go nowhere. A reducer that holds
    /// parameters, which hold it, is freed by this only. For strategies.
    pub fn clear_reducer(&self) {
        *self.0.reducer.write().expect("no panic while writing") = None;
    }

    /// Ends a backward for this parameter: one that is not ready yet is declared so now, whatever
    /// its uses delivered, and the counts start again. Returns whether any gradient arrived in this
    /// backward. For strategies.
    pub fn finish_backward(&self) -> Result<bool> {
        if !self.requires_grad() {
            return Ok(false);
        }
        let (ready, delivered) = {
            let flow = self.flow();
            (flow.ready, flow.delivered_now)
        };
        if !ready {
            self.ready()?;
        }
        let mut flow = self.flow();
        flow.pending_uses = 0;
        flow.pending_tap = !flow.tap_holders.is_empty();
        flow.delivered_now = false;
        flow.ready = false;
        Ok(delivered)
    }

    /// Declares the gradient ready if no use of the parameter waits for a backward: for one that
    /// this rank's forward left out. For strategies, when the backward of the parameter's unit
    /// begins, if all graphs that may deliver are of forwards since the last backward.
    pub fn finish_unused(&self) -> Result<()> {
        let unused = self.requires_grad() && self.flow().complete();
        if unused { self.ready() } else { Ok(()) }
    }

    /// Whether uses that were counted have not delivered: when a backward ends, before
    /// [`finish_backward`](Self::finish_backward) counts anew, those that another backward may bring.
    pub fn has_pending_uses(&self) -> bool {
        self.flow().pending_uses > 0
    }

    /// Whether the buffer holds a gradient of this step.
    pub fn has_accumulated(&self) -> bool {
        self.flow().accumulated
    }

    /// Forgets the accumulated gradient: the next one overwrites the buffer. For strategies.
    pub fn clear_accumulated(&self) {
        self.flow().accumulated = false;
    }

    /// Says that the buffer holds a gradient, which the next one is added to. For strategies that
    /// wrote it themselves.
    pub fn mark_accumulated(&self) {
        self.flow().accumulated = true;
    }

    /// Ends a step: forgets its gradient. For strategies.
    pub fn end_step(&self) {
        let mut flow = self.flow();
        flow.accumulated = false;
        flow.local_grad = None;
    }

    /// This rank's reduced gradient, flat and parallel to [`local`](Self::local)'s values; `None`
    /// if there is none in this step.
    pub fn local_grad(&self) -> Option<Tensor> {
        self.flow().local_grad.clone()
    }

    /// Sets this rank's reduced gradient. For strategies.
    pub fn set_local_grad(&self, grad: Option<Tensor>) {
        self.flow().local_grad = grad;
    }

    /// Adds to this rank's reduced gradient of the step. For strategies.
    ///
    /// # Errors
    /// If `grad` is not parallel to [`local`](Self::local)'s values.
    pub fn add_local_grad(&self, grad: Tensor) -> Result<()> {
        let elements = self.local()?.values.elem_count();
        if grad.dims() != [elements] {
            let message = format!(
                "got a local gradient of shape {:?}; it must be flat, with an element for each of \
                 the {elements} of this rank's part",
                grad.dims()
            );
            return Err(Error::parameter(self.fqn(), message));
        }
        let sum = match self.local_grad() {
            Some(earlier) => (earlier + grad)?,
            None => grad,
        };
        self.set_local_grad(Some(sum));
        Ok(())
    }

    /// The part of the parameter that this rank's optimizer updates.
    ///
    /// # Errors
    /// Before a strategy has set the parameter up.
    pub fn local(&self) -> Result<LocalShard> {
        let local = self.0.local.read().expect("no panic while reading");
        local.clone().ok_or_else(|| Error::parameter(self.fqn(), "no strategy has set it up"))
    }

    /// Sets the part that this rank's optimizer updates. For strategies.
    pub fn set_local(&self, local: LocalShard) {
        *self.0.local.write().expect("no panic while writing") = Some(local);
    }

    fn flow(&self) -> MutexGuard<'_, GradFlow> {
        self.0.flow.lock().expect("no panic while a gradient flows")
    }
}

impl GradFlow {
    fn complete(&self) -> bool {
        self.pending_uses == 0 && !self.pending_tap && !self.ready
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
