//! A strategy's access to a parameter.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::Tensor;

use super::parameter::Inner;
use super::{GradReducer, LocalShard, Parameter};
use crate::shard::ShardSpec;
use crate::{Error, Result};

/// A strategy's access to a parameter: sets how the mesh cuts it, which part this rank holds, when it
/// has values, and where its gradient goes. Dereferences to the [`Parameter`].
///
/// A strategy gets the slots from the tree that it sets up ([`ModuleTree::slots`]).
/// [`Strategy`](crate::strategy::Strategy) says what it may do in which call.
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
    pub(crate) fn new(parameter: Parameter) -> Self {
        Self(parameter)
    }

    /// The parameter.
    pub fn parameter(&self) -> &Parameter {
        &self.0
    }

    /// Sets how the mesh cuts the parameter. Call it before values exist.
    pub fn set_spec(&self, spec: ShardSpec) {
        self.0.set_spec(spec);
    }

    /// Sets the part that this rank's optimizer updates.
    pub fn set_local(&self, local: LocalShard) {
        *self.inner().local.write().expect("no panic while writing") = Some(local);
    }

    /// The compute tensor, which layers and graphs refer to. It may have no memory at the moment
    /// ([`storage`](crate::autograd::storage) allocates and releases it). Its shape is the global shape,
    /// or under tensor parallelism that of this rank's part.
    ///
    /// # Errors
    /// If candle cannot make it.
    pub fn compute(&self) -> Result<&Tensor> {
        self.0.compute()
    }

    /// Sets the reducer that takes the gradients.
    pub fn set_reducer(&self, reducer: Arc<dyn GradReducer>) {
        *self.inner().reducer.write().expect("no panic while writing") = Some(reducer);
    }

    /// Sets which [optimizer](Parameter::optimizer) updates the parameter, before the first backward.
    pub fn set_optimizer(&self, index: usize) {
        self.0.set_optimizer(index);
    }

    /// Removes the reducer. A reducer that holds slots is a reference cycle, which only this ends.
    pub fn clear_reducer(&self) {
        *self.inner().reducer.write().expect("no panic while writing") = None;
    }

    /// Ends a backward for this parameter: declares its gradient ready if it is not yet, whether or not
    /// all uses delivered, and resets the counts. Returns whether any gradient arrived in this backward.
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
        Ok(delivered)
    }

    /// Declares the gradient ready if no use of the parameter is pending, because this rank's forward
    /// did not use it. Call it when the backward of the parameter's unit begins, if every graph that may
    /// deliver is of a forward since the last backward.
    ///
    /// # Errors
    /// If the reducer fails.
    pub fn finish_unused(&self) -> Result<()> {
        let unused = self.takes_grad() && self.0.flow().complete();
        if unused { self.0.ready() } else { Ok(()) }
    }

    /// Whether any gradient has arrived in the backward that is running, before
    /// [`finish_backward`](Self::finish_backward) ends it.
    pub fn has_delivered(&self) -> bool {
        self.0.flow().delivered_now
    }

    /// Whether counted uses have not delivered. At the end of a backward, before
    /// [`finish_backward`](Self::finish_backward) resets the count, these are uses whose gradients
    /// another backward may bring.
    pub fn has_pending_uses(&self) -> bool {
        self.0.flow().pending_uses > 0
    }

    /// Forgets the accumulated gradient: the next one overwrites the buffer.
    pub fn clear_accumulated(&self) {
        self.0.flow().accumulated = false;
    }

    /// Declares that the buffer holds a gradient, which the next one is added to: for a strategy that
    /// wrote it.
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

    /// Forgets the step's gradient, and a forward and backward that failed at any point: the uses that have not
    /// delivered.
    pub fn abandon_backward(&self) {
        self.end_step();
        let mut flow = self.0.flow();
        flow.pending_uses = 0;
        flow.pending_hook = !flow.exposed_in.is_empty();
        flow.delivered_now = false;
        flow.ready = false;
    }

    fn inner(&self) -> &Inner {
        &self.0.0
    }
}
