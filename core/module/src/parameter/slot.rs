//! A strategy's access to a parameter.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;

use super::parameter::Inner;
use super::{GradReducer, LocalShard, Parameter};
use crate::{Error, Result};
use fulgurite_collective::shard::{Region, ShardSpec};

/// A strategy's access to a parameter: sets its cuts, this rank's part, the time when it has
/// values, and the target of its gradient. Dereferences to the [`Parameter`].
///
/// A strategy gets the slots from the tree that it sets up ([`ModuleTree::slots`]). Only a slot
/// changes how a parameter is cut, held and reduced. The contract of `Strategy` says what may be
/// done in which of its methods.
///
/// [`ModuleTree::slots`]: crate::module::ModuleTree::slots
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSlot(Parameter);

impl Deref for ParameterSlot {
    type Target = Parameter;

    fn deref(&self) -> &Parameter {
        &self.0
    }
}

impl ParameterSlot {
    #[doc(hidden)]
    pub fn new(parameter: Parameter) -> Self {
        Self(parameter)
    }

    /// The parameter.
    pub fn parameter(&self) -> &Parameter {
        &self.0
    }

    /// Sets the mesh's cuts of the parameter. Call it before values exist.
    pub fn set_spec(&self, spec: ShardSpec) {
        self.0.set_spec(spec);
    }

    /// Sets the part that this rank's optimizer updates.
    pub fn set_local(&self, local: LocalShard) {
        *self.inner().local.write().expect("no panic while writing") = Some(local);
    }

    /// The compute tensor, to which layers and graphs refer. It may have no memory at the moment
    /// ([`storage`](fulgurite_tensor::autograd::storage) allocates and releases it). Its shape is
    /// the global shape, or this rank's part under tensor parallelism.
    ///
    /// # Errors
    /// If candle fails.
    pub fn compute(&self) -> Result<&Tensor> {
        self.0.compute()
    }

    /// Sets the reducer that takes the gradients.
    pub fn set_reducer(&self, reducer: Arc<dyn GradReducer>) {
        *self.inner().reducer.write().expect("no panic while writing") = Some(reducer);
    }

    /// Sets the [optimizer](Parameter::optimizer) that updates the parameter, before the first
    /// backward.
    pub fn set_optimizer(&self, index: usize) {
        self.0.set_optimizer(index);
    }

    /// Removes the reducer. A reducer that holds slots is a reference cycle, which only this call
    /// breaks.
    pub fn clear_reducer(&self) {
        *self.inner().reducer.write().expect("no panic while writing") = None;
    }

    /// Ends a backward for this parameter: declares its gradient ready unless it was, even if some
    /// uses did not deliver, and resets the counts. Returns whether any gradient arrived in this
    /// backward.
    ///
    /// # Errors
    /// If the reducer fails.
    pub fn finish_backward(&self) -> Result<bool> {
        if !self.takes_grad() {
            return Ok(false);
        }
        let (ready, delivered) = {
            let flow = self.0.flow();
            (flow.ready, flow.delivered_now)
        };
        if !ready {
            self.0.ready()?;
        }
        let mut flow = self.0.flow();
        flow.pending_uses = 0;
        flow.pending_hook = !flow.exposed_in.is_empty();
        flow.delivered_now = false;
        flow.ready = false;
        flow.held = false;
        Ok(delivered)
    }

    /// Declares the gradient ready if the parameter has no pending uses, because this rank's
    /// forward did not use it. Call it when the backward of the parameter's unit begins, provided
    /// that all graphs that may still deliver come from forwards after the last backward.
    ///
    /// # Errors
    /// If the reducer fails.
    pub fn finish_unused(&self) -> Result<()> {
        let unused = self.takes_grad() && self.0.flow().complete();
        if unused { self.0.ready() } else { Ok(()) }
    }

    /// Whether the running backward has delivered a gradient.
    /// [`finish_backward`](Self::finish_backward) resets it.
    pub fn has_delivered(&self) -> bool {
        self.0.flow().delivered_now
    }

    /// Whether some counted uses have not delivered. At the end of a backward, before
    /// [`finish_backward`](Self::finish_backward) resets the count, another backward may bring
    /// their gradients.
    pub fn has_pending_uses(&self) -> bool {
        self.0.flow().pending_uses > 0
    }

    /// Gives the parameter to other ranks: this one holds nothing of it. `spec` says who has it.
    /// Call it before values exist.
    ///
    /// # Errors
    /// If candle fails.
    pub fn set_elsewhere(&self, spec: ShardSpec, region: Region) -> Result<()> {
        debug_assert!(region.is_empty());
        self.0.set_elsewhere();
        self.set_spec(spec);
        let values = Tensor::zeros(0, self.dtype(), self.device())?;
        self.set_local(LocalShard { values, region });
        Ok(())
    }

    /// Keeps the gradient from being ready until [`release`](Self::release), because several
    /// micro-batches are under way at once.
    pub fn hold(&self) {
        self.0.flow().held = true;
    }

    /// Ends [`hold`](Self::hold). Call it before the backward of the last micro-batch.
    pub fn release(&self) {
        let mut flow = self.0.flow();
        flow.held = false;
        flow.pending_hook = !flow.exposed_in.is_empty();
    }

    /// Ends [`hold`](Self::hold) after the backward of the last micro-batch, and declares the
    /// gradient ready if nothing is left to come.
    ///
    /// # Errors
    /// If the reducer fails.
    pub fn finish_hold(&self) -> Result<()> {
        {
            let mut flow = self.0.flow();
            flow.held = false;
            flow.pending_hook = false;
        }
        self.finish_unused()
    }

    /// Forgets the accumulated gradient: the next one overwrites the buffer.
    pub fn clear_accumulated(&self) {
        self.0.flow().accumulated = false;
    }

    /// Declares that the buffer holds a gradient, to which the next one is added. For a strategy
    /// that has written it.
    pub fn mark_accumulated(&self) {
        self.0.flow().accumulated = true;
    }

    /// Adds `grad` to the step's [`local_grad`](Parameter::local_grad).
    ///
    /// # Errors
    /// If `grad` is not parallel to [`local`](Parameter::local)'s values.
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

    /// Forgets the step's gradient.
    pub fn end_step(&self) {
        let mut flow = self.0.flow();
        flow.accumulated = false;
        flow.local_grad = None;
    }

    /// Forgets the step's gradient, and the pending uses of a forward and backward that failed at
    /// any point.
    pub fn abandon_backward(&self) {
        self.end_step();
        let mut flow = self.0.flow();
        flow.pending_uses = 0;
        flow.held = false;
        flow.pending_hook = !flow.exposed_in.is_empty();
        flow.delivered_now = false;
        flow.ready = false;
    }

    fn inner(&self) -> &Inner {
        &self.0.0
    }
}
