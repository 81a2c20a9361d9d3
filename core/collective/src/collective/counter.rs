//! Counting the calls of process groups.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::Tensor;

use super::{Collective, End, Intercepted, Interceptor, ProcessGroup, Work};
use crate::Result;

/// Number and bytes of the calls of one collective on one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    /// Number of calls.
    pub calls: u64,
    /// Bytes of the full tensors: the reduced tensor, or the gathered whole.
    pub bytes: u64,
}

/// A tally of calls and bytes, by (group name, collective).
///
/// ```
/// use std::sync::Arc;
/// use fulgurite_core::collective::{Counter, Solo};
///
/// let counter = Counter::default();
/// let world = counter.watch(Arc::new(Solo::new("world", 0)));
/// world.barrier()?.wait()?;
/// assert_eq!(counter.get("world", "barrier").calls, 1);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<Mutex<BTreeMap<(String, &'static str), Record>>>);

impl Counter {
    /// The group, with its calls counted, and so the groups that are split from it.
    pub fn watch(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        Arc::new(Intercepted::new(group, self.clone()))
    }

    /// The tally so far.
    pub fn snapshot(&self) -> BTreeMap<(String, &'static str), Record> {
        self.0.lock().expect("no panic while counting").clone()
    }

    /// The record of one collective on one group.
    pub fn get(&self, group: &str, op: &'static str) -> Record {
        self.snapshot().get(&(group.to_owned(), op)).copied().unwrap_or_default()
    }

    /// Clears the tally.
    pub fn reset(&self) {
        self.0.lock().expect("no panic while counting").clear();
    }

    fn add(&self, group: &Arc<dyn ProcessGroup>, op: &'static str, bytes: usize) {
        let mut records = self.0.lock().expect("no panic while counting");
        let record = records.entry((group.name().to_owned(), op)).or_default();
        record.calls += 1;
        record.bytes += bytes as u64;
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

impl Interceptor for Counter {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        self.add(group, collective.name(), collective.bytes());
        group.start(collective, overlap)
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        let (op, bytes) = (collective.name(), collective.bytes());
        let work = group.start_after(end, collective)?;
        if work.is_some() {
            self.add(group, op, bytes);
        }
        Ok(work)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.watch(part))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.add(group, "send", bytes(tensor));
        group.send(tensor, dst)
    }

    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        self.add(group, "recv", bytes(tensor));
        group.recv(tensor, src)
    }
}
