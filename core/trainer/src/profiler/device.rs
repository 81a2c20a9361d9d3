//! The times of spans on the device, for work that the host only queues.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use super::SpanKind;
use super::recorder::TraceSpan;
use crate::Result;
use fulgurite_engine::accelerator::{Accelerator, TimeStamp};

/// The stream of phases and units. Other streams have the names of process groups.
pub(super) const COMPUTE: &str = "";

/// Stamps spans on the device, and reads the times of finished spans.
///
/// Only the first [`stamp`](Self::stamp) and [`take`](Self::take) wait for the device.
pub(super) struct DeviceClock {
    accelerator: Arc<dyn Accelerator>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A stamp with its time on the host's clock, in microseconds.
    known: Option<(Arc<dyn TimeStamp>, f64)>,
    /// Spans with their streams, in the order of recording: phases and units at their ends,
    /// collectives when queued.
    pending: VecDeque<(String, OnDevice)>,
    done: BTreeMap<String, Vec<TraceSpan>>,
    /// Whether an error has ended the recording.
    failed: bool,
}

/// A span between two stamps.
pub(super) struct OnDevice {
    pub(super) kind: SpanKind,
    pub(super) name: String,
    /// Bytes that a collective transfers.
    pub(super) bytes: Option<u64>,
    pub(super) from: Arc<dyn TimeStamp>,
    pub(super) to: Arc<dyn TimeStamp>,
}

impl DeviceClock {
    pub(super) fn new(accelerator: Arc<dyn Accelerator>) -> Self {
        Self { accelerator, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while recording")
    }

    /// Stamps the work queued so far; `None` on a device without timing.
    ///
    /// The first call waits for the device, to map its stamp to `now` on the host's clock.
    pub(super) fn stamp(&self, now: impl FnOnce() -> f64) -> Option<Arc<dyn TimeStamp>> {
        let mut state = self.state();
        if state.failed {
            return None;
        }
        let stamped = self.try_stamp(&mut state.known, now);
        stamped.unwrap_or_else(|error| {
            state.fail(&error);
            None
        })
    }

    fn try_stamp(
        &self,
        known: &mut Option<(Arc<dyn TimeStamp>, f64)>,
        now: impl FnOnce() -> f64,
    ) -> Result<Option<Arc<dyn TimeStamp>>> {
        let Some(stamp) = self.accelerator.time_stamp()? else { return Ok(None) };
        let stamp: Arc<dyn TimeStamp> = stamp.into();
        if known.is_none() {
            stamp.micros_since(&*stamp)?;
            *known = Some((stamp.clone(), now()));
        }
        Ok(Some(stamp))
    }

    /// Returns whether the device's clock is known and nothing has failed.
    pub(super) fn is_going(&self) -> bool {
        let state = self.state();
        state.known.is_some() && !state.failed
    }

    /// Records a span of a stream.
    pub(super) fn span(&self, stream: &str, span: OnDevice) {
        self.state().pending.push_back((stream.to_owned(), span));
    }

    /// Reads the times of spans that the device has finished.
    pub(super) fn read(&self) {
        self.state().read_while(|stamp| stamp.is_past());
    }

    /// Takes all spans so far, by stream. Waits for the device if spans are pending.
    pub(super) fn take(&self) -> BTreeMap<String, Vec<TraceSpan>> {
        let mut state = self.state();
        state.read_while(|_| Ok(true));
        std::mem::take(&mut state.done)
    }

    /// Like [`take`](Self::take), but drops spans that the device has not finished.
    pub(super) fn take_past(&self) -> BTreeMap<String, Vec<TraceSpan>> {
        let mut state = self.state();
        // Spans recorded after a hanging collective may have finished.
        state.pending.retain(|(_, span)| span.to.is_past().unwrap_or(false));
        state.read_while(|_| Ok(true));
        std::mem::take(&mut state.done)
    }
}

impl State {
    fn read_while(&mut self, is_wanted: impl Fn(&dyn TimeStamp) -> Result<bool>) {
        while let Some((stream, span)) = self.pending.pop_front() {
            let times = match is_wanted(&*span.to) {
                Ok(true) => self.times(&span).map(Some),
                Ok(false) => Ok(None),
                Err(error) => Err(error),
            };
            match times {
                Ok(Some((from_us, to_us))) => {
                    let OnDevice { kind, name, bytes, .. } = span;
                    let span = TraceSpan { kind, name, thread: None, from_us, to_us, bytes };
                    self.done.entry(stream).or_default().push(span);
                }
                Ok(None) => return self.pending.push_front((stream, span)),
                Err(error) => self.fail(&error),
            }
        }
    }

    /// Returns the start and end of a span.
    fn times(&mut self, span: &OnDevice) -> Result<(f64, f64)> {
        /// Timing between two stamps becomes less exact after this interval.
        const LONG_US: f64 = 1e6;
        let Some((known, at)) = &self.known else { return Ok((0.0, 0.0)) };
        let from = at + span.from.micros_since(&**known)?;
        let to = from + span.to.micros_since(&*span.from)?;
        // Later spans start after this phase: phases do not overlap, and streams of collectives
        // follow the compute stream.
        if span.kind == SpanKind::Phase && from - at > LONG_US {
            self.known = Some((span.from.clone(), from));
        }
        Ok((from, to))
    }

