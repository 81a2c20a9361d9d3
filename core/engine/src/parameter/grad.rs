//! Where gradients go.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Tensor};

use super::ParameterSlot;
use crate::Result;

/// The dtype that values of `dtype` are accumulated and computed in where sums must not lose small
/// terms (gradients, layers' sums, optimizer updates): f64 for f64, f32 for all others.
pub fn accumulation_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// A strategy's end of the gradient path. Called on the thread that runs backward.
///
/// # Contract
/// For each parameter that takes part in a backward, [`buffer`](GradReducer::buffer) is called
/// before its first gradient arrives (and again for later ones), and
/// [`ready`](GradReducer::ready) once, when every use of the parameter has delivered: in backward
/// order, or, for parameters that some use never delivered to, when backward ends. `ready` must not
/// block on other ranks longer than it needs to start a collective.
pub trait GradReducer: Send + Sync {
    /// The memory this parameter's gradient is accumulated in: a flat contiguous tensor or view
    /// with one element for each of the compute tensor's. Its content counts only after the first
    /// gradient has been written.
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

/// Keeps each gradient in a tensor of its own and sends nothing, while backward goes on: what one process
/// needs, and what a strategy starts with that communicates afterwards.
#[derive(Debug, Default)]
pub struct LocalGrads(Mutex<HashMap<String, Tensor>>);

impl LocalGrads {
    /// Hands the gradients of all backwards of the step to the parameters, of which this rank holds
    /// the whole. One that none arrived for in this step gets zeros.
    ///
    /// # Errors
    /// If memory cannot be had.
    pub fn deliver(&self, slots: &[ParameterSlot]) -> Result<()> {
        for slot in slots.iter().filter(|slot| slot.requires_grad()) {
            slot.set_local_grad(Some(self.complete(slot)?));
        }
        Ok(())
    }

    /// Gives away the gradient of a parameter, the sum over this rank's backwards since it was taken last;
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

    /// A parameter's buffer, with zeros where no gradient was written.
    fn complete(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let grad = self.buffer(slot)?;
        if !slot.has_accumulated() {
            // A fresh buffer is zero; one of an earlier step may not be.
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
        let grad = Tensor::zeros(slot.compute_elem_count(), dtype, slot.device())?;
        grads.insert(slot.fqn().to_owned(), grad.clone());
        Ok(grad)
    }

    fn ready(&self, _slot: &ParameterSlot) -> Result<()> {
        Ok(())
    }
}
