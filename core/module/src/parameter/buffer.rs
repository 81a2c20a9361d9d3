//! Buffers: values of a module outside of the optimizer.

use std::sync::{Arc, RwLock};

use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Tensor};

use super::Init;
use crate::{Error, Result};
use fulgurite_collective::shard::Region;
use fulgurite_tensor::autograd::GradMode;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::memory::{self, MemoryKind};

/// A buffer's initial values.
#[derive(Debug, Clone)]
pub enum BufferInit {
    /// A function of the element, as for parameters. The same on every rank.
    Init(Init),
    /// These values. Must be the same on every rank.
    Values(Tensor),
}

impl From<Init> for BufferInit {
    fn from(init: Init) -> Self {
        Self::Init(init)
    }
}

impl From<Tensor> for BufferInit {
    fn from(values: Tensor) -> Self {
        Self::Values(values)
    }
}

/// Options of a buffer. By default in f32 and saved with the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferOptions {
    /// The dtype; may be an integer type. Precision settings do not change it.
    pub dtype: DType,
    /// Whether checkpoints save it (`persistent` of torch's `register_buffer`).
    pub persistent: bool,
    /// Whether forwards set it. Otherwise only [`AfterStep`](crate::module::AfterStep) does, with
    /// the same values on every rank.
    pub set_in_forward: bool,
}

impl Default for BufferOptions {
    fn default() -> Self {
        Self { dtype: DType::F32, persistent: true, set_in_forward: true }
    }
}

impl BufferOptions {
    /// Options for a saved buffer of this dtype.
    pub fn dtype(dtype: DType) -> Self {
        Self { dtype, ..Self::default() }
    }

    /// Excludes the buffer from checkpoints. For values that can be computed again, such as a table
    /// of angles.
    #[must_use]
    pub fn not_persistent(self) -> Self {
        Self { persistent: false, ..self }
    }

    /// Declares that no forward sets the buffer: it is constant, or
    /// [`AfterStep`](crate::module::AfterStep) sets it. So all ranks have the same values, also the
    /// ranks with other stages of a pipeline, which refuses other saved buffers.
    #[must_use]
    pub fn not_set_in_forward(self) -> Self {
        Self { set_in_forward: false, ..self }
    }
}

/// An untrained value of a module: a running statistic, a counter, a mask. Declared with
/// [`ModuleBuilder::buffer`](crate::module::ModuleBuilder::buffer). Clones are the same buffer.
///
/// Every rank has it whole, under every strategy. It has values once the model is set up. Layers
/// [set](Self::set) it in training forwards. After each step the data-parallel ranks are made equal
/// (`trainer.sync_buffers`).
#[derive(Clone)]
pub struct Buffer(Arc<Inner>);

struct Inner {
    fqn: String,
    shape: Vec<usize>,
    options: BufferOptions,
    /// `None` once the buffer has values.
    init: RwLock<Option<BufferInit>>,
    /// For messages and comparisons of models.
    starts_with: String,
    tensor: Tensor,
}