    fn fail(&mut self, error: &crate::Error) {
        tracing::warn!("`trainer.profiler`: the trace has no more times of the device: {error}");
        self.failed = true;
        self.pending.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::super::trace;
    use super::super::{Profiler, ProfilerConfig};
    use super::*;
    use crate::Error;
    use candle_core::{Device, Tensor};
    use fulgurite_engine::collective::{self, Collective, ProcessGroup, ReduceOp, Solo, Timing};

    /// A fake device: the test queues its work, and the work is done on request or when waited for.
    #[derive(Debug, Default)]
    struct Pretended(Arc<Mutex<Work>>);

    #[derive(Debug, Default)]
    struct Work {
        /// Microseconds of queued work, and of finished work.
        queued: f64,
        done: f64,
        stamps: usize,
        waits: usize,
        broken: bool,
    }

    struct Stamp(f64, Arc<Mutex<Work>>);

    impl TimeStamp for Stamp {
        fn is_past(&self) -> Result<bool> {
            Ok(self.1.lock().unwrap().done >= self.0)
        }

        fn micros_since(&self, earlier: &dyn TimeStamp) -> Result<f64> {
            let earlier: &dyn std::any::Any = earlier;
            let Self(earlier, _) = earlier.downcast_ref().unwrap();
            let work = &mut *self.1.lock().unwrap();
            if work.done < self.0 {
                (work.done, work.waits) = (self.0, work.waits + 1);
            }
            Ok(self.0 - earlier)
        }
    }

    impl Accelerator for Pretended {
        fn device(&self) -> &Device {
            &Device::Cpu
        }

        fn description(&self) -> String {
            "pretended".to_owned()
        }

        fn time_stamp(&self) -> Result<Option<Box<dyn TimeStamp>>> {
            let work = &mut *self.0.lock().unwrap();
            if work.broken {
                return Err(Error::other("the device is gone"));
            }
            work.stamps += 1;
            Ok(Some(Box::new(Stamp(work.queued, self.0.clone()))))
        }
    }

    /// A profiler that traces step 1 of three.
    fn profiler() -> (Profiler, Arc<Mutex<Work>>) {
        let (device, profiler) = (
            Pretended::default(),
            Profiler::new(ProfilerConfig::Trace { skip_steps: 1, steps: 1 }),
        );
        device.0.lock().unwrap().queued = 77.0;
        let work = device.0.clone();
        profiler.set_accelerator(Arc::new(device));
        (profiler, work)
    }

    fn step(profiler: &Profiler, work: &Mutex<Work>) {
        let queue = |us: f64| work.lock().unwrap().queued += us;
        let forward = profiler.phase("forward");
        let unit = profiler.moment();
        queue(3000.0);
        profiler.span(SpanKind::Unit, "forward a".to_owned(), unit);
        queue(40.0);
        drop(forward);
        let backward = profiler.phase("backward");
        profiler.begin_backward(Some("b"));
        queue(500.0);
        profiler.begin_backward(Some("a"));
        queue(700.0);
        drop(backward);
        profiler.end_step();
    }

    /// Returns names, starts relative to the first span, and lengths.
    fn spans(spans: &[TraceSpan]) -> Vec<(&str, f64, f64)> {
        let start = spans.iter().map(|span| span.from_us).fold(f64::INFINITY, f64::min);
        let round = |us: f64| us.round();
        spans
            .iter()
            .map(|s| (s.name.as_str(), round(s.from_us - start), round(s.to_us - s.from_us)))
            .collect()
    }

    const TIMES: [(&str, f64, f64); 5] = [
        ("forward a", 0.0, 3000.0),
        ("forward", 0.0, 3040.0),
        ("backward b", 3040.0, 500.0),
        ("backward a", 3540.0, 700.0),
        ("backward", 3040.0, 1200.0),
    ];

    #[test]
    fn traced_steps_get_device_times_without_waits() {
        let (profiler, work) = profiler();
        step(&profiler, &work);
        assert_eq!(work.lock().unwrap().stamps, 0, "a step that is not traced");
        step(&profiler, &work);
        let counts = |work: &Mutex<Work>| {
            let work = work.lock().unwrap();
            (work.stamps, work.waits)
        };
        let (stamps, waits) = counts(&work);
        assert_eq!(waits, 1, "to know what time it is there, once");
        {
            let work = &mut *work.lock().unwrap();
            work.done = work.queued;
        }
        step(&profiler, &work);
        assert_eq!(counts(&work), (stamps, 1));
        // The device has finished the traced step, but not the last step.
        let recorded = profiler.take();
        assert_eq!(spans(&recorded.on_device[COMPUTE]), TIMES);
        assert_eq!(work.lock().unwrap().waits, 1);
        // The times are on the host's clock.
        let host = &recorded.spans[0];
        assert!(
            (recorded.on_device[COMPUTE][0].from_us - host.from_us).abs() < 1e6,
            "{recorded:?}"
        );

        let trace = trace::text(&[recorded]).unwrap().unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let track = events.iter().find(|event| event["args"]["name"] == "device").unwrap();
        assert_eq!(track["name"], "thread_name");
        let on_track =
            events.iter().filter(|event| event["ph"] == "X" && event["tid"] == track["tid"]);
        let lengths: Vec<f64> =
            on_track.map(|event| event["dur"].as_f64().unwrap().round()).collect();
        assert_eq!(lengths, TIMES.map(|(_, _, length)| length));
    }

    #[test]
    fn unfinished_spans_are_waited_for_at_the_end() {
        let (profiler, work) = profiler();
        step(&profiler, &work);
        step(&profiler, &work);
        assert_eq!(work.lock().unwrap().waits, 1);
        assert_eq!(spans(&profiler.take().on_device[COMPUTE]), TIMES);
        assert!(work.lock().unwrap().waits > 1);
        assert!(profiler.take().on_device.is_empty());
    }

    #[test]
    fn failed_run_does_not_wait_for_the_device() {
        let (profiler, work) = profiler();
        step(&profiler, &work);
        step(&profiler, &work);
        let done = work.lock().unwrap().queued - 700.0;
        work.lock().unwrap().done = done;
        assert_eq!(spans(&profiler.take_past().on_device[COMPUTE]), TIMES[..3]);
        assert_eq!(work.lock().unwrap().waits, 1);
    }

    /// A rank with collectives on a device stream. Each takes 800 us and starts 100 us before the
    /// queued work ends.
    struct Streamed(Solo, Arc<Mutex<Work>>);

    impl ProcessGroup for Streamed {
        fn name(&self) -> &str {
            "dp"
        }

        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn size(&self) -> usize {
            self.0.size()
        }

        fn global_ranks(&self) -> &[usize] {
            self.0.global_ranks()
        }

        fn start(&self, collective: Collective, overlap: bool) -> Result<collective::Work> {
            if let Some(timing) = Timing::current() {
                let from = self.1.lock().unwrap().queued - 100.0;
                let stamp = |us| Arc::new(Stamp(us, self.1.clone()));
                timing.tell("dp", stamp(from), stamp(from + 800.0));
            }
            self.0.start(collective, overlap)
        }

        fn send(&self, tensor: &Tensor, dst: usize) -> Result<collective::Work> {
            self.0.send(tensor, dst)
        }

        fn recv(&self, tensor: &Tensor, src: usize) -> Result<collective::Work> {
            self.0.recv(tensor, src)
        }

        fn split(&self, partition: &[Vec<usize>], name: &str) -> Result<Arc<dyn ProcessGroup>> {
            self.0.split(partition, name)
        }

        fn abort(&self, reason: &str) {
            self.0.abort(reason);
        }
    }

    #[test]
    fn traced_collectives_are_on_their_streams() {
        let (profiler, work) = profiler();
        let group = profiler.watch_group(Arc::new(Streamed(Solo::new("world", 0), work.clone())));
        let numbers = Tensor::zeros(10, candle_core::DType::F32, &Device::Cpu).unwrap();
        for _ in 0..3 {
            let backward = profiler.phase("backward");
            work.lock().unwrap().queued += 500.0;
            let reduced = group.start(Collective::all_reduce(&numbers, ReduceOp::Sum), true);
            work.lock().unwrap().queued += 700.0;
            drop(backward);
            reduced.unwrap().wait().unwrap();
            profiler.end_step();
        }
        let recorded = profiler.take();
        // One of three steps is traced.
        let ([backward], [reduce]) =
            (&recorded.on_device[COMPUTE][..], &recorded.on_device["dp"][..])
        else {
            panic!("{recorded:?}")
        };
        let [from, to] = [reduce.from_us, reduce.to_us].map(|us| (us - backward.from_us).round());
        assert_eq!([from, to], [400.0, 1200.0]);

        let trace = trace::text(&[recorded]).unwrap().unwrap();
        let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let track = events.iter().find(|event| event["args"]["name"] == "device: dp").unwrap();
        let of_track =
            |event: &&serde_json::Value| event["ph"] == "X" && event["tid"] == track["tid"];
        let [event] = events.iter().filter(of_track).collect::<Vec<_>>()[..] else {
            panic!("{trace}")
        };
        assert_eq!(
            (&event["name"], &event["args"]["bytes"]),
            (&"all_reduce dp".into(), &40.into())
        );
    }

    #[test]
    fn failing_device_ends_only_its_track() {
        let (profiler, work) = profiler();
        step(&profiler, &work);
        work.lock().unwrap().broken = true;
        step(&profiler, &work);
        let recorded = profiler.take();
        assert!(recorded.on_device.is_empty() && recorded.spans.len() == 5);
    }

    #[test]
    fn host_gets_no_device_track() {
        let profiler = Profiler::new(ProfilerConfig::Trace { skip_steps: 0, steps: 1 });
        step(&profiler, &Mutex::default());
        let recorded = profiler.take();
        assert!(recorded.on_device.is_empty());
        assert!(!trace::text(&[recorded]).unwrap().unwrap().contains("\"device\""));
    }
}
