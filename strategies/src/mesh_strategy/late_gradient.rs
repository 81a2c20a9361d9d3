//! Gradients that come when their sum over the ranks has begun.

use fulgurite_core::Error;
use fulgurite_core::parameter::Parameter;

/// A loss joined forwards whose uses of `parameter` could not be counted together.
pub(super) fn late_gradient(parameter: &Parameter) -> Error {
    Error::parameter(
        parameter.fqn(),
        "got a gradient after its sum over the ranks was begun: this loss joins the graph of a forward \
         from before the last backward with that of a newer one. Call backward for each of them, or \
         run these forwards before the step's first backward",
    )
}
