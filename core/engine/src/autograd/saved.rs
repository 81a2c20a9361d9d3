//! What backwards keep besides the tensors of the graph.

use std::sync::Mutex;

use candle_core::Tensor;

use super::GradMode;
use crate::execution;

/// What the layers of a unit keep: a value of the execution context.
#[derive(Default)]
struct Saved(Mutex<Vec<Tensor>>);

/// Tells that a backward keeps these tensors, as `ctx.save_for_backward` of PyTorch does: a unit whose
/// activations are offloaded moves their memory, and that of everything that shares it, away until then. For
/// large tensors that are no inputs of the operation and not its output, which the graph has anyway; never for
/// values of parameters.
pub fn save_for_backward(tensors: &[&Tensor]) {
    if let GradMode::Offloading(_) = GradMode::current()
        && let Some(saved) = execution::value::<Saved>()
    {
        let tensors = tensors.iter().map(|tensor| tensor.detach());
        saved.0.lock().expect("no panic while noting").extend(tensors);
    }
}

/// Runs `f` and collects what is saved in it.
pub(crate) fn collect_saved<R>(f: impl FnOnce() -> R) -> (R, Vec<Tensor>) {
    let _collecting = execution::enter(Saved::default());
    let collected = execution::value::<Saved>();
    let result = f();
    let take = |saved: &Saved| std::mem::take(&mut *saved.0.lock().expect("no panic while noting"));
    (result, collected.map(|saved| take(&saved)).unwrap_or_default())
}
