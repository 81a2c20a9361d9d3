//! Units: modules that are gathered, computed and freed together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::{DType, Device, Tensor, Var};

use super::activations::with_tensors;
use super::{ActivationOffload, Activations, FullyShard, Module, offloaded_graph, recompute};
use crate::parallel::activations::{self, RecordOwner};
use crate::parallel::explain_mismatch;
use crate::parameter::{Buffer, Parameter, note_tensor_use};
use crate::{Error, Result};
use fulgurite_tensor::autograd::{
    GradMode, anomaly, copy, detects_anomalies, function, is_grad_enabled, storage,
};

/// A strategy's hooks around a unit's forward and backward. Called on the thread that computes.
pub trait UnitHooks: Send + Sync {
    /// Runs before forward. The unit's parameters must have values when it returns.
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// Runs after forward.
    fn post_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// Runs before the unit's backward. Its parameters must have values when it returns.
    fn pre_backward(&self, unit: &UnitHandle) -> Result<()>;

    /// Whether floating-point inputs are cast to the unit's compute dtype. If not, layers in the
    /// unit cast their inputs themselves.
    fn casts_inputs(&self) -> bool {
        true
    }

    /// dtype of the output; `None` keeps it.
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
    /// The unit's compute dtype.
    compute_dtype: DType,
    /// The model's compute dtype, if it differs.
    model_dtype: Option<DType>,
    /// The settings until the first forward.
    settings: Mutex<UnitSettings>,
    /// The settings from the first forward on.
    fixed: OnceLock<UnitSettings>,
    /// The token of the parameters in the graph of a checkpointed call.
    token: OnceLock<Tensor>,
    /// Whether a checkpointed backward was searched for variables other than parameters.
    checked_variables: AtomicBool,
}

/// The settings that a unit gets between its construction and its first forward.
#[derive(Default)]
struct UnitSettings {
    hooks: Option<Arc<dyn UnitHooks>>,
    /// The options, if the unit is gathered separately.
    fully_shard: Option<FullyShard>,
    /// Paths of the units to gather during this unit's forward and backward. Empty: the strategy's
    /// `prefetch` decides.
    prefetch: [Vec<String>; 2],
    /// Whether backward computes the unit again.
    activation_checkpointing: bool,
    /// Storage of offloaded activations, if they are offloaded.
    activation_offload: Option<ActivationOffload>,
    /// Trainable parameters whose compute tensors the unit's layers hold. Their uses cannot be
    /// counted.
    exposed: Vec<Parameter>,
    /// Buffers whose tensors the unit's layers hold and change.
    exposed_buffers: Vec<Buffer>,
}

