//! Integers that the host has sent to a device and need not read back.
//!
//! Layers inspect ids and targets on the host. The host had the batch a moment ago, and reading it
//! from the device would wait for all work queued before.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use candle_core::{Tensor, TensorId};

/// The last tensors sent. `None` marks tensors that stayed on the CPU under the same id.
static SENT: Mutex<VecDeque<(TensorId, Option<Tensor>)>> = Mutex::new(VecDeque::new());

/// Number of tensors remembered: enough for prefetched batches and the micro-batches of a few
/// steps.
const REMEMBERED: usize = 64;
/// Size limit of a remembered tensor. Ids are small compared with activations.
const MAX_BYTES: usize = 1 << 20;

/// Remembers the host tensor from which a device tensor was made, if it holds integers.
pub(super) fn remember(on_device: &Tensor, on_host: &Tensor) {
    let bytes = on_host.elem_count() * on_host.dtype().size_in_bytes();
    if on_host.dtype().is_float() || bytes > MAX_BYTES {
        return;
    }
    let on_host = (!on_device.device().is_cpu()).then(|| on_host.clone());
    let mut sent = SENT.lock().unwrap_or_else(PoisonError::into_inner);
    sent.truncate(REMEMBERED - 1);
    sent.push_front((on_device.id(), on_host));
}

/// The host's values of a tensor that was sent.
pub(super) fn of(tensor: &Tensor) -> Option<Tensor> {
    let sent = SENT.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, on_host) = sent.iter().find(|(id, _)| *id == tensor.id())?;
    Some(on_host.as_ref().unwrap_or(tensor).clone())
}
