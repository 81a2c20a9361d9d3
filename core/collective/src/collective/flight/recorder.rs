//! Recording a rank's collectives.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use candle_core::Tensor;

use super::line::{Call, Channel, ChannelLine, FlightHead, FlightLine, GroupLine};
use crate::Result;
use crate::collective::{Collective, End, Intercepted, Interceptor, Label, ProcessGroup, Work};

/// Records the last calls of a rank's groups, with the times of their beginning and end.
///
/// It costs four locks and four readings of the clock for a call. Clones share the record.
///
/// ```
/// use std::sync::Arc;
/// use fulgurite_core::collective::flight::FlightRecorder;
/// use fulgurite_core::collective::{ProcessGroup as _, Solo};
///
/// let recorder = FlightRecorder::new(20_000);
/// let world = recorder.watch(Arc::new(Solo::new("world", 0)));
/// world.barrier()?.wait()?;
///
/// let mut record = Vec::new();
/// recorder.write(&mut record, "a host")?;
/// assert!(String::from_utf8_lossy(&record).contains("barrier"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct FlightRecorder(Arc<Shared>);

struct Shared {
    capacity: usize,
    /// The same instant by both clocks.
    epoch: (Instant, f64),
    records: Mutex<Records>,
    /// The thread that made the recorder, and the nanoseconds that it waited.
    thread: ThreadId,
    waited_nanos: AtomicU64,
}

#[derive(Default)]
struct Records {
    rank: usize,
    groups: Vec<GroupLine>,
    /// Number of calls in each channel of a group.
    numbers: BTreeMap<(usize, Channel), u64>,
    calls: VecDeque<Entry>,
    /// Number of calls that have left the record.
    dropped: u64,
}

struct Entry {
    group: usize,
    channel: Channel,
    number: u64,
    op: &'static str,
    bytes: usize,
    label: Option<Arc<Label>>,
    begun: Instant,
    started: Option<Instant>,
    waited: Option<Instant>,
    ended: Option<Instant>,
    failed: bool,
}

