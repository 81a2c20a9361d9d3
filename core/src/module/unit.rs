//! Units: modules that are gathered, computed and released as one.

use std::sync::{Arc, RwLock};

use candle_core::{DType, Tensor};

use super::{FullyShard, Module};
use crate::Result;
use crate::autograd::{function, is_grad_enabled};

/// A strategy's hooks around a unit's forward and backward. Called on the thread that computes.
pub trait UnitHooks: Send + Sync {
    /// Before the unit computes: its parameters must have values when this returns.
    fn pre_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// After the unit has computed.
    fn post_forward(&self, unit: &UnitHandle) -> Result<()>;

    /// Before the unit's backward: its parameters must have values when this returns.
    fn pre_backward(&self, unit: &UnitHandle) -> Result<()>;

    /// dtype that a floating-point input is cast to; `None` leaves it.
    fn input_dtype(&self) -> Option<DType> {
        None
    }

    /// dtype that the output is cast to; `None` leaves it.
    fn output_dtype(&self) -> Option<DType> {
        None
    }
}

/// A unit without its module: what strategies hold on to.
#[derive(Clone)]
pub struct UnitHandle(Arc<UnitInner>);

struct UnitInner {
    index: usize,
    path: String,
    hooks: RwLock<Option<Arc<dyn UnitHooks>>>,
    /// Whether and how it is gathered on its own.
    fully_shard: RwLock<Option<FullyShard>>,
}

impl UnitHandle {
    pub(crate) fn new(index: usize, path: String) -> Self {
        Self(Arc::new(UnitInner {
            index,
            path,
            hooks: RwLock::default(),
            fully_shard: RwLock::default(),
        }))
    }

    /// The unit's place in the order in which units were built.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The module's path.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Sets the hooks. For strategies.
    pub fn set_hooks(&self, hooks: Arc<dyn UnitHooks>) {
        *self.0.hooks.write().expect("no panic while writing") = Some(hooks);
    }

    pub(super) fn set_fully_shard(&self, options: FullyShard) {
        *self.0.fully_shard.write().expect("no panic while writing") = Some(options);
    }

    pub(super) fn fully_shard_options(&self) -> Option<FullyShard> {
        *self.0.fully_shard.read().expect("no panic while reading")
    }

    fn hooks(&self) -> Option<Arc<dyn UnitHooks>> {
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

/// A module that is worth gathering as one, a transformer block for instance. Made by
/// [`ModuleBuilder::unit`](super::ModuleBuilder::unit). Without a strategy's hooks it costs nothing.
#[derive(Debug)]
pub struct Unit<M> {
    module: M,
    handle: UnitHandle,
}

impl<M> Unit<M> {
    pub(crate) fn new(module: M, handle: UnitHandle) -> Self {
        Self { module, handle }
    }

    /// The unit's handle.
    pub fn handle(&self) -> &UnitHandle {
        &self.handle
    }

    /// The module, to look at. Computing with it directly bypasses the strategy; use
    /// [`call`](Self::call).
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Computes with the module through any of its methods, from one tensor to another, with the
    /// strategy's hooks around it.
    pub fn call(
        &self,
        x: &Tensor,
        f: impl FnOnce(&M, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(hooks) = self.handle.hooks() else {
            return f(&self.module, x);
        };
        hooks.pre_forward(&self.handle)?;
        let cast = |x: &Tensor, dtype: Option<DType>| match dtype {
            Some(dtype) if x.dtype().is_float() => x.to_dtype(dtype),
            _ => Ok(x.clone()),
        };
        let y = f(&self.module, &cast(x, hooks.input_dtype())?)?;
        let y = cast(&y, hooks.output_dtype())?;
        hooks.post_forward(&self.handle)?;
        if !is_grad_enabled() {
            return Ok(y.detach());
        }
        let handle = self.handle.clone();
        function(&[&y], y.copy()?.detach(), move |_, grad| {
            hooks.pre_backward(&handle)?;
            Ok(vec![Some(grad.clone())])
        })
    }
}

impl<M: Module> Module for Unit<M> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.call(x, |module, x| module.forward(x))
    }
}
