//! Aliases: tensors that a graph holds in place of others, without their memory.
//!
//! A graph of candle holds every tensor that something was computed from. Where inputs of units are
//! offloaded, the model gets a unit's output as a tensor of its own, and the graph holds an alias of it
//! that has no memory. The next unit, whose input it is, continues the graph from the alias, so the
//! output's memory is free once the model drops the output. What else is computed from the output
//! continues the graph from the output itself, and both gradients add up.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use candle_core::{Tensor, TensorId};

use crate::Result;
use crate::autograd::function;

/// The outputs that the model still has, and their aliases. Ids are unique in the process.
static ALIASES: Mutex<Vec<(TensorId, Weak<Tensor>)>> = Mutex::new(Vec::new());

fn aliases() -> MutexGuard<'static, Vec<(TensorId, Weak<Tensor>)>> {
    ALIASES.lock().expect("no panic while looking up")
}

/// Moves the storage of `y`, which is in a graph, to a new tensor. `y` stays in the graph as its alias,
/// for as long as the new tensor's graph lives.
pub(super) fn detach_storage(y: Tensor) -> Result<Tensor> {
    let alias = Arc::new(y);
    let held = alias.clone();
    let y = function(&[&alias], alias.detach(), move |_, grad| {
        let _lives_as_long_as_the_output = &held;
        Ok(vec![Some(grad.clone())])
    })?;
    let mut aliases = aliases();
    aliases.retain(|(_, alias)| alias.strong_count() > 0);
    aliases.push((y.id(), Arc::downgrade(&alias)));
    Ok(y)
}

/// The alias of `x` in its graph, if it has one.
pub(super) fn lookup(x: &Tensor) -> Option<Arc<Tensor>> {
    aliases().iter().find(|(id, _)| *id == x.id()).and_then(|(_, alias)| alias.upgrade())
}
