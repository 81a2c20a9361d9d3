//! Units: modules that are gathered, computed and freed as one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock};

use candle_core::{DType, Device, Tensor, Var};

use super::activations::with_tensors;
use super::{ActivationOffload, Activations, FullyShard, Module, offloaded_graph, recompute};
use crate::autograd::{GradMode, anomaly, detects_anomalies, function, is_grad_enabled, storage};
use crate::parallel::activations;
use crate::parameter::{Buffer, Parameter, note_tensor_use};
use crate::{Error, Result};

/// A strategy's hooks around a unit's forward and backward. Called on the thread that computes.
pub trait UnitHooks: Send + Sync {
    /// Before the unit computes: its parameters must have values when this returns.
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// After the unit has computed.
    fn post_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// Before the unit's backward: its parameters must have values when this returns.
    fn pre_backward(&self, unit: &UnitHandle) -> Result<()>;

    /// Whether floating-point inputs are cast to the dtype that the unit computes in. Layers in a unit
    /// whose inputs are left cast what they get themselves.
    fn casts_inputs(&self) -> bool {
        true
    }

    /// dtype that the output is cast to; `None` leaves it.
    fn output_dtype(&self) -> Option<DType> {
        None
    }
}

/// A unit without its module, for strategies.
#[derive(Clone)]
pub struct UnitHandle(Arc<UnitInner>);

struct UnitInner {
    index: usize,
    path: String,
    kind: &'static str,
    /// The dtype that it computes in.
    compute_dtype: DType,
    /// The model's compute dtype, if that is another one.
    model_dtype: Option<DType>,
    hooks: RwLock<Option<Arc<dyn UnitHooks>>>,
    /// Whether and how it is gathered on its own.
    fully_shard: RwLock<Option<FullyShard>>,
    /// Paths of the units that are gathered while it computes forward, and backward; empty: as the
    /// strategy's `prefetch` says.
    prefetch: [RwLock<Vec<String>>; 2],
    /// Whether it is computed again in backward.
    activation_checkpointing: AtomicBool,
    /// Where its activations are offloaded to, if they are.
    activation_offload: RwLock<Option<ActivationOffload>>,
    /// Trainable parameters whose compute tensors layers in it hold, so that uses cannot be counted.
    exposed: Mutex<Vec<Parameter>>,
    /// Buffers whose tensors layers in it hold and change.
    exposed_buffers: Mutex<Vec<Buffer>>,
    /// Stands for its parameters in the graph of a checkpointed call.
    token: OnceLock<Tensor>,
    /// Whether a checkpointed backward was searched for variables that are no parameters.
    checked_variables: AtomicBool,
}

impl UnitHandle {
    pub(crate) fn new(
        index: usize,
        path: String,
        kind: &'static str,
        [compute_dtype, model]: [DType; 2],
    ) -> Self {
        Self(Arc::new(UnitInner {
            index,
            path,
            kind,
            compute_dtype,
            model_dtype: (compute_dtype != model).then_some(model),
            hooks: RwLock::default(),
            fully_shard: RwLock::default(),
            prefetch: Default::default(),
            activation_checkpointing: AtomicBool::default(),
            activation_offload: RwLock::default(),
            exposed: Mutex::default(),
            exposed_buffers: Mutex::default(),
            token: OnceLock::new(),
            checked_variables: AtomicBool::default(),
        }))
    }

