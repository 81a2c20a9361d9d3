//! The recording of one rank.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::device::{COMPUTE, DeviceClock, OnDevice};
use super::unit::end_backward_range;
use super::{ProfilerConfig, SpanKind};
use fulgurite_engine::accelerator::ranges::{self, Range};
use fulgurite_engine::accelerator::{Accelerator, TimeStamp};

/// The profiler of this rank. Clones share one recording.
#[derive(Clone)]
pub(crate) struct Profiler(Arc<Recorder>);

struct Recorder {
    config: ProfilerConfig,
    start: Instant,
    /// The start in microseconds since 1970, so that ranks share one clock.
    start_us: f64,
    recorded: Mutex<Recorded>,
    /// The device's clock, unless the host computes.
    device: OnceLock<DeviceClock>,
}

/// The start or end of a span.
#[derive(Clone)]
pub(super) struct Moment {
    /// The time on the host, in microseconds since 1970.
    us: f64,
    /// The time on the device, if it has timing and the step is traced.
    on_device: Option<Arc<dyn TimeStamp>>,
}

/// Total time of all spans of one name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Total {
    pub(super) calls: u64,
    pub(super) secs: f64,
    /// Peak memory of the process at the ends of such phases, in MiB; 0 if unknown.
    #[serde(default)]
    pub(super) resident_mib: f64,
}

/// All data recorded on a rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Recorded {
    /// Number of finished optimizer steps.
    pub(super) steps: u64,
    /// Start of the first phase and end of the last, in microseconds since 1970.
    pub(super) from_us: Option<f64>,
    pub(super) to_us: f64,
    pub(super) totals: BTreeMap<SpanKind, BTreeMap<String, Total>>,
    /// The spans of traced steps.
    pub(super) spans: Vec<TraceSpan>,
    /// The device's spans of traced steps, by stream. Compute is on [`COMPUTE`].
    pub(super) on_device: BTreeMap<String, Vec<TraceSpan>>,
    /// The names of the threads that have recorded, by index.
    pub(super) threads: Vec<String>,
    /// Number of open phases. Only the outermost phase is recorded.
    open_phases: u64,
    /// The unit whose backward is running, and its start.
    #[serde(skip)]
    backward_of: Option<(String, Moment)>,
}

/// A span with its start and end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TraceSpan {
    pub(super) kind: SpanKind,
    pub(super) name: String,
    /// The thread's index; `None` on the device, and for the whole time of a collective.
    pub(super) thread: Option<usize>,
    pub(super) from_us: f64,
    pub(super) to_us: f64,
    /// Bytes that a collective transfers.
    pub(super) bytes: Option<u64>,
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Moment").field(&self.us).finish()
    }
}

