//! Attention by cuDNN, in processes with `FULGURITE_ATTENTION=cudnn`.

use fulgurite_error::Result;

use super::{functions, speed, training};
use crate::findings::Findings;
use crate::target::Target;

/// Runs `step` if cuDNN is available; otherwise reports the step as skipped.
fn if_there(target: &Target, step: fn(&Target) -> Result<Findings>) -> Result<Findings> {
    match missing() {
        Some(why) => Ok(Findings { skipped: Some(why), ..Findings::default() }),
        None => step(target),
    }
}

/// Output and gradients against f64.
pub(super) fn attention(target: &Target) -> Result<Findings> {
    if_there(target, functions::attention_by_cudnn)
}

/// The speed of attention.
pub(super) fn speed(target: &Target) -> Result<Findings> {
    if_there(target, speed::attention)
}

/// The speed of a training.
pub(super) fn llama(target: &Target) -> Result<Findings> {
    if_there(target, training::llama)
}

/// The reason why cuDNN is not available, or `None`.
#[cfg(feature = "cuda")]
fn missing() -> Option<String> {
    fulgurite_kernels::cudnn::Library::get().err().map(str::to_owned)
}

/// Programs without CUDA load no cuDNN.
#[cfg(not(feature = "cuda"))]
fn missing() -> Option<String> {
    Some("this program is built without CUDA".to_owned())
}

/// How often this process has run cuDNN's attention: forward and backward.
#[cfg(feature = "cuda")]
pub(super) fn runs() -> [u64; 2] {
    fulgurite_kernels::cuda::cudnn_runs()
}

/// Always zero in programs without CUDA.
#[cfg(not(feature = "cuda"))]
pub(super) fn runs() -> [u64; 2] {
    [0; 2]
}