    /// The unit's index in the order in which units were built.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The module's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// The name of the module's type, without its path and parameters: `LlamaBlock`.
    pub fn kind(&self) -> &'static str {
        self.0.kind
    }

    /// Sets the hooks. For strategies.
    pub fn set_hooks(&self, hooks: Arc<dyn UnitHooks>) {
        *self.0.hooks.write().expect("no panic while writing") = Some(hooks);
    }

    /// Sets which units are gathered while this one computes forward, in place of as many of the next
    /// ones as the strategy's `prefetch` says (PyTorch's `set_modules_to_forward_prefetch`). All of them
    /// are, however many there are: each takes the memory of a gathered unit until it has computed. An
    /// empty list takes an earlier one back. For
    /// [`ParallelizeFn`](crate::strategy::ParallelizeFn)s; every rank calls it alike. The units must be
    /// gathered on their own, which the strategy checks.
    pub fn set_units_to_forward_prefetch(&self, units: &[Self]) {
        self.set_prefetch(0, units);
    }

    /// As [`set_units_to_forward_prefetch`](Self::set_units_to_forward_prefetch) for the unit's
    /// backward (PyTorch's `set_modules_to_backward_prefetch`): those of the units whose backward is
    /// still to come are gathered when it begins.
    pub fn set_units_to_backward_prefetch(&self, units: &[Self]) {
        self.set_prefetch(1, units);
    }

    /// Paths of the units that are gathered while this one computes forward; empty if none were set.
    pub fn units_to_forward_prefetch(&self) -> Vec<String> {
        self.0.prefetch[0].read().expect("no panic while reading").clone()
    }

    /// Paths of the units that are gathered while this one computes backward; empty if none were set.
    pub fn units_to_backward_prefetch(&self) -> Vec<String> {
        self.0.prefetch[1].read().expect("no panic while reading").clone()
    }

    fn set_prefetch(&self, direction: usize, units: &[Self]) {
        let paths = units.iter().map(|unit| unit.path().to_owned()).collect();
        *self.0.prefetch[direction].write().expect("no panic while writing") = paths;
    }

    /// Sets whether the unit's activations are kept from forward to backward (`false`, the default) or
    /// computed again in backward; overrides `trainer.activation_checkpointing`. For
    /// [`ParallelizeFn`](crate::strategy::ParallelizeFn)s and programs, before the first forward; every
    /// rank calls it alike.
    pub fn set_activation_checkpointing(&self, on: bool) {
        self.0.activation_checkpointing.store(on, Ordering::Relaxed);
        self.set_exposed();
    }

    /// Whether the unit is computed again in backward.
    pub fn activation_checkpointing(&self) -> bool {
        self.0.activation_checkpointing.load(Ordering::Relaxed)
    }

    /// Sets where the activations of the unit are stored from forward to backward: on their device (`None`,
    /// the default) or offloaded. Of a checkpointed unit that is its input, and only one that needs no
    /// gradient, or is the output of another unit with offloading, is offloaded; its memory is free once the
    /// model drops it. Of another unit it is every tensor of its graph, and its backward can run once.
    /// [`Host`](ActivationOffload::Host) frees nothing of a model on the CPU. Called as
    /// [`set_activation_checkpointing`](Self::set_activation_checkpointing).
    pub fn set_activation_offload(&self, to: Option<ActivationOffload>) {
        *self.0.activation_offload.write().expect("no panic while writing") = to;
        self.set_exposed();
    }

    /// Whether what its layers record is part of the model's graph: a unit whose activations are dropped or
    /// offloaded has graphs of its own.
    fn is_in_graph(&self) -> bool {
        !self.activation_checkpointing() && self.activation_offload().is_none()
    }

    fn set_exposed(&self) {
        for parameter in &*self.exposed() {
            parameter.set_exposed(Some(self.index()), self.is_in_graph());
        }
    }

    /// Where the activations of the unit are offloaded to, if they are.
    pub fn activation_offload(&self) -> Option<ActivationOffload> {
        *self.0.activation_offload.read().expect("no panic while reading")
    }

    /// Records that a layer in the unit holds the parameter's compute tensor.
    pub(super) fn expose_tensor(&self, parameter: &Parameter) {
        if parameter.requires_grad() && !self.exposed().contains(parameter) {
            self.exposed().push(parameter.clone());
            parameter.set_exposed(Some(self.index()), self.is_in_graph());
        }
    }

    /// Records that a layer in the unit holds the buffer's tensor, and changes it.
    pub(super) fn expose_buffer(&self, buffer: &Buffer) {
        self.0.exposed_buffers.lock().expect("no panic while noting").push(buffer.clone());
    }

    /// Calls `compute`, after which buffers whose tensors layers hold have the values from before it: for
    /// a unit that is computed again, whose forward has changed them already.
    pub(super) fn keeping_buffers<R>(&self, compute: impl FnOnce() -> Result<R>) -> Result<R> {
        let buffers = self.0.exposed_buffers.lock().expect("no panic while noting").clone();
        let before = buffers.iter().map(|buffer| Ok(buffer.value()?.copy()?));
        let before = before.collect::<Result<Vec<_>>>()?;
        let result = compute();
        for (buffer, before) in buffers.iter().zip(before) {
            storage::copy_from(&buffer.value()?, &before)?;
        }
        result
    }

    /// In a forward that collects uses, records those of parameters whose compute tensors layers hold.
    pub(super) fn note_exposed(&self) {
        self.exposed().iter().for_each(note_tensor_use);
    }

    fn exposed(&self) -> MutexGuard<'_, Vec<Parameter>> {
        self.0.exposed.lock().expect("no panic while noting")
    }

    /// A one-element variable that stands for the unit's parameters in a graph.
    pub(super) fn token(&self, device: &Device) -> Result<Tensor> {
        if let Some(token) = self.0.token.get() {
            return Ok(token.clone());
        }
        let token = Var::zeros((), DType::F32, device)?.into_inner();
        Ok(self.0.token.get_or_init(|| token).clone())
    }

    /// Whether this is the unit's first checkpointed backward.
    pub(super) fn checks_variables(&self) -> bool {
        !self.0.checked_variables.swap(true, Ordering::Relaxed)
    }

    pub(super) fn set_fully_shard(&self, options: FullyShard) {
        *self.0.fully_shard.write().expect("no panic while writing") = Some(options);
    }

    pub(super) fn fully_shard_options(&self) -> Option<FullyShard> {
        *self.0.fully_shard.read().expect("no panic while reading")
    }

    /// Names the unit in errors of its computation that name no place in the model, and under
    /// `detect_anomaly` in that of an output that is not finite.
    fn locate<A: Activations>(&self, result: Result<A>) -> Result<A> {
        let y =
            result.map_err(|error| activations::explain_mismatch(error).in_module(self.path()))?;
        if detects_anomalies() {
            y.map_tensors(&mut |y| match anomaly(y)? {
                None => Ok(y.clone()),
                Some(found) => {
                    let message = format!("detect_anomaly: its output has {found}");
                    Err(Error::module(self.path(), message))
                }
            })?;
        }
        Ok(y)
    }

    /// The hooks, if any were set.
    pub fn hooks(&self) -> Option<Arc<dyn UnitHooks>> {
        self.0.hooks.read().expect("no panic while reading").clone()
    }
}