impl Profiler {
    pub(crate) fn new(config: ProfilerConfig) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self(Arc::new(Recorder {
            config,
            start: Instant::now(),
            start_us: since.map_or(0.0, |since| since.as_secs_f64() * 1e6),
            recorded: Mutex::default(),
            device: OnceLock::new(),
        }))
    }

    /// Adds the device's times to traces.
    pub(crate) fn set_accelerator(&self, accelerator: Arc<dyn Accelerator>) {
        self.0.device.get_or_init(|| DeviceClock::new(accelerator));
    }

    /// Returns microseconds since 1970, by a monotonic clock.
    pub(super) fn now(&self) -> f64 {
        self.0.start_us + self.0.start.elapsed().as_secs_f64() * 1e6
    }

    /// Returns the present moment of the compute thread.
    pub(super) fn moment(&self) -> Moment {
        let device = self.0.device.get().filter(|_| self.traces(&self.recorded()));
        let on_device = device.and_then(|device| device.stamp(|| self.now()));
        Moment { us: self.now(), on_device }
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.0.recorded.lock().expect("no panic while recording")
    }

    /// Takes the recording so far. Waits for the device if it has timing.
    pub(super) fn take(&self) -> Recorded {
        self.take_with(DeviceClock::take)
    }

    /// Like [`take`](Self::take), but does not wait: spans that the device has not reached are
    /// dropped (it may hang).
    pub(super) fn take_past(&self) -> Recorded {
        self.take_with(DeviceClock::take_past)
    }

    fn take_with(
        &self,
        take: impl FnOnce(&DeviceClock) -> BTreeMap<String, Vec<TraceSpan>>,
    ) -> Recorded {
        let on_device = self.0.device.get().map(take).unwrap_or_default();
        Recorded { on_device, ..std::mem::take(&mut *self.recorded()) }
    }

    /// Begins a phase, and returns its start.
    fn begin_phase(&self) -> Moment {
        let from = self.moment();
        let mut recorded = self.recorded();
        recorded.open_phases += 1;
        recorded.from_us.get_or_insert(from.us);
        from
    }

    #[cfg(test)]
    pub(super) fn phase(&self, name: &'static str) -> Phase {
        Phase::begin(Some(self), name).expect("there is a profiler")
    }

    fn end_phase(&self, name: &str, from: &Moment) {
        self.begin_backward(None);
        let now = self.moment();
        let recorded = &mut *self.recorded();
        recorded.open_phases = recorded.open_phases.saturating_sub(1);
        recorded.to_us = now.us;
        if recorded.open_phases == 0 {
            self.add(recorded, SpanKind::Phase, name.to_owned(), (from.clone(), now));
            let of_phases = recorded.totals.get_mut(&SpanKind::Phase);
            if let Some(total) = of_phases.and_then(|totals| totals.get_mut(name)) {
                total.resident_mib = total.resident_mib.max(resident_mib());
            }
        }
    }

    /// Counts an optimizer step. Called after each.
    pub(crate) fn end_step(&self) {
        self.recorded().steps += 1;
        if let Some(device) = self.0.device.get() {
            device.read();
        }
    }

    /// Records a span of this thread, from `from` to now.
    pub(super) fn span(&self, kind: SpanKind, name: String, from: Moment) {
        let to = self.moment();
        let recorded = &mut *self.recorded();
        self.add(recorded, kind, name, (from, to));
    }

    fn add(
        &self,
        recorded: &mut Recorded,
        kind: SpanKind,
        name: String,
        (from, to): (Moment, Moment),
    ) {
        let (from_us, to_us) = (from.us, to.us);
        if self.traces(recorded) {
            let thread = Some(recorded.thread());
            let name = name.clone();
            let (device, stamps) = (self.0.device.get(), from.on_device.zip(to.on_device));
            if let (Some(device), Some((from, to))) = (device, stamps) {
                device.span(COMPUTE, OnDevice { kind, name: name.clone(), bytes: None, from, to });
            }
            recorded.spans.push(TraceSpan { kind, name, thread, from_us, to_us, bytes: None });
        }
        let total = recorded.totals.entry(kind).or_default().entry(name).or_default();
        total.calls += 1;
        total.secs += (to_us - from_us) * 1e-6;
    }

    /// Returns whether the present step is traced.
    fn traces(&self, recorded: &Recorded) -> bool {
        match self.0.config {
            ProfilerConfig::Simple => false,
            ProfilerConfig::Trace { skip_steps, steps } => {
                let end = skip_steps.saturating_add(steps);
                (skip_steps..end).contains(&recorded.steps)
            }
        }
    }

    /// Records a collective.
    ///
    /// This thread started it from `started.0` to `started.1`, and waited for it from `waited_from`
    /// to now.
    pub(super) fn collective(
        &self,
        (op, group): (&'static str, &str),
        bytes: u64,
        started: (f64, f64),
        waited_from: f64,
    ) {
        let now = self.now();
        let name = format!("{op} {group}");
        let recorded = &mut *self.recorded();
        let blocked_us = (started.1 - started.0) + (now - waited_from);
        if self.traces(recorded) {
            let kind = SpanKind::Collective;
            let span = |name, thread, from_us, to_us| TraceSpan {
                kind,
                name,
                thread,
                from_us,
                to_us,
                bytes: Some(bytes),
            };
            let thread = Some(recorded.thread());
            recorded.spans.push(span(format!("wait for {name}"), thread, waited_from, now));
            recorded.spans.push(span(name.clone(), None, started.0, now));
        }
        let total =
            recorded.totals.entry(SpanKind::Collective).or_default().entry(name).or_default();
        total.calls += 1;
        total.secs += blocked_us * 1e-6;
    }

    /// Returns whether the device times of collectives are recorded.
    pub(super) fn times_the_device(&self) -> bool {
        self.0.device.get().is_some_and(DeviceClock::is_going) && self.traces(&self.recorded())
    }

    /// Records a collective or message that runs on a stream of the device.
    pub(super) fn collective_on_device(
        &self,
        stream: &str,
        name: String,
        bytes: u64,
        from: Arc<dyn TimeStamp>,
        to: Arc<dyn TimeStamp>,
    ) {
        if let Some(device) = self.0.device.get() {
            let (kind, bytes) = (SpanKind::Collective, Some(bytes));
            device.span(stream, OnDevice { kind, name, bytes, from, to });
        }
    }

    /// Begins the backward of a unit, which ends the previous unit's. `None` only ends it.
    pub(super) fn begin_backward(&self, unit: Option<&str>) {
        if unit.is_none() && self.recorded().backward_of.is_none() {
            return;
        }
        let now = self.moment();
        let recorded = &mut *self.recorded();
        let next = unit.map(|unit| (format!("backward {unit}"), now.clone()));
        if let Some((name, from)) = std::mem::replace(&mut recorded.backward_of, next) {
            self.add(recorded, SpanKind::Unit, name, (from, now));
        }
    }
}

