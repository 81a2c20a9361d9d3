//! Times, losses and memory of a run, for the step events and the summary.

use std::time::Instant;

/// The measurements of this rank.
#[derive(Debug)]
pub(crate) struct Meter {
    /// The program's start, in seconds since the epoch.
    program_start: f64,
    step_start: Instant,
    step_secs: Vec<f64>,
    counts: f64,
    startup_secs: f64,
    first_loss: Option<f64>,
    last_loss: f64,
}

impl Meter {
    pub(crate) fn new(program_start: f64) -> Self {
        Self {
            program_start,
            step_start: Instant::now(),
            step_secs: Vec::new(),
            counts: 0.0,
            startup_secs: f64::NAN,
            first_loss: None,
            last_loss: f64::NAN,
        }
    }

    pub(crate) fn begin_step(&mut self) {
        self.step_start = Instant::now();
    }

    /// Ends a step over `count` tokens, and returns tokens per second.
    pub(crate) fn end_step(&mut self, count: f64) -> f64 {
        let secs = self.step_start.elapsed().as_secs_f64();
        if self.step_secs.is_empty() {
            self.startup_secs = seconds_since_epoch() - self.program_start;
        }
        self.step_secs.push(secs);
        self.counts += count;
        count / secs
    }

    /// Notes the next known mean loss of a step.
    pub(crate) fn note_loss(&mut self, loss: f64) {
        self.first_loss.get_or_insert(loss);
        self.last_loss = loss;
    }

    /// Returns the number of steps of this process.
    pub(crate) fn steps(&self) -> usize {
        self.step_secs.len()
    }

    pub(crate) fn first_loss(&self) -> f64 {
        self.first_loss.unwrap_or(f64::NAN)
    }

    pub(crate) fn last_loss(&self) -> f64 {
        self.last_loss
    }

    /// Forgets the last steps, which are taken again.
    pub(crate) fn forget_last(&mut self, steps: u64) {
        let steps = usize::try_from(steps).unwrap_or(usize::MAX);
        self.step_secs.truncate(self.step_secs.len().saturating_sub(steps));
    }

    /// Returns the share of the time since the program's start that its steps took; `None` without
    /// a step.
    pub(crate) fn goodput(&self) -> Option<f64> {
        let secs = seconds_since_epoch() - self.program_start;
        let in_steps = self.step_secs.iter().sum::<f64>();
        (secs > 0.0 && in_steps > 0.0).then(|| (in_steps / secs).min(1.0))
    }

    /// Returns the seconds from the program's start to the end of the first step.
    pub(crate) fn startup_secs(&self) -> f64 {
        self.startup_secs
    }

    pub(crate) fn median_step_secs(&self) -> f64 {
        let mut sorted = self.step_secs.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        }
    }

    pub(crate) fn counts_per_sec(&self) -> f64 {
        self.counts / self.step_secs.iter().sum::<f64>()
    }
}

/// Returns the wall-clock time.
pub(crate) fn seconds_since_epoch() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the wall-clock time in microseconds, as manifests of checkpoints have it.
pub(crate) fn micros_since_epoch() -> u64 {
    (seconds_since_epoch() * 1e6) as u64
}

/// Returns the peak memory of this process in MiB (`VmHWM`); `None` if the system does not report
/// it.
pub fn peak_rss_mib() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|kib| kib.parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0)
}
