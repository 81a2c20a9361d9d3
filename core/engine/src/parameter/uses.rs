//! What the forward of a unit with checkpointed activations used of parameters, so that its
//! backward, which computes it again, counts the same.

use std::cell::RefCell;

use super::Parameter;
use crate::{Error, Result};

thread_local! {
    /// The uses of the unit that is computed now, or computed again.
    static CURRENT: RefCell<Uses> = const { RefCell::new(Uses { any: false, taps: Vec::new() }) };
}

/// Uses of parameters in one call of a unit.
#[derive(Debug, Default, Clone)]
pub(crate) struct Uses {
    any: bool,
    /// Trainable parameters used as plain tensors: the call's backward delivers each one's gradient
    /// once.
    taps: Vec<Parameter>,
}

impl Uses {
    /// Collects the uses of what `f` computes on this thread.
    pub(crate) fn collect<R>(f: impl FnOnce() -> R) -> (R, Self) {
        let restore = Restore(CURRENT.take());
        let result = f();
        let uses = CURRENT.take();
        drop(restore);
        (result, uses)
    }

    /// Runs `f`, the backward of the call with these uses.
    pub(crate) fn during<R>(&self, f: impl FnOnce() -> R) -> R {
        let _restore = Restore(CURRENT.replace(self.clone()));
        f()
    }

    /// Whether any trainable parameter was used.
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    /// Counts a use of each parameter that was used as a plain tensor.
    pub(crate) fn begin_taps(&self) {
        self.taps.iter().for_each(Parameter::begin_use);
    }

    /// Ends those uses.
    pub(crate) fn end_taps(&self) -> Result<()> {
        self.taps.iter().try_for_each(Parameter::end_use)
    }
}

/// Puts back what was collected before.
struct Restore(Uses);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(std::mem::take(&mut self.0));
    }
}

/// Notes that a trainable parameter was used.
pub(super) fn note() {
    CURRENT.with_borrow_mut(|uses| uses.any = true);
}

/// Notes that a trainable parameter was used as a plain tensor.
pub(crate) fn note_tap(parameter: &Parameter) {
    CURRENT.with_borrow_mut(|uses| {
        uses.any = true;
        if !uses.taps.contains(parameter) {
            uses.taps.push(parameter.clone());
        }
    });
}

/// Checks that the forward used the parameter as a plain tensor.
///
/// # Errors
/// If it did not: its gradient would come after others believe it complete.
pub(super) fn check_tap(parameter: &Parameter) -> Result<()> {
    if CURRENT.with_borrow(|uses| uses.taps.contains(parameter)) {
        return Ok(());
    }
    Err(Error::parameter(
        parameter.fqn(),
        "gets a gradient from a unit whose activations are checkpointed and whose forward did not \
         use it: the unit's closure captured a tensor that was computed from it. Give that tensor \
         to the unit as its input, detach it, or do not checkpoint this unit",
    ))
}
