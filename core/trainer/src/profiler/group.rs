//! A process group that records its collectives.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::Profiler;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, End, ProcessGroup, Timing, Work};
use fulgurite_engine::execution::ContextGuard;

/// Records how long calls block and when they run on the device, and forwards them. Groups split
/// from this group record too.
pub(super) struct Profiled {
    inner: Arc<dyn ProcessGroup>,
    profiler: Profiler,
}

impl Profiler {
    /// Wraps the group, to record its collectives.
    pub(crate) fn watch_group(&self, inner: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Profiled { inner, profiler: self.clone() })
    }
}

impl Profiled {
    fn record(
        &self,
        op: &'static str,
        bytes: usize,
        start: impl FnOnce() -> Result<Work>,
    ) -> Result<Work> {
        let from = self.profiler.now();
        let timing = self.timing(op, bytes);
        let work = start()?;
        drop(timing);
        Ok(self.recorded(op, bytes, from, work))
    }

    /// Requests device times of collectives started while the guard lives, if the step is traced.
    fn timing(&self, op: &'static str, bytes: usize) -> Option<ContextGuard> {
        self.profiler.times_the_device().then(|| {
            let (profiler, name) = (self.profiler.clone(), format!("{op} {}", self.inner.name()));
            Timing::enter(move |stream, from, to| {
                profiler.collective_on_device(stream, name.clone(), bytes as u64, from, to);
            })
        })
    }

    /// Wraps the work of a collective whose call lasted from `from` to now.
    fn recorded(&self, op: &'static str, bytes: usize, from: f64, work: Work) -> Work {
        let started = (from, self.profiler.now());
        let (profiler, group) = (self.profiler.clone(), self.inner.name().to_owned());
        let end = work.end().cloned();
        let recorded = Work::pending(move || {
            let waited_from = profiler.now();
            work.wait()?;
            profiler.collective((op, &group), bytes as u64, started, waited_from);
            Ok(())
        });
        match end {
            Some(end) => recorded.with_end(end),
            None => recorded,
        }
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

impl ProcessGroup for Profiled {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn transport(&self) -> String {
        self.inner.transport()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn connect(&self, device: &Device) -> Result<()> {
        self.inner.connect(device)
    }

    fn start(&self, collective: Collective, overlap: bool) -> Result<Work> {
        let (op, bytes) = (collective.name(), collective.bytes());
        self.record(op, bytes, || self.inner.start(collective, overlap))
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        let (op, bytes, from) = (collective.name(), collective.bytes(), self.profiler.now());
        let timing = self.timing(op, bytes);
        let work = self.inner.start_after(end, collective)?;
        drop(timing);
        Ok(work.map(|work| self.recorded(op, bytes, from, work)))
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.record("send", bytes(tensor), || self.inner.send(tensor, dst))
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.record("recv", bytes(tensor), || self.inner.recv(tensor, src))
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.profiler.watch_group(self.inner.split(partition, name)?))
    }

    fn empty(&self, elements: usize, dtype: DType, device: &Device) -> Result<Tensor> {
        self.inner.empty(elements, dtype, device)
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn exact_reductions(&self) -> bool {
        self.inner.exact_reductions()
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }
}