impl Buffer {
    /// A buffer without memory. With `is_variable`, its tensor is a candle variable, which
    /// `Var::from_tensor` does not copy.
    pub(crate) fn new(
        fqn: String,
        shape: Vec<usize>,
        init: BufferInit,
        options: BufferOptions,
        (device, is_variable): (&Device, bool),
    ) -> Result<Self> {
        let refuse = |message: String| Err(about(&fqn, message));
        let starts_with = match &init {
            BufferInit::Init(init) => {
                if let Err(message) = init.check() {
                    return refuse(message);
                }
                format!("{init:?}")
            }
            BufferInit::Values(values) => {
                if values.dims() != shape {
                    return refuse(format!(
                        "has the shape {shape:?} and is given values of shape {:?}",
                        values.dims()
                    ));
                }
                "values".to_owned()
            }
        };
        let storage = match storage::empty(options.dtype, device) {
            Ok(storage) => storage,
            Err(_) => return refuse(format!("cannot be of dtype {:?}", options.dtype)),
        };
        let tensor = Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), is_variable);
        let init = RwLock::new(Some(init));
        Ok(Self(Arc::new(Inner { fqn, shape, options, init, starts_with, tensor })))
    }

    /// The fully qualified name.
    pub fn fqn(&self) -> &str {
        &self.0.fqn
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The dtype.
    pub fn dtype(&self) -> DType {
        self.0.options.dtype
    }

    /// Whether checkpoints save it.
    pub fn is_persistent(&self) -> bool {
        self.0.options.persistent
    }

    /// Whether forwards set it, so that ranks with other data or another stage of a pipeline have
    /// other values.
    pub fn is_set_in_forward(&self) -> bool {
        self.0.options.set_in_forward
    }

    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.0.shape.iter().product()
    }

    /// Bytes of its values.
    pub fn bytes(&self) -> u64 {
        (self.elem_count() as u64).saturating_mul(self.dtype().size_in_bytes() as u64)
    }

    /// A description of the initial values, for comparisons between ranks.
    #[doc(hidden)]
    pub fn starts_with(&self) -> &str {
        &self.0.starts_with
    }

    /// The buffer's tensor, without memory before the model is set up.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.0.tensor
    }

    /// Fills in the initial values, if it has none yet.
    #[doc(hidden)]
    pub fn materialize(&self, seed: u64) -> Result<()> {
        let Some(init) = self.0.init.write().expect("no panic while writing").take() else {
            return Ok(());
        };
        let device = self.0.tensor.device();
        let values = match init {
            BufferInit::Values(values) => values.to_device(device)?,
            BufferInit::Init(init) => {
                let region = Region::full(self.shape());
                init.values(seed, self.fqn(), self.shape(), &region, self.dtype(), device)?
            }
        };
        let _kind = memory::of_kind(MemoryKind::Parameters);
        storage::allocate(&self.0.tensor)?;
        storage::copy_from(&self.0.tensor.detach(), &values)
    }

    /// The detached values. They share the buffer's memory, so they change when the buffer is
    /// [set](Self::set). A backward that needs the current values must keep a copy.
    ///
    /// # Errors
    /// Before the model was set up.
    pub fn value(&self) -> Result<Tensor> {
        if storage::is_released(&self.0.tensor) {
            let message = "has no values: it is used before the model was set up";
            return Err(about(self.fqn(), message));
        }
        Ok(self.0.tensor.detach())
    }

    /// Replaces the values in place, converting their dtype. Called on this rank by a forward, only
    /// in training ([`ForwardScope`](crate::module::ForwardScope)). Does nothing while a
    /// checkpointed unit is recomputed, because its forward has already set the buffer. So the
    /// output of such a unit must not depend on a buffer that it sets.
    ///
    /// # Errors
    /// If the values have another shape, the model was not set up, or the buffer is
    /// [not set in forwards](BufferOptions::not_set_in_forward).
    pub fn set(&self, values: &Tensor) -> Result<()> {
        if GradMode::current().recomputes() {
            return Ok(());
        }
        if !self.is_set_in_forward() {
            let message = "is set, as in a forward, and was declared with `not_set_in_forward`; \
                           `AfterStep::update` calls `overwrite`";
            return Err(about(self.fqn(), message));
        }
        self.overwrite(values)
    }

    /// Replaces the values in place, converting their dtype, outside of forwards: after a step,
    /// with the same values on all ranks, or for all ranks' buffers to become equal.
    ///
    /// # Errors
    /// If the values have another shape, or the model was not set up.
    pub fn overwrite(&self, values: &Tensor) -> Result<()> {
        if values.dims() != self.shape() {
            let message = format!(
                "has the shape {:?} and is set to values of {:?}",
                self.shape(),
                values.dims()
            );
            return Err(about(self.fqn(), message));
        }
        storage::copy_from(&self.value()?, &values.detach())
    }
}

/// An error about a buffer.
pub fn about(fqn: &str, message: impl std::fmt::Display) -> Error {
    Error::other(format!("buffer `{fqn}`: {message}"))
}

impl PartialEq for Buffer {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("fqn", &self.fqn())
            .field("shape", &self.shape())
            .field("dtype", &self.dtype())
            .field("persistent", &self.is_persistent())
            .finish_non_exhaustive()
    }
}
