//! candle variables that are no parameters.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use crate::{Error, Result, counted};

/// Checks that the backward of `root` gave no gradient to a variable of candle's own. Parameters take
/// theirs before candle stores it, so a variable with one is none of the model's: a `Var`, or a tensor from
/// a `VarMap`, which no optimizer updates, no strategy distributes and no checkpoint has.
///
/// # Errors
/// If there are such variables; the message has their shapes.
pub fn refuse_variables(root: &Tensor, grads: &GradStore) -> Result<()> {
    let strays = root.sorted_nodes().into_iter().rev();
    let strays = strays.filter(|node| node.is_variable() && grads.get(node).is_some());
    let shapes: Vec<String> = strays.map(|var| format!("{:?}", var.dims())).collect();
    if shapes.is_empty() {
        return Ok(());
    }
    Err(Error::other(format!(
        "a gradient reached {} outside of the model's parameters, of shape {}. They \
         would never be trained, saved or distributed: declare them where the model is built, with \
         `ModuleBuilder::parameter`, or with `ModuleBuilder::var_builder` in place of a `VarMap`. If they \
         are meant to be constant, compute with `var.as_detached_tensor()`",
        counted(shapes.len(), "candle variable"),
        shapes.join(", ")
    )))
}
