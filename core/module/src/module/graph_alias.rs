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
use fulgurite_tensor::execution;

/// The outputs still held by a model that computes in an execution context, and their aliases.
#[derive(Default)]
struct Aliases(Mutex<Vec<(TensorId, Weak<Tensor>)>>);

impl Aliases {
    fn lock(&self) -> MutexGuard<'_, Vec<(TensorId, Weak<Tensor>)>> {
        self.0.lock().expect("no panic while looking up")
    }
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
    let aliases = execution::shared::<Aliases>();
    let mut aliases = aliases.lock();
    aliases.retain(|(_, alias)| alias.strong_count() > 0);
    aliases.push((y.id(), Arc::downgrade(&alias)));
    Ok(y)
}

/// The alias of `x` in its graph, if there is one.
pub(super) fn lookup(x: &Tensor) -> Option<Arc<Tensor>> {
    let aliases = execution::shared::<Aliases>();
    let found = aliases.lock().iter().find(|(id, _)| *id == x.id()).map(|(_, alias)| alias.clone());
    found?.upgrade()
}