impl Recorded {
    /// Returns the index of this thread.
    fn thread(&mut self) -> usize {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("unnamed");
        match self.threads.iter().position(|other| other == name) {
            Some(number) => number,
            None => {
                self.threads.push(name.to_owned());
                self.threads.len() - 1
            }
        }
    }
}

/// A running phase, which ends on drop. [`Measurements::phase`](crate::fabric::Measurements::phase)
/// creates it.
#[must_use = "a phase ends when its guard is dropped"]
pub struct Phase {
    name: &'static str,
    recorded: Option<(Profiler, Moment)>,
    _range: Option<Range>,
}

impl Phase {
    /// Begins a phase for a profiler and for an attached tool; `None` without either.
    pub(crate) fn begin(profiler: Option<&Profiler>, name: &'static str) -> Option<Self> {
        let range = ranges::begin(name);
        let recorded = profiler.map(|profiler| (profiler.clone(), profiler.begin_phase()));
        (range.is_some() || recorded.is_some()).then_some(Self { name, recorded, _range: range })
    }
}

impl Drop for Phase {
    fn drop(&mut self) {
        end_backward_range();
        if let Some((profiler, from)) = &self.recorded {
            profiler.end_phase(self.name, from);
        }
    }
}

/// Returns the memory of this process in MiB (`VmRSS`); 0 if the system does not report it.
fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|kib| kib.parse::<f64>().ok());
    kib.unwrap_or(0.0) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_phase_belongs_to_the_outer() {
        let profiler = Profiler::new(ProfilerConfig::Simple);
        {
            let _outer = profiler.phase("validation");
            let _inner = profiler.phase("logging");
        }
        drop(profiler.phase("data"));
        let recorded = profiler.take();
        let names: Vec<_> = recorded.totals[&SpanKind::Phase].keys().map(String::as_str).collect();
        assert_eq!(names, ["data", "validation"]);
        assert!(recorded.spans.is_empty(), "nothing is traced");
    }

    #[test]
    fn unit_backward_lasts_until_the_next() {
        let profiler = Profiler::new(ProfilerConfig::Trace { skip_steps: 1, steps: 1 });
        for _ in 0..3 {
            let _backward = profiler.phase("backward");
            profiler.begin_backward(Some("b"));
            profiler.begin_backward(Some("a"));
            drop(_backward);
            profiler.end_step();
        }
        let recorded = profiler.take();
        let calls = |kind, name: &str| recorded.totals[&kind][name].calls;
        assert_eq!(calls(SpanKind::Unit, "backward a"), 3);
        assert_eq!(calls(SpanKind::Phase, "backward"), 3);
        // Only the second step is traced, and its spans nest.
        let [b, a, phase] = &recorded.spans[..] else { panic!("{:?}", recorded.spans) };
        assert_eq!((b.name.as_str(), a.name.as_str()), ("backward b", "backward a"));
        assert!(phase.from_us <= b.from_us && b.to_us <= a.from_us && a.to_us <= phase.to_us);
    }
}
