//! Tensors that backwards keep besides the tensors of the graph.

use std::sync::Mutex;

use candle_core::Tensor;

use super::GradMode;
use crate::execution;

/// Tensors saved by the layers of a unit: a value of the execution context.
#[derive(Default)]
struct Saved(Mutex<Vec<Tensor>>);

/// Declares that a backward keeps these tensors, as PyTorch's `ctx.save_for_backward`. A unit with
/// activation offload moves their memory, and all memory shared with them, away until the backward.
///
/// Call it for large tensors other than the operation's inputs and output, which the graph has
/// anyway. Never call it for values of parameters.
pub fn save_for_backward(tensors: &[&Tensor]) {
    if let GradMode::Offloading(_) = GradMode::current()
        && let Some(saved) = execution::value::<Saved>()
    {
        let tensors = tensors.iter().map(|tensor| tensor.detach());
        saved.0.lock().expect("no panic while noting").extend(tensors);
    }
}

/// Runs `f` and collects the tensors saved during the call.
pub fn collect_saved<R>(f: impl FnOnce() -> R) -> (R, Vec<Tensor>) {
    let _collecting = execution::enter(Saved::default());
    let collected = execution::value::<Saved>();
    let result = f();
    let take = |saved: &Saved| std::mem::take(&mut *saved.0.lock().expect("no panic while noting"));
    (result, collected.map(|saved| take(&saved)).unwrap_or_default())
}
