//! Work of layers after each optimizer step.

use std::fmt::Debug;
use std::sync::Arc;

use super::{ModuleBuilder, ModuleTree};
use crate::Result;

/// A layer's work after each optimizer step, by values of all ranks and micro-batches of the step:
/// for example the bias that balances experts, by their loads.
///
/// Declared with [`ModuleBuilder::after_step`]. The runtime sums the values of all layers over the
/// data- and context-parallel ranks of all stages in one collective. While replicas train apart,
/// the ranks of each replica sum theirs.
pub trait AfterStep: Debug + Send + Sync {
    /// Returns this rank's values since the last call, and forgets them. Every rank returns equally
    /// many. They are of this rank's forwards: zeros if another stage computes the layer. Also
    /// called, with the result unused, when a step is abandoned or skipped.
    fn take(&self) -> Vec<f64>;

    /// Changes the layer's buffers by the values' sums over the ranks, which are the same on each.
    /// Called on the ranks with other stages of a pipeline too. It changes them by
    /// [`Buffer::overwrite`](crate::parameter::Buffer::overwrite), and reads no parameter, which
    /// ranks with other stages do not have.
    ///
    /// # Errors
    /// If the buffers cannot be changed.
    fn update(&self, sums: &[f64]) -> Result<()>;
}

impl ModuleBuilder {
    /// Declares work after each optimizer step. Layers are called in the order of declaration.
    pub fn after_step(&self, work: Arc<dyn AfterStep>) {
        self.tree().after_step.push(work);
    }
}

impl ModuleTree {
    /// The layers' [work after each step](ModuleBuilder::after_step), in the order of declaration.
    pub fn after_step(&self) -> &[Arc<dyn AfterStep>] {
        &self.after_step
    }
}
