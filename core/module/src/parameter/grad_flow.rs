//! A parameter's gradient within a step: pending uses, and gradients delivered by them.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};

use candle_core::Tensor;

use super::{GradReducer, Parameter, ParameterSlot, uses};
use crate::{Error, Result};
use fulgurite_tensor::autograd::{GradMode, add_into, anomaly, detects_anomalies, storage};

/// The state of a parameter's gradient within a step.
#[derive(Debug, Default)]
pub(super) struct GradFlow {
    /// Uses, by layers with a hand-written backward, that have not delivered yet.
    pub(super) pending_uses: usize,
    /// Whether candle's graph has yet to deliver to the hook.
    pub(super) pending_hook: bool,
    /// The units (`None`: outside of units) whose layers hold the compute tensor directly and
    /// record a graph. Their uses cannot be counted, so every backward is expected to deliver.
    pub(super) exposed_in: BTreeSet<Option<usize>>,
    /// Whether further micro-batches of the step use the parameter, so that no use is the last.
    pub(super) held: bool,
    /// Whether the buffer already holds a gradient, to which the next one is added.
    pub(super) accumulated: bool,
    /// Whether the running backward has delivered a gradient.
    pub(super) delivered_now: bool,
    /// Whether the running backward has called `ready`.
    pub(super) ready: bool,
    /// This rank's reduced gradient, flat, for the optimizer.
    pub(super) local_grad: Option<Tensor>,
}

impl GradFlow {
    /// Whether all counted uses have delivered and `ready` has not been called yet.
    pub(super) fn complete(&self) -> bool {
        self.pending_uses == 0 && !self.pending_hook && !self.ready && !self.held
    }
}

/// For layers with a hand-written backward.
impl Parameter {
    /// Counts one use, whose backward will call [`end_use`](Self::end_use). Counts nothing without
    /// a later backward, and nothing again when a checkpointed unit is recomputed.
    pub(crate) fn begin_use(&self) {
        if !self.takes_grad() {
            return;
        }
        self.note_recorded();
        match GradMode::current() {
            GradMode::Enabled => self.flow().pending_uses += 1,
            GradMode::Deferred | GradMode::Offloading(_) => {
                uses::note();
                self.flow().pending_uses += 1;
            }
            GradMode::Disabled | GradMode::Recomputing(_) => {}
        }
    }

    /// Sets whether layers of a unit (`None`: outside of units) hold the compute tensor directly
    /// and record a graph. Layers of a checkpointed unit do not.
    pub(crate) fn set_exposed(&self, unit: Option<usize>, in_graph: bool) {
        let mut flow = self.flow();
        match in_graph {
            true => flow.exposed_in.insert(unit),
            false => flow.exposed_in.remove(&unit),
        };
        flow.pending_hook = self.requires_grad() && !flow.exposed_in.is_empty();
    }

    /// Lets `write` add a gradient to the parameter's buffer. It gets the flat buffer, and whether
    /// to add to its content (`true`) or to overwrite it. Does nothing for a frozen or paused
    /// parameter.
    pub fn accumulate_with(&self, write: impl FnOnce(&Tensor, bool) -> Result<()>) -> Result<()> {
        if !self.takes_grad() {
            return Ok(());
        }
        if self.flow().ready && GradMode::current().recomputes() {
            return Err(Error::parameter(
                self.fqn(),
                "got a gradient after its last one: a unit whose activations are checkpointed used \
                 it more often when it was computed again than in its forward, where what it \
                 computes must depend on its input and on what its closure captured alone; or the \
                 loss joins the graph of a forward from before the last backward with that of a \
                 newer one",
            ));
        }
        let buffer = self.reducer()?.buffer(&ParameterSlot::new(self.clone()))?;
        let accumulated = {
            let mut flow = self.flow();
            flow.delivered_now = true;
            std::mem::replace(&mut flow.accumulated, true)
        };
        write(&buffer, accumulated)?;
        if detects_anomalies()
            && let Some(found) = anomaly(&buffer)?
        {
            let message = format!("detect_anomaly: its gradient has {found}");
            return Err(Error::parameter(self.fqn(), message));
        }
        Ok(())
    }

    /// Adds a gradient of the parameter's shape, in any layout and float dtype.
    pub fn accumulate(&self, grad: &Tensor) -> Result<()> {
        let shape = self.compute_shape();
        if grad.dims() != shape {
            let message = format!("got a gradient of shape {:?}, not {shape:?}", grad.dims());
            return Err(Error::parameter(self.fqn(), message));
        }
        self.accumulate_with(|buffer, add| {
            let grad = storage::cast(&grad.flatten_all()?, buffer.dtype())?.contiguous()?;
            if add { add_into(buffer, &grad) } else { storage::copy_from(buffer, &grad) }
        })
    }

    /// Ends one counted use whose gradient was delivered. After the last one, the reducer is told
    /// that the gradient is [ready](GradReducer::ready).
    pub fn end_use(&self) -> Result<()> {
        if !self.takes_grad() {
            return Ok(());
        }
        let complete = {
            let mut flow = self.flow();
            // An uncounted use, whose forward ran before the last backward ended, says nothing
            // about the remaining ones.
            let counted = flow.pending_uses > 0;
            flow.pending_uses = flow.pending_uses.saturating_sub(1);
            counted && flow.complete()
        };
        if complete { self.ready() } else { Ok(()) }
    }

    /// Whether the reducer's buffer holds a gradient of this step.
    pub fn has_accumulated(&self) -> bool {
        self.flow().accumulated
    }

    /// Takes the gradient summed by candle's graph.
    pub(super) fn deliver_from_graph(&self, grad: &Tensor) -> Result<()> {
        if !self.takes_grad() {
            return Ok(());
        }
        if GradMode::current().own_graph().is_some() {
            // The unit's backward ends this use: `Uses::end_tensor_uses`.
            uses::check_tensor_use(self)?;
            return self.accumulate(grad);
        }
        self.accumulate(grad)?;
        let complete = {
            let mut flow = self.flow();
            let counted = std::mem::replace(&mut flow.pending_hook, false);
            counted && flow.complete()
        };
        if complete { self.ready() } else { Ok(()) }
    }

    /// Tells the reducer that the gradient of this backward is complete.
    pub(super) fn ready(&self) -> Result<()> {
        self.flow().ready = true;
        self.reducer()?.ready(&ParameterSlot::new(self.clone()))
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

    pub(super) fn flow(&self) -> MutexGuard<'_, GradFlow> {
        self.0.flow.lock().expect("no panic while a gradient flows")
    }
}
