//! Uses of parameters in the forward of a unit with checkpointed or offloaded activations. The
//! unit's backward ends the uses, and a recomputation must use the same parameters.

use std::sync::Arc;
use std::sync::Mutex;

use super::Parameter;
use crate::{Error, Result};
use fulgurite_tensor::execution;

/// Uses of parameters in one call of a unit.
#[derive(Debug, Default, Clone)]
pub(crate) struct Uses {
    any: bool,
    /// Trainable parameters used as plain tensors. The call's backward delivers the gradient of
    /// each once.
    as_tensors: Vec<Parameter>,
}

/// The uses of the unit being computed or recomputed: a value of the execution context.
#[derive(Default)]
struct UnitUses(Mutex<Uses>);

impl UnitUses {
    fn current() -> Option<Arc<Self>> {
        execution::value()
    }

    fn with<R>(&self, f: impl FnOnce(&mut Uses) -> R) -> R {
        f(&mut self.0.lock().expect("no panic while noting"))
    }
}

impl Uses {
    /// Runs `f` and collects its uses.
    pub(crate) fn collect<R>(f: impl FnOnce() -> R) -> (R, Self) {
        let _collecting = execution::enter(UnitUses::default());
        let collected = UnitUses::current();
        let result = f();
        (result, collected.map(|uses| uses.with(std::mem::take)).unwrap_or_default())
    }

    /// Runs `f`, the backward of the call with these uses.
    pub(crate) fn during<R>(&self, f: impl FnOnce() -> R) -> R {
        let _known = execution::enter(UnitUses(Mutex::new(self.clone())));
        f()
    }

    /// Parameters used as plain tensors.
    pub(crate) fn as_tensors(&self) -> &[Parameter] {
        &self.as_tensors
    }

    /// Whether any trainable parameter was used.
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    /// Counts a use of each parameter used as a plain tensor.
    pub(crate) fn begin_tensor_uses(&self) {
        self.as_tensors.iter().for_each(Parameter::begin_use);
    }

    /// Ends the uses that [`begin_tensor_uses`](Self::begin_tensor_uses) counted.
    pub(crate) fn end_tensor_uses(&self) -> Result<()> {
        self.as_tensors.iter().try_for_each(Parameter::end_use)
    }
}

/// Records that a trainable parameter was used.
pub(super) fn note() {
    if let Some(uses) = UnitUses::current() {
        uses.with(|uses| uses.any = true);
    }
}

/// Records that a trainable parameter was used as a plain tensor.
pub(crate) fn note_tensor_use(parameter: &Parameter) {
    if let Some(uses) = UnitUses::current() {
        uses.with(|uses| {
            uses.any = true;
            if !uses.as_tensors.contains(parameter) {
                uses.as_tensors.push(parameter.clone());
            }
        });
    }
}

/// Checks that the forward used the parameter as a plain tensor.
///
/// # Errors
/// If it did not. Its gradient may already have been declared ready.
pub(super) fn check_tensor_use(parameter: &Parameter) -> Result<()> {
    let uses = UnitUses::current();
    if uses.is_some_and(|uses| uses.with(|uses| uses.as_tensors.contains(parameter))) {
        return Ok(());
    }
    Err(Error::parameter(
        parameter.fqn(),
        "gets a gradient from a unit whose activations are checkpointed or offloaded and whose forward did not \
         use it: the unit's closure captured a tensor that was computed from it. Give that tensor \
         to the unit as its input, detach it, or do not checkpoint this unit",
    ))
}
