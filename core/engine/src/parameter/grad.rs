//! How strategies take gradients.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Tensor};

use super::ParameterSlot;
use crate::Result;
use crate::autograd::storage;

/// The dtype in which gradients, sums within layers and optimizer updates are computed for values of
/// `dtype`, so that small terms are not lost: f64 for f64, f32 for all others.
pub fn accumulation_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Takes parameters' gradients for a strategy. Called on the thread that runs backward.
///
/// # Contract
/// For each parameter that takes part in a backward, [`buffer`](GradReducer::buffer) is called
/// before its first gradient arrives (and again for later ones), and
/// [`ready`](GradReducer::ready) once, when every use of the parameter has delivered: in backward
/// order, or, for parameters that some use never delivered to, when backward ends. `ready` must not
/// block on other ranks longer than it needs to start a collective.
pub trait GradReducer: Send + Sync {
    /// The memory this parameter's gradient is accumulated in: a flat contiguous tensor or view with one
    /// element for each of the compute tensor's. Its content is not read before the first gradient is
    /// written.
    ///
    /// # Errors
    /// If there is no memory for it, or it can take no more gradients.
    fn buffer(&self, slot: &ParameterSlot) -> Result<Tensor>;

    /// The parameter's gradient of this backward is complete.
    ///
    /// # Errors
    /// If a reduction cannot be started.
    fn ready(&self, slot: &ParameterSlot) -> Result<()>;
}

/// A reducer that keeps each gradient in a tensor of its own and communicates nothing: for one process,
/// and for strategies that communicate after backward.
#[derive(Debug, Default)]
pub struct LocalGrads(Mutex<HashMap<String, Tensor>>);

impl LocalGrads {
    /// Makes the sum over the step's backwards each parameter's local gradient, or zeros if no gradient
    /// arrived. For parameters that this rank holds whole.
    ///
    /// # Errors
    /// If memory cannot be had.
    pub fn deliver(&self, slots: &[ParameterSlot]) -> Result<()> {
        for slot in slots.iter().filter(|slot| slot.requires_grad()) {
            slot.set_local_grad(Some(self.complete(slot)?));
        }
        Ok(())
    }

    /// Takes a parameter's gradient out: the sum over this rank's backwards since it was last taken, or
    /// zeros if none arrived.
    ///
    /// # Errors
    /// If memory cannot be had.
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
        let grad = storage::unset(slot.compute_elem_count(), dtype, slot.device())?;
        grads.insert(slot.fqn().to_owned(), grad.clone());
        Ok(grad)
    }

    fn ready(&self, _slot: &ParameterSlot) -> Result<()> {
        Ok(())
    }
}
