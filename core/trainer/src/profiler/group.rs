//! A process group that records its collectives.

use std::sync::Arc;

use candle_core::Tensor;

use super::Profiler;
use crate::Result;
use fulgurite_engine::collective::{
    Collective, End, Intercepted, Interceptor, ProcessGroup, Timing, Work,
};
use fulgurite_engine::execution::ContextGuard;

/// Records how long calls block and when they run on the device.
struct Recording(Profiler);

impl Profiler {
    /// Wraps the group, to record its collectives and those of groups split from it.
    pub(crate) fn watch_group(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Intercepted::new(group, Recording(self.clone())))
    }
}

impl Recording {
    fn record(
        &self,
        group: &Arc<dyn ProcessGroup>,
        op: &'static str,
        bytes: usize,
        start: impl FnOnce() -> Result<Work>,
    ) -> Result<Work> {
        let from = self.0.now();
        let timing = self.timing(group, op, bytes);
        let work = start()?;
        drop(timing);
        Ok(self.recorded(group, op, bytes, from, work))
    }

    /// Requests device times of collectives started while the guard lives, if the step is traced.
    fn timing(
        &self,
        group: &Arc<dyn ProcessGroup>,
        op: &'static str,
        bytes: usize,
    ) -> Option<ContextGuard> {
        self.0.times_the_device().then(|| {
            let (profiler, name) = (self.0.clone(), format!("{op} {}", group.name()));
            Timing::enter(move |stream, from, to| {
                profiler.collective_on_device(stream, name.clone(), bytes as u64, from, to);
            })
        })
    }

    /// Wraps the work of a collective whose call lasted from `from` to now.
    fn recorded(
        &self,
        group: &Arc<dyn ProcessGroup>,
        op: &'static str,
        bytes: usize,
        from: f64,
        work: Work,
    ) -> Work {
        let started = (from, self.0.now());
        let (profiler, group) = (self.0.clone(), group.name().to_owned());
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

impl Interceptor for Recording {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        let (op, bytes) = (collective.name(), collective.bytes());
        self.record(group, op, bytes, || group.start(collective, overlap))
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        let (op, bytes, from) = (collective.name(), collective.bytes(), self.0.now());
        let timing = self.timing(group, op, bytes);
        let work = group.start_after(end, collective)?;
        drop(timing);
        Ok(work.map(|work| self.recorded(group, op, bytes, from, work)))
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.0.watch_group(part))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.record(group, "send", bytes(tensor), || group.send(tensor, dst))
    }

    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        self.record(group, "recv", bytes(tensor), || group.recv(tensor, src))
    }
}
