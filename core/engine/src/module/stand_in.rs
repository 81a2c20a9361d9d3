//! Tensors that are in a graph in place of others, whose memory the graph then does not hold.
//!
//! A graph of candle holds every tensor that something was computed from. The output of a unit is
//! given to the model as a copy of the graph's tensor, which itself has no memory. Another unit that
//! gets it as its input continues the graph from there: once the model lets the output go, its memory is free.
//! Whoever else computes with it continues from the copy, and gradients add up as ever.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use candle_core::{Tensor, TensorId};

use crate::Result;
use crate::autograd::function;

thread_local! {
    /// Outputs that were given to the model and are still there, and what stands for them.
    static OUTPUTS: RefCell<Vec<(TensorId, Weak<Tensor>)>> = const { RefCell::new(vec![]) };
}

/// `y`, which is in a graph, with its memory moved out of it.
pub(super) fn leave(y: Tensor) -> Result<Tensor> {
    let stand_in = Arc::new(y);
    let held = stand_in.clone();
    let y = function(&[&stand_in], stand_in.detach(), move |_, grad| {
        let _stays_as_long_as_the_output = &held;
        Ok(vec![Some(grad.clone())])
    })?;
    OUTPUTS.with_borrow_mut(|outputs| {
        outputs.retain(|(_, stand_in)| stand_in.strong_count() > 0);
        outputs.push((y.id(), Arc::downgrade(&stand_in)));
    });
    Ok(y)
}

/// What stands for `x` in its graph, if something does.
pub(super) fn of(x: &Tensor) -> Option<Arc<Tensor>> {
    OUTPUTS.with_borrow(|outputs| {
        outputs.iter().find(|(id, _)| *id == x.id()).and_then(|(_, stand_in)| stand_in.upgrade())
    })
}
