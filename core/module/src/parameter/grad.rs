//! Delivery of gradients to strategies.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Tensor};

use super::ParameterSlot;
use crate::Result;
use fulgurite_tensor::autograd::storage;
use fulgurite_tensor::memory::{self, MemoryKind};

/// The dtype for gradients, sums within layers and optimizer updates of values in `dtype`, so that
/// small terms are not lost: f64 for f64, f32 for all others.
pub fn accumulation_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Receives parameters' gradients for a strategy. Called on the thread that runs backward.
///
/// # Contract
/// For each parameter in a backward, [`buffer`](GradReducer::buffer) is called before its first
/// gradient arrives, and again for later ones. [`ready`](GradReducer::ready) is called once, when
/// every use of the parameter has delivered its gradient. Calls of `ready` come in backward order;
/// parameters with a use that never delivers come when backward ends. `ready` must not block on
/// other ranks longer than it takes to start a collective.
pub trait GradReducer: Send + Sync {
    /// The memory in which this parameter's gradient is accumulated: a flat contiguous tensor or
    /// view with as many elements as the compute tensor. Its content is not read before the first
    /// gradient is written.
    ///
    /// # Errors
    /// If memory runs out, or the parameter can take no more gradients.
    fn buffer(&self, slot: &ParameterSlot) -> Result<Tensor>;

    /// Reports that the parameter's gradient of this backward is complete.
    ///
    /// # Errors
    /// If a reduction cannot be started.
    fn ready(&self, slot: &ParameterSlot) -> Result<()>;
}

/// A reducer that keeps each gradient in a separate tensor and communicates nothing. For one
/// process, and for strategies that communicate after backward.
#[derive(Debug, Default)]
pub struct LocalGrads(Mutex<HashMap<String, Tensor>>);

impl LocalGrads {
    /// Sets each parameter's local gradient to the sum over the step's backwards, or to zeros if no
    /// gradient arrived. For parameters that this rank holds whole.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn deliver(&self, slots: &[ParameterSlot]) -> Result<()> {
        for slot in slots.iter().filter(|slot| slot.requires_grad()) {
            slot.set_local_grad(Some(self.complete(slot)?));
        }
        Ok(())
    }

    /// Takes a parameter's gradient: the sum over this rank's backwards since the last call, or
    /// zeros if no gradient arrived.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn take(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let grad = self.complete(slot)?;
        self.0.lock().expect("no panic while looking up").remove(slot.fqn());
        slot.clear_accumulated();
        Ok(grad)
    }

    /// A parameter's buffer, zeroed if no gradient was written.
    fn complete(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let grad = self.buffer(slot)?;
        if !slot.has_accumulated() {
            // A buffer of an earlier step holds old values.
            grad.zero_set()?;
        }
        Ok(grad)
    }
}

impl GradReducer for LocalGrads {
    fn buffer(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let mut grads = self.0.lock().expect("no panic while looking up");
        if let Some(grad) = grads.get(slot.fqn()) {
            return Ok(grad.clone());
        }
        let dtype = accumulation_dtype(slot.dtype());
        let _kind = memory::of_kind(MemoryKind::Gradients);
        let grad = storage::unset(slot.compute_elem_count(), dtype, slot.device())?;
        grads.insert(slot.fqn().to_owned(), grad.clone());
        Ok(grad)
    }

    fn ready(&self, _slot: &ParameterSlot) -> Result<()> {
        Ok(())
    }
}