impl std::fmt::Debug for UnitHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnitHandle")
            .field("index", &self.index())
            .field("path", &self.path())
            .finish()
    }
}

/// dtypes that a unit's input and output are cast to.
#[derive(Clone, Copy)]
struct Casts {
    input: Option<DType>,
    output: Option<DType>,
}

impl Casts {
    /// A unit that computes in another dtype than the model casts its inputs whatever the strategy says;
    /// the strategy's output dtype comes before the model's.
    fn of(unit: &UnitHandle, hooks: Option<&dyn UnitHooks>) -> Self {
        let UnitInner { compute_dtype, model_dtype, .. } = &*unit.0;
        let casts = model_dtype.is_some() || hooks.is_none_or(UnitHooks::casts_inputs);
        Self {
            input: casts.then_some(*compute_dtype),
            output: hooks.and_then(UnitHooks::output_dtype).or(*model_dtype),
        }
    }

    /// Calls `f` with the input as the unit takes it.
    fn with_input<A: Activations, R>(self, x: &A, f: impl FnOnce(&A) -> Result<R>) -> Result<R> {
        match self.input {
            None => f(x),
            Some(dtype) => f(&x.map_tensors(&mut |x| activations::cast(x, dtype, "a unit"))?),
        }
    }

    fn output<B: Activations>(self, y: B) -> Result<B> {
        match self.output {
            None => Ok(y),
            Some(dtype) => y.map_tensors(&mut |y| activations::cast(y, dtype, "a unit")),
        }
    }
}

/// A module that is worth gathering as one, a transformer block for instance. Made by
/// [`ModuleBuilder::unit`](super::ModuleBuilder::unit). Without a strategy's hooks it costs nothing.
#[derive(Debug)]
pub struct Unit<M> {
    /// Shared with the graphs that will compute it again.
    module: Arc<M>,
    handle: UnitHandle,
}

impl<M> Unit<M> {
    pub(crate) fn new(module: M, handle: UnitHandle) -> Self {
        Self { module: Arc::new(module), handle }
    }

    /// The unit's handle.
    pub fn handle(&self) -> &UnitHandle {
        &self.handle
    }

