//! Integers that the host has sent to a device and need not read back.
//!
//! Layers inspect ids and targets on the host. The host had the batch a moment ago, and reading it
//! from the device would wait for all work queued before.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Tensor, TensorId};

/// Number of tensors remembered: enough for the micro-batches of a few steps.
const REMEMBERED: usize = 64;
/// Size limit of a remembered tensor. Ids are small compared with activations.
const MAX_BYTES: usize = 1 << 20;

/// The last integer tensors that were sent to a device in an execution context, newest first.
///
/// A loader makes a batch in a context of its own, because a worker thread has no other. The thread
/// that takes the batch [adopts](Self::adopt) the batch's tensors:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::execution::{ExecutionContext, transfer::{self, SentTensors}};
///
/// let context = ExecutionContext::default().with(SentTensors::default());
/// let ids = Tensor::new(&[3i64, 1], &Device::Cpu)?;
/// let batch = context.run(|| transfer::to_device(&ids, &Device::Cpu, "batch"))?;
/// assert!(transfer::sent(&batch).is_none());
/// context.get::<SentTensors>().unwrap().adopt();
/// assert!(transfer::sent(&batch).is_some());
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct SentTensors(Mutex<VecDeque<(TensorId, Option<Tensor>)>>);

impl SentTensors {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(TensorId, Option<Tensor>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the host tensor from which a device tensor was made, if it holds integers.
    pub(super) fn remember(&self, on_device: &Tensor, on_host: &Tensor) {
        let bytes = on_host.elem_count() * on_host.dtype().size_in_bytes();
        if on_host.dtype().is_float() || bytes > MAX_BYTES {
            return;
        }
        // `None`: the tensor stayed on the CPU under the same id.
        let on_host = (on_device.id() != on_host.id()).then(|| on_host.clone());
        let mut sent = self.lock();
        sent.truncate(REMEMBERED - 1);
        sent.push_front((on_device.id(), on_host));
    }

    /// The host's values of a tensor that was sent.
    pub(super) fn get(&self, tensor: &Tensor) -> Option<Tensor> {
        let sent = self.lock();
        let (_, on_host) = sent.iter().find(|(id, _)| *id == tensor.id())?;
        Some(on_host.as_ref().unwrap_or(tensor).clone())
    }

    /// Moves these tensors to this thread's execution context.
    pub fn adopt(&self) {
        let own: Arc<Self> = super::shared();
        if std::ptr::eq(&*own, self) {
            return;
        }
        let adopted = std::mem::take(&mut *self.lock());
        let mut sent = own.lock();
        sent.truncate(REMEMBERED.saturating_sub(adopted.len()));
        adopted.into_iter().rev().for_each(|entry| sent.push_front(entry));
    }
}