impl UnitSettings {
    /// Tells the exposed parameters whether the unit's layers record in the model's graph. Units
    /// whose activations are dropped or offloaded have their own graphs.
    fn set_exposed(&self, unit: usize) {
        let in_graph = !self.activation_checkpointing && self.activation_offload.is_none();
        self.exposed.iter().for_each(|parameter| parameter.set_exposed(Some(unit), in_graph));
    }
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
            settings: Mutex::default(),
            fixed: OnceLock::new(),
            token: OnceLock::new(),
            checked_variables: AtomicBool::default(),
        }))
    }

    /// The unit's index in build order.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The module's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// The module's type name, without path and type parameters: `LlamaBlock`.
    pub fn kind(&self) -> &'static str {
        self.0.kind
    }

    /// Changes a setting. `what` names it in the error.
    fn set(&self, what: &str, change: impl FnOnce(&mut UnitSettings)) -> Result<()> {
        let mut settings = self.unfixed();
        if self.0.fixed.get().is_some() {
            return Err(Error::module(
                self.path(),
                format!(
                    "{what} of a unit must be set before its first forward, which has run; set it in a \
                     `ParallelizeFn`, or right after the model is built"
                ),
            ));
        }
        change(&mut settings);
        Ok(())
    }

    fn get<R>(&self, get: impl FnOnce(&UnitSettings) -> R) -> R {
        if let Some(settings) = self.0.fixed.get() {
            return get(settings);
        }
        let settings = self.unfixed();
        // The first forward may have begun meanwhile.
        get(self.0.fixed.get().unwrap_or(&settings))
    }

    /// The settings, which cannot change any more.
    fn fixed(&self) -> &UnitSettings {
        self.0.fixed.get().unwrap_or_else(|| {
            let mut settings = self.unfixed();
            self.0.fixed.get_or_init(|| std::mem::take(&mut *settings))
        })
    }

    fn unfixed(&self) -> MutexGuard<'_, UnitSettings> {
        self.0.settings.lock().expect("no panic while setting")
    }

    /// Sets the hooks. For strategies.
    ///
    /// # Errors
    /// If the unit has computed.
    pub fn set_hooks(&self, hooks: Arc<dyn UnitHooks>) -> Result<()> {
        self.set("the hooks", |settings| settings.hooks = Some(hooks))
    }

    /// Sets the units to gather during this unit's forward (PyTorch's
    /// `set_modules_to_forward_prefetch`). By default the strategy gathers the next `prefetch`
    /// units. All listed units are gathered, and each takes the memory of a gathered unit until it
    /// has computed. An empty list restores the default. For
    /// `ParallelizeFn`s; every rank calls it alike.
    /// The units must be gathered separately, which the strategy checks.
    ///
    /// # Errors
    /// If the unit has computed.
    pub fn set_units_to_forward_prefetch(&self, units: &[Self]) -> Result<()> {
        self.set_prefetch(0, units)
    }

    /// Like [`set_units_to_forward_prefetch`](Self::set_units_to_forward_prefetch), for the unit's
    /// backward (PyTorch's `set_modules_to_backward_prefetch`). When it begins, the listed units
    /// whose backward is still to come are gathered.
    ///
    /// # Errors
    /// If the unit has computed.
    pub fn set_units_to_backward_prefetch(&self, units: &[Self]) -> Result<()> {
        self.set_prefetch(1, units)
    }

    /// Paths of the units to gather during this unit's forward; empty if none were set.
    pub fn units_to_forward_prefetch(&self) -> Vec<String> {
        self.get(|settings| settings.prefetch[0].clone())
    }

    /// Paths of the units to gather during this unit's backward; empty if none were set.
    pub fn units_to_backward_prefetch(&self) -> Vec<String> {
        self.get(|settings| settings.prefetch[1].clone())
    }

    fn set_prefetch(&self, direction: usize, units: &[Self]) -> Result<()> {
        let paths = units.iter().map(|unit| unit.path().to_owned()).collect();
        self.set("the units to prefetch", |settings| settings.prefetch[direction] = paths)
    }

    /// Sets whether backward computes the unit again. By default (`false`) its activations are
    /// kept. Overrides `trainer.activation_checkpointing`. For
    /// `ParallelizeFn`s and programs; every rank calls it alike.
    ///
    /// # Errors
    /// If the unit has computed.
    pub fn set_activation_checkpointing(&self, on: bool) -> Result<()> {
        self.set("activation checkpointing", |settings| {
            settings.activation_checkpointing = on;
            settings.set_exposed(self.index());
        })
    }

    /// Whether backward computes the unit again.
    pub fn activation_checkpointing(&self) -> bool {
        self.get(|settings| settings.activation_checkpointing)
    }

    /// Sets the storage of the unit's activations from forward to backward: their device (`None`,
    /// the default) or offloaded. [`Host`](ActivationOffload::Host) frees no memory for a model on
    /// the CPU. Call it like [`set_activation_checkpointing`](Self::set_activation_checkpointing).
    ///
    /// For a checkpointed unit, only its input is offloaded, and only if it needs no gradient or
    /// comes from another offloaded unit. The input's memory is free once the model drops it. For
    /// other units, every tensor of the graph is offloaded, and the backward can run only once.
    ///
    /// # Errors
    /// If the unit has computed.
    pub fn set_activation_offload(&self, to: Option<ActivationOffload>) -> Result<()> {
        self.set("activation offload", |settings| {
            settings.activation_offload = to;
            settings.set_exposed(self.index());
        })
    }

    /// Storage of the unit's offloaded activations, if they are offloaded.
    pub(super) fn activation_offload(&self) -> Option<ActivationOffload> {
        self.get(|settings| settings.activation_offload)
    }

    /// Records that a layer in the unit holds the parameter's compute tensor.
    pub(super) fn expose_tensor(&self, parameter: &Parameter) -> Result<()> {
        self.set("a layer's tensor", |settings| {
            if parameter.requires_grad() && !settings.exposed.contains(parameter) {
                settings.exposed.push(parameter.clone());
                settings.set_exposed(self.index());
            }
        })
    }

    /// Records that a layer in the unit holds the buffer's tensor and changes it.
    pub(super) fn expose_buffer(&self, buffer: &Buffer) -> Result<()> {
        self.set("a layer's buffer", |settings| settings.exposed_buffers.push(buffer.clone()))
    }

    /// Calls `compute` and then restores the buffers whose tensors layers hold. For a recomputed
    /// unit, whose forward has already changed them.
    pub(super) fn keeping_buffers<R>(&self, compute: impl FnOnce() -> Result<R>) -> Result<R> {
        let buffers = &self.fixed().exposed_buffers;
        let before = buffers.iter().map(|buffer| Ok(buffer.value()?.copy()?));
        let before = before.collect::<Result<Vec<_>>>()?;
        let result = compute();
        for (buffer, before) in buffers.iter().zip(before) {
            storage::copy_from(&buffer.value()?, &before)?;
        }
        result
    }

    /// In a forward that collects uses, records uses of parameters whose compute tensors layers
    /// hold.
    pub(super) fn note_exposed(&self) {
        self.fixed().exposed.iter().for_each(note_tensor_use);
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

    pub(super) fn set_fully_shard(&self, options: FullyShard) -> Result<()> {
        self.set("sharding", |settings| settings.fully_shard = Some(options))
    }

    pub(super) fn fully_shard_options(&self) -> Option<FullyShard> {
        self.get(|settings| settings.fully_shard)
    }

    /// Names the unit in errors without a location, and under `detect_anomaly` in the error of an
    /// output that is not finite.
    fn locate<A: Activations>(&self, result: Result<A>) -> Result<A> {
        let y = result.map_err(|error| explain_mismatch(error).in_module(self.path()))?;
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
        self.get(|settings| settings.hooks.clone())
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

/// dtypes to which a unit's input and output are cast.
#[derive(Clone, Copy)]
struct Casts {
    input: Option<DType>,
    output: Option<DType>,
}

impl Casts {
    /// A unit with its own compute dtype always casts its inputs. The strategy's output dtype takes
    /// precedence over the model's.
    fn of(unit: &UnitHandle, hooks: Option<&dyn UnitHooks>) -> Self {
        let UnitInner { compute_dtype, model_dtype, .. } = &*unit.0;
        let casts = model_dtype.is_some() || hooks.is_none_or(UnitHooks::casts_inputs);
        Self {
            input: casts.then_some(*compute_dtype),
            output: hooks.and_then(UnitHooks::output_dtype).or(*model_dtype),
        }
    }

    /// Calls `f` with the input cast for the unit.
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

/// A module that is gathered together, such as a transformer block. Made by
/// [`ModuleBuilder::unit`](super::ModuleBuilder::unit). Without a strategy's hooks it has no
/// overhead.
#[derive(Debug)]
pub struct Unit<M> {
    /// Shared with the graphs that compute it again.
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

    /// Computes with the module through any of its methods, with the strategy's hooks around the
    /// call. Input and output are tensors, or several in a tuple, a struct or another type with
    /// [`Activations`]. Floating-point tensors of `x` are cast to the unit's compute dtype, unless
    /// the [strategy](UnitHooks::casts_inputs) leaves them. Captured tensors stay as they are.
    ///
    /// If the unit's [activations are checkpointed](UnitHandle::set_activation_checkpointing),
    /// backward calls `f` again after this call has returned. So `f` owns its captures
    /// ([`call_scoped`](Self::call_scoped) takes a closure that borrows), and its result must
    /// depend only on them and on `x`. Gradients flow to the tensors of `x` and to parameters.
    /// Captured tensors are constants:
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use fulgurite_core::{Result, module::Unit, nn::Linear, module::Module as _};
    /// fn masked(block: &Unit<Linear>, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    ///     let mask = mask.clone(); // shares its memory
    ///     block.call(x, move |block, x| Ok((block.forward(x)? * &mask)?))
    /// }
    ///
    /// type Pair = (Tensor, Tensor);
    ///
    /// fn with_memory(block: &Unit<Linear>, x: Tensor, memory: Tensor) -> Result<Pair> {
    ///     block.call(&(x, memory), |block, (x, memory)| {
    ///         let y = block.forward(&(x + memory)?)?;
    ///         Ok((y.clone(), (memory + y)?))
    ///     })
    /// }
    /// ```
    ///
    /// # Errors
    /// If `f` or the strategy fails. With checkpointed activations, backward also fails if `f`
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
        let hooks = self.handle.fixed().hooks.clone();
        let (unit, module) = (self.handle.clone(), self.module.clone());
        let casts = Casts::of(&unit, hooks.as_deref());
        let compute =
            move |x: &A| casts.output(unit.locate(casts.with_input(x, |x| f(&module, x)))?);
        recompute::call(&self.handle, hooks, x, compute)
    }

    /// Like [`call`](Self::call), with a closure that may borrow and is called once. Only for units
    /// without checkpointed activations, because the borrowed values may be gone when backward
    /// computes a unit again.
    ///
    /// # Errors
    /// As [`call`](Self::call), and if the unit's activations are checkpointed.
    pub fn call_scoped<A: Activations, B: Activations>(
        &self,
        x: &A,
        f: impl FnOnce(&M, &A) -> Result<B>,
    ) -> Result<B> {
        if self.recomputes() {
            return Err(Error::module(self.handle.path(), BORROWS));
        }
        if GradMode::current().collects_uses() {
            // Inside another unit that is recomputed or offloaded as a whole.
            self.handle.note_exposed();
        }
        let settings = self.handle.fixed();
        let hooks = settings.hooks.clone();
        if GradMode::current() == GradMode::Enabled
            && let Some(to) = settings.activation_offload
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
        // Copies, because outputs may share memory with the input or a parameter, which is freed
        // now.
        let mut copies = Vec::new();
        y.map_tensors(&mut |y| {
            let record = activations::lookup(y, self.handle.path())?;
            copies.push((y.clone(), copy(y)?, record));
            Ok(y.clone())
        })?;
        hooks.post_forward(&self.handle)?;
        // Backward begins with the first gradient of an output.
        let begins = (copies.len() > 1).then(|| Arc::new(AtomicBool::new(true)));
        let mut outputs = Vec::with_capacity(copies.len());
        for (y, own, record) in copies {
            let marked = record.map(|record| (record, RecordOwner::new()));
            let takes_gradient = marked.as_ref().is_none_or(|(record, _)| !record.is_constant);
            let own = if is_grad_enabled() && takes_gradient {
                let (handle, hooks, begins) = (self.handle.clone(), hooks.clone(), begins.clone());
                let held = marked.as_ref().map(|(_, owner)| owner.clone());
                function(&[&y], own, move |_, grad| {
                    let _held = &held;
                    if begins.as_ref().is_none_or(|begins| begins.swap(false, Ordering::Relaxed)) {
                        hooks.pre_backward(&handle)?;
                    }
                    Ok(vec![Some(grad.clone())])
                })?
            } else {
                own
            };
            outputs.push(match marked {
                Some((record, owner)) => activations::mark(own, record.activation, &owner)?,
                None => own,
            });
        }
        with_tensors(&y, outputs)
    }

    /// Whether a call is computed again in backward.
    fn recomputes(&self) -> bool {
        GradMode::current() == GradMode::Enabled && self.handle.fixed().activation_checkpointing
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

#[cfg(test)]
mod tests {
    use fulgurite_test_message::assert_says;

    use super::*;
    use crate::module::{ModuleBuilder, ModuleInit};

    struct Same;

    impl Module for Same {
        fn forward(&self, x: &Tensor) -> Result<Tensor> {
            Ok(x.clone())
        }
    }

    #[test]
    fn settings_are_fixed_by_the_first_forward() {
        let builder = ModuleBuilder::new(ModuleInit::default());
        let unit = builder.unit("same", |_| Ok(Same)).unwrap();
        let handle = unit.handle();
        handle.set_activation_checkpointing(true).unwrap();
        handle.set_activation_checkpointing(false).unwrap();
        handle.set_units_to_forward_prefetch(std::slice::from_ref(handle)).unwrap();
        unit.forward(&Tensor::ones(2, DType::F32, &Device::Cpu).unwrap()).unwrap();
        let error = handle.set_activation_checkpointing(true).unwrap_err();
        assert_says!(error, "module `same` … checkpointing … first forward … `ParallelizeFn` …");
        assert!(handle.set_units_to_backward_prefetch(&[]).is_err());
        assert!(!handle.activation_checkpointing());
        assert_eq!(handle.units_to_forward_prefetch(), ["same"]);
    }
}
