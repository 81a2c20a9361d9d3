//! A plan beside what the run took.

use std::fmt;

use fulgurite_engine::strategy::Bytes;
use serde::{Deserialize, Serialize};

use super::RunPlan;

/// What a run keeps of its plan. The rest, such as the record of each rank's step, takes memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    /// Bytes that this process held before it made the plan.
    pub(crate) held_before: u64,
    /// [`RunPlan::peak_bytes`].
    pub(crate) peak_bytes: Option<u64>,
    /// [`RunPlan::traffic_bytes_per_step`].
    pub(crate) traffic_bytes_per_step: u64,
    /// [`RunPlan::step_s`].
    pub(crate) step_s: Option<f64>,
}

impl Planned {
    pub(crate) fn of(plan: &RunPlan) -> Self {
        let RunPlan { held_before, peak_bytes, traffic_bytes_per_step, step_s, .. } = *plan;
        Self { held_before, peak_bytes, traffic_bytes_per_step, step_s: Some(step_s) }
    }
}

/// The plan of a run beside what the engine counted in it. `None` where there is no plan, or where
/// nothing was counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanComparison {
    /// Planned bytes of tensors and buffers on the rank that holds most
    /// ([`RunPlan::peak_bytes`](super::RunPlan::peak_bytes)).
    pub peak_bytes: Option<u64>,
    /// The most that a rank held in a step.
    pub measured_peak_bytes: Option<u64>,
    /// Planned bytes of a plain step's collectives over all ranks
    /// ([`RunPlan::traffic_bytes_per_step`](super::RunPlan::traffic_bytes_per_step)).
    pub traffic_bytes_per_step: Option<u64>,
    /// The most of these bytes in a plain step.
    pub measured_traffic_bytes_per_step: Option<u64>,
    /// Planned seconds of a step.
    pub step_s: Option<f64>,
    /// The median time of a step, in seconds.
    pub measured_step_s: Option<f64>,
}

impl PlanComparison {
    /// Whether there was a plan.
    pub fn is_planned(&self) -> bool {
        self.traffic_bytes_per_step.is_some()
    }
}

/// As `planned 1.2 GiB and took 1.2 GiB at most, …`.
impl fmt::Display for PlanComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn of(bytes: Option<u64>) -> String {
            bytes.map_or_else(|| "unknown".to_owned(), |bytes| Bytes(bytes).to_string())
        }
        write!(
            f,
            "memory {} planned, {} taken; collectives of a step {} planned, {} sent",
            of(self.peak_bytes),
            of(self.measured_peak_bytes),
            of(self.traffic_bytes_per_step),
            of(self.measured_traffic_bytes_per_step)
        )?;
        if let (Some(planned), Some(measured)) = (self.step_s, self.measured_step_s) {
            write!(f, "; a step {planned:.3} s planned, {measured:.3} s taken")?;
        }
        Ok(())
    }
}