impl FlightRecorder {
    /// A record of the last `capacity` calls.
    pub fn new(capacity: usize) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = (Instant::now(), since_1970.as_secs_f64());
        Self(Arc::new(Shared {
            capacity,
            epoch,
            records: Mutex::default(),
            thread: std::thread::current().id(),
            waited_nanos: AtomicU64::new(0),
        }))
    }

    /// The group, with its calls recorded, and so the groups that are split from it.
    pub fn watch(&self, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        let mut records = self.records();
        let id = records.groups.len();
        let (name, ranks) = (group.name().to_owned(), group.global_ranks().to_vec());
        records.rank = ranks[group.rank()];
        records.groups.push(GroupLine { id, name, ranks });
        drop(records);
        Arc::new(Intercepted::new(group, Recording { recorder: self.clone(), group: id }))
    }

    /// The time that the thread that made the recorder has spent in its calls, and in waiting for
    /// them.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.0.waited_nanos.load(Ordering::Relaxed))
    }

    fn add_wait(&self, since: Instant, until: Instant) {
        if std::thread::current().id() == self.0.thread {
            let nanos = until.saturating_duration_since(since).as_nanos() as u64;
            self.0.waited_nanos.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    /// Writes the record of this rank on `host`. The first group that it watched is the world.
    ///
    /// # Errors
    /// As `to`.
    pub fn write(&self, to: &mut dyn Write, host: &str) -> io::Result<()> {
        let records = self.records();
        let head = FlightLine::Rank(FlightHead {
            rank: records.rank,
            world_size: records.groups.first().map_or(0, |world| world.ranks.len()),
            host: host.to_owned(),
            written: self.since_1970(Instant::now()),
            calls: records.dropped + records.calls.len() as u64,
        });
        let groups = records.groups.iter().cloned().map(FlightLine::Group);
        let channels = records.numbers.iter();
        let channels = channels.map(|(&(group, channel), &calls)| {
            FlightLine::Channel(ChannelLine { group, channel, calls })
        });
        let calls = records.calls.iter().map(|entry| FlightLine::Call(self.line(entry)));
        for line in std::iter::once(head).chain(groups).chain(channels).chain(calls) {
            serde_json::to_writer(&mut *to, &line)?;
            to.write_all(b"\n")?;
        }
        to.flush()
    }

    fn line(&self, entry: &Entry) -> Call {
        Call {
            group: entry.group,
            channel: entry.channel,
            number: entry.number,
            op: entry.op.to_owned(),
            bytes: entry.bytes as u64,
            label: entry.label.as_ref().map(|label| label.0.clone()),
            begun: self.since_1970(entry.begun),
            started: entry.started.map(|at| self.since_1970(at)),
            waited: entry.waited.map(|at| self.since_1970(at)),
            ended: entry.ended.map(|at| self.since_1970(at)),
            failed: entry.failed,
        }
    }

    fn since_1970(&self, at: Instant) -> f64 {
        let (epoch, secs) = self.0.epoch;
        secs + at.duration_since(epoch).as_secs_f64()
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.0.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a call begins. Returns its number in the record, and the time.
    fn begin(
        &self,
        group: usize,
        channel: Channel,
        op: &'static str,
        bytes: usize,
    ) -> (u64, Instant) {
        let (begun, label) = (Instant::now(), Label::current());
        let records = &mut *self.records();
        let number = records.numbers.entry((group, channel)).or_default();
        *number += 1;
        let number = *number;
        if records.calls.len() == self.0.capacity {
            records.calls.pop_front();
            records.dropped += 1;
        }
        records.calls.push_back(Entry {
            group,
            channel,
            number,
            op,
            bytes,
            label,
            begun,
            started: None,
            waited: None,
            ended: None,
            failed: false,
        });
        (records.dropped + records.calls.len() as u64 - 1, begun)
    }

    /// Changes the entry of a call, if it is still there.
    fn change(&self, call: u64, change: impl FnOnce(&mut Entry)) {
        let records = &mut *self.records();
        let index = call.checked_sub(records.dropped).and_then(|index| usize::try_from(index).ok());
        if let Some(entry) = index.and_then(|index| records.calls.get_mut(index)) {
            change(entry);
        }
    }

    /// Records how the start of a call ended, and later how its wait does.
    fn follow(&self, (call, begun): (u64, Instant), started: Result<Work>) -> Result<Work> {
        let now = Instant::now();
        self.add_wait(begun, now);
        let work = match started {
            Ok(work) => work,
            Err(error) => {
                self.change(call, |entry| (entry.ended, entry.failed) = (Some(now), true));
                return Err(error);
            }
        };
        if work.is_ready() {
            self.change(call, |entry| (entry.started, entry.ended) = (Some(now), Some(now)));
            return Ok(work);
        }
        self.change(call, |entry| entry.started = Some(now));
        let (recorder, end) = (self.clone(), work.end().cloned());
        let followed = Work::pending(move || {
            let from = Instant::now();
            recorder.change(call, |entry| entry.waited = Some(from));
            let result = work.wait();
            let (ended, failed) = (Instant::now(), result.is_err());
            recorder.add_wait(from, ended);
            recorder.change(call, |entry| (entry.ended, entry.failed) = (Some(ended), failed));
            result
        });
        Ok(match end {
            Some(end) => followed.with_end(end),
            None => followed,
        })
    }
}

/// Records the calls of a group.
struct Recording {
    recorder: FlightRecorder,
    group: usize,
}

impl Recording {
    fn message(
        &self,
        channel: Channel,
        op: &'static str,
        tensor: &Tensor,
        start: impl FnOnce() -> Result<Work>,
    ) -> Result<Work> {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let call = self.recorder.begin(self.group, channel, op, bytes);
        self.recorder.follow(call, start())
    }
}

impl Interceptor for Recording {
    fn start(
        &self,
        group: &Arc<dyn ProcessGroup>,
        collective: Collective,
        overlap: bool,
    ) -> Result<Work> {
        let (op, bytes) = (collective.name(), collective.bytes());
        let call = self.recorder.begin(self.group, Channel::All, op, bytes);
        self.recorder.follow(call, group.start(collective, overlap))
    }

    fn start_after(
        &self,
        group: &Arc<dyn ProcessGroup>,
        end: &Arc<dyn End>,
        collective: Collective,
    ) -> Result<Option<Work>> {
        let (op, bytes) = (collective.name(), collective.bytes());
        // A transport that cannot chain collectives starts nothing.
        let Some(work) = group.start_after(end, collective)? else { return Ok(None) };
        let call = self.recorder.begin(self.group, Channel::All, op, bytes);
        self.recorder.follow(call, Ok(work)).map(Some)
    }

    fn around(&self, part: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>> {
        Ok(self.recorder.watch(part))
    }

    fn send(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, dst: usize) -> Result<Work> {
        self.message(Channel::To(dst), "send", tensor, || group.send(tensor, dst))
    }

    fn recv(&self, group: &Arc<dyn ProcessGroup>, tensor: &Tensor, src: usize) -> Result<Work> {
        self.message(Channel::From(src), "recv", tensor, || group.recv(tensor, src))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::super::log::FlightLog;
    use super::*;
    use crate::collective::{ReduceOp, Solo};

    fn read(recorder: &FlightRecorder) -> FlightLog {
        let mut text = Vec::new();
        recorder.write(&mut text, "host").unwrap();
        FlightLog::read(&*text).unwrap()
    }

    #[test]
    fn calls_are_numbered_by_group_and_labelled() {
        let recorder = FlightRecorder::new(10);
        let world = recorder.watch(Arc::new(Solo::new("world", 0)));
        let part = world.split(&[vec![0]], "part").unwrap();
        let ones = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
        world.barrier().unwrap().wait().unwrap();
        {
            let _label = Label::enter("unit `layers.0`");
            part.all_reduce(&ones, ReduceOp::Sum).unwrap().wait().unwrap();
        }
        world.barrier().unwrap().wait().unwrap();
        let log = read(&recorder);
        let calls: Vec<_> = log
            .calls
            .iter()
            .map(|call| (&*log.groups[call.group].name, call.number, &*call.op, call.bytes))
            .collect();
        let expected =
            [("world", 1, "barrier", 0), ("part", 1, "all_reduce", 12), ("world", 2, "barrier", 0)];
        assert_eq!(calls, expected);
        assert_eq!(log.calls[1].label.as_deref(), Some("unit `layers.0`"));
        assert!(log.calls.iter().all(|call| call.ended.is_some_and(|ended| ended >= call.begun)));
    }

    #[test]
    fn only_the_last_calls_are_kept() {
        let recorder = FlightRecorder::new(2);
        let world = recorder.watch(Arc::new(Solo::new("world", 0)));
        for _ in 0..5 {
            world.barrier().unwrap().wait().unwrap();
        }
        let log = read(&recorder);
        assert_eq!(log.calls.iter().map(|call| call.number).collect::<Vec<_>>(), [4, 5]);
        assert_eq!((log.head.calls, log.channels[&(0, Channel::All)]), (5, 5));
    }
}
