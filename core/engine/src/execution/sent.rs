//! Integers that the host has sent to a device, and so need not read from there.
//!
//! Layers look at ids and targets on the host. A batch was there a moment ago, and reading it from its device would
//! wait for all that was asked of that before.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use candle_core::{Tensor, TensorId};

/// The last tensors that were sent; `None` for what is on the CPU still, under the same id.
static SENT: Mutex<VecDeque<(TensorId, Option<Tensor>)>> = Mutex::new(VecDeque::new());

/// How many are remembered: those of the batches that are made ahead, and of the micro-batches of a few steps.
const REMEMBERED: usize = 64;
/// Larger ones are not remembered: ids are small beside what is computed with them.
const MAX_BYTES: usize = 1 << 20;

/// Remembers what a tensor on a device was made from, if those are integers.
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

/// The values on the host of a tensor that was sent.
pub(super) fn of(tensor: &Tensor) -> Option<Tensor> {
    let sent = SENT.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, on_host) = sent.iter().find(|(id, _)| *id == tensor.id())?;
    Some(on_host.as_ref().unwrap_or(tensor).clone())
}
