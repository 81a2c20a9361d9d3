//! candle variables that are not parameters.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use crate::{Error, Result, counted};

/// Checks that the backward of `root` gave no gradient to a candle variable. Parameters take their
/// gradients before candle stores them, so a variable with a gradient is not a parameter. It is a
/// `Var`, or a tensor from a `VarMap`: no optimizer updates it, no strategy distributes it, and no
/// checkpoint has it.
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
