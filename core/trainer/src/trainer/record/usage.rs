//! The memory and traffic of a run's steps, as the engine counts them.

use fulgurite_engine::collective::TrafficMeter;
use fulgurite_engine::memory;
use serde::{Deserialize, Serialize};

/// The memory and traffic of this rank's steps.
#[derive(Debug)]
pub(crate) struct Usage {
    traffic: TrafficMeter,
    /// Bytes that the process held before the run.
    held_before: u64,
    peak: u64,
    /// Bytes at the start of the present step, of all collectives so far.
    traffic_before: u64,
    traffic_of_step: Option<u64>,
}

/// What a rank's steps took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Used {
    /// The most bytes of tensors and buffers in a step; `None` if the program's allocator does not
    /// count.
    pub(crate) peak_bytes: Option<u64>,
    /// Most bytes of the collectives of a plain step; `None` if there was none.
    pub(crate) traffic_bytes: Option<u64>,
}

impl Usage {
    /// Begins to measure a run whose groups `traffic` watches.
    pub(crate) fn new(traffic: TrafficMeter, held_before: u64) -> Self {
        Self { traffic, held_before, peak: 0, traffic_before: 0, traffic_of_step: None }
    }

    pub(crate) fn begin_step(&mut self) {
        self.traffic_before = self.traffic.bytes();
        memory::reset_peak();
    }

    /// Notes the peak of a step, before what may follow the step: a validation, a save.
    pub(crate) fn end_update(&mut self) {
        self.peak = self.peak.max(memory::peak());
    }

    /// Notes the traffic of a plain step: neither the first, nor logged, validated or saved. A step
    /// at the end of an epoch may have fewer micro-batches, so the most counts.
    pub(crate) fn end_plain_step(&mut self) {
        let bytes = self.traffic.bytes() - self.traffic_before;
        self.traffic_of_step = Some(self.traffic_of_step.unwrap_or(0).max(bytes));
    }

    pub(crate) fn used(&self) -> Used {
        let peak = self.peak.saturating_sub(self.held_before);
        let peak_bytes = (self.peak > 0 && memory::is_accounted()).then_some(peak);
        Used { peak_bytes, traffic_bytes: self.traffic_of_step }
    }
}
