//! A process group that counts collectives and their bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor};

use super::{Collective, End, ProcessGroup, Work};
use crate::{Error, Result};

/// Number and bytes of the calls of one collective on one group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Record {
    /// Number of calls.
    pub calls: u64,
    /// Bytes of the full tensors: the operand of a reduction, or the gathered whole.
    pub bytes: u64,
}

/// The tally that [`Counting`] groups write to, by (group name, collective).
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<Mutex<BTreeMap<(String, &'static str), Record>>>);

impl Counter {
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

    fn add(&self, group: &str, op: &'static str, bytes: usize) {
        let mut records = self.0.lock().expect("no panic while counting");
        let record = records.entry((group.to_owned(), op)).or_default();
        record.calls += 1;
        record.bytes += bytes as u64;
    }
}

/// Counts calls and bytes and passes the calls on. Groups split from it use the same tally.
pub struct Counting {
    inner: Arc<dyn ProcessGroup>,
    counter: Counter,
}

impl Counting {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn ProcessGroup>, counter: Counter) -> Self {
        Self { inner, counter }
    }

    fn count(&self, op: &'static str, bytes: usize) {
        self.counter.add(self.inner.name(), op, bytes);
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

impl ProcessGroup for Counting {
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
        self.count(collective.name(), collective.bytes());
        self.inner.start(collective, overlap)
    }

    fn start_after(&self, end: &Arc<dyn End>, collective: Collective) -> Result<Option<Work>> {
        let (op, bytes) = (collective.name(), collective.bytes());
        let work = self.inner.start_after(end, collective)?;
        if work.is_some() {
            self.count(op, bytes);
        }
        Ok(work)
    }

    fn send(&self, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.count("send", bytes(tensor));
        self.inner.send(tensor, dst)
    }

    fn recv(&self, tensor: &Tensor, src: usize) -> Result<Work> {
        self.count("recv", bytes(tensor));
        self.inner.recv(tensor, src)
    }

    fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
        let inner = self.inner.split(partition, name)?;
        Ok(Arc::new(Self { inner, counter: self.counter.clone() }))
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
