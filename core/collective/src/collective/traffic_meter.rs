//! The bytes of all collectives together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Tensor;

use super::{Collective, End, Intercepted, Interceptor, ProcessGroup, Work};
use crate::Result;

/// A sum of the bytes of all calls, cheap enough for every run. [`Counter`](super::Counter) tells
/// the calls apart.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Tensor};
/// use fulgurite_core::collective::{ProcessGroup as _, ReduceOp, Solo, TrafficMeter};
///
/// let meter = TrafficMeter::default();
/// let world = meter.watch(Arc::new(Solo::new("world", 0)));
/// let sum = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// world.all_reduce(&sum, ReduceOp::Sum)?.wait()?;
/// assert_eq!(meter.bytes(), 8);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct TrafficMeter(Arc<AtomicU64>);

impl TrafficMeter {
    /// The group, with its bytes counted, and so the groups that are split from it.
    pub fn watch(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Intercepted::new(group, self.clone()))
    }

    /// Bytes of the full tensors of all calls so far, as in [`Record`](super::Record).
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Interceptor for TrafficMeter {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        self.add(collective.bytes());
        group.start(collective, overlap)
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        let bytes = collective.bytes();
        let work = group.start_after(end, collective)?;
        if work.is_some() {
            self.add(bytes);
        }
        Ok(work)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.watch(part))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.add(tensor.elem_count() * tensor.dtype().size_in_bytes());
        group.send(tensor, dst)
    }

    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        self.add(tensor.elem_count() * tensor.dtype().size_in_bytes());
        group.recv(tensor, src)
    }
}