    /// The module, for inspection. Computing with it directly bypasses the strategy; use
    /// [`call`](Self::call).
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Computes with the module through any of its methods, with the strategy's hooks around it: from one
    /// tensor to another, or from and to several in a tuple, a struct or the like ([`Activations`]).
    /// Floating-point tensors of `x` are cast to the dtype that the unit computes in, unless the
    /// [strategy](UnitHooks::casts_inputs) leaves them; captured tensors stay as they are.
    ///
    /// Where the unit's [activations are checkpointed](UnitHandle::set_activation_checkpointing) `f` is
    /// called again in backward, after this call has returned; that is why it owns what it captures
    /// ([`call_scoped`](Self::call_scoped) takes one that borrows), and what it computes must depend on
    /// nothing else. Gradients flow to the tensors of `x` and to parameters. A captured tensor takes part
    /// as a constant:
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use fulgurite_core::{Result, module::Unit, nn::Linear, module::Module as _};
    /// fn masked(block: &Unit<Linear>, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    ///     let mask = mask.clone(); // shares its memory
    ///     block.call(x, move |block, x| Ok((block.forward(x)? * &mask)?))
    /// }
    ///
    /// fn with_memory(block: &Unit<Linear>, x: Tensor, memory: Tensor) -> Result<(Tensor, Tensor)> {
    ///     block.call(&(x, memory), |block, (x, memory)| {
    ///         let y = block.forward(&(x + memory)?)?;
    ///         Ok((y.clone(), (memory + y)?))
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    /// If `f` or the strategy fails. In the backward of a unit with checkpointed activations also if `f`
    /// captured a tensor that gets a gradient.
    pub fn call<A, B>(
        &self,
        x: &A,
        f: impl Fn(&M, &A) -> Result<B> + Send + Sync + 'static,
    ) -> Result<B>
    where
        M: Send + Sync + 'static,
        A: Activations + Send + Sync + 'static,
        B: Activations + 'static,
    {
        if !self.recomputes() {
            return self.call_scoped(x, f);
        }
        let hooks = self.handle.hooks();
        let (unit, module) = (self.handle.clone(), self.module.clone());
        let casts = Casts::of(&unit, hooks.as_deref());
        let compute =
            move |x: &A| casts.output(unit.locate(casts.with_input(x, |x| f(&module, x)))?);
        recompute::call(&self.handle, hooks, x, compute)
    }

    /// [`call`](Self::call) with a closure that may borrow, and is called once. For units whose activations
    /// are not checkpointed: what is borrowed may be gone when such a unit is computed again.
    ///
    /// # Errors
    /// As those of [`call`](Self::call), and if the unit's activations are checkpointed.
    pub fn call_scoped<A: Activations, B: Activations>(
        &self,
        x: &A,
        f: impl FnOnce(&M, &A) -> Result<B>,
    ) -> Result<B> {
        if self.recomputes() {
            return Err(Error::module(self.handle.path(), BORROWS));
        }
        if GradMode::current().collects_uses() {
            // Within another unit, which is computed again, or offloaded, as a whole.
            self.handle.note_exposed();
        }
        let hooks = self.handle.hooks();
        if GradMode::current() == GradMode::Enabled
            && let Some(to) = self.handle.activation_offload()
        {
            let casts = Casts::of(&self.handle, hooks.as_deref());
            return offloaded_graph::call(&self.handle, hooks, x, to, |x| {
                casts.output(self.handle.locate(casts.with_input(x, |x| f(&self.module, x)))?)
            });
        }
        let casts = Casts::of(&self.handle, hooks.as_deref());
        let compute =
            || casts.output(self.handle.locate(casts.with_input(x, |x| f(&self.module, x)))?);
        let Some(hooks) = hooks else { return compute() };
        hooks.pre_forward(&self.handle)?;
        let y = compute()?;
        // Copies, because an output may share memory with the input or with a parameter, which is freed now.
        let mut copies = Vec::new();
        y.map_tensors(&mut |y| {
            let activation = activations::lookup(y, self.handle.path())?;
            copies.push((y.clone(), y.detach().force_contiguous()?, activation));
            Ok(y.clone())
        })?;
        hooks.post_forward(&self.handle)?;
        // Backward begins with the first gradient of an output.
        let begins = (copies.len() > 1).then(|| Arc::new(AtomicBool::new(true)));
        let mut outputs = Vec::with_capacity(copies.len());
        for (y, own, activation) in copies {
            let own = if is_grad_enabled() {
                let (handle, hooks, begins) = (self.handle.clone(), hooks.clone(), begins.clone());
                function(&[&y], own, move |_, grad| {
                    if begins.as_ref().is_none_or(|begins| begins.swap(false, Ordering::Relaxed)) {
                        hooks.pre_backward(&handle)?;
                    }
                    Ok(vec![Some(grad.clone())])
                })?
            } else {
                activations::make_traceable(own, &activation)?
            };
            activations::propagate(&activation, &own);
            outputs.push(own);
        }
        with_tensors(&y, outputs)
    }

    /// Whether a call is computed again in backward.
    fn recomputes(&self) -> bool {
        GradMode::current() == GradMode::Enabled && self.handle.activation_checkpointing()
    }
}

const BORROWS: &str = "its activations are checkpointed, and `call_scoped` cannot compute it again in \
     backward, when what its closure borrows may be gone. Use `Unit::call`, whose closure owns what it \
     captures (a clone of a tensor shares its memory) or gets it with its input (a tuple, for instance), or \
     leave the unit out of `trainer.activation_checkpointing`";

impl<M: Module + Send + Sync + 'static> Module for Unit<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.call(x, M::forward)
    }
}
