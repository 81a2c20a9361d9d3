//! Aliases: tensors in a graph that stand for other tensors, without their memory.
//!
//! A candle graph holds the inputs of every operation. With offloaded unit inputs, the model gets a
//! unit's output as a separate tensor, and the graph holds an alias of the output without memory.
//! The next unit takes the output as input and continues the graph from the alias. So the output's
//! memory is free once the model drops it. Other operations on the output continue the graph from
//! the output itself. Both gradients add up.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use candle_core::{Tensor, TensorId};

use crate::Result;
use fulgurite_tensor::autograd::function;

/// The outputs still held by the model, and their aliases. Ids are unique in the process.
static ALIASES: Mutex<Vec<(TensorId, Weak<Tensor>)>> = Mutex::new(Vec::new());

fn aliases() -> MutexGuard<'static, Vec<(TensorId, Weak<Tensor>)>> {
    ALIASES.lock().expect("no panic while looking up")
}

/// Moves the storage of `y`, a tensor in a graph, to a new tensor. `y` stays in the graph as the
/// alias, for as long as the new tensor's graph lives.
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

/// The alias of `x` in its graph, if there is one.
pub(super) fn lookup(x: &Tensor) -> Option<Arc<Tensor>> {
    aliases().iter().find(|(id, _)| *id == x.id()).and_then(|(_, alias)| alias.upgrade())
}
