//! Warnings about schedules whose learning rate is never reached.

use crate::Result;
use fulgurite_engine::optim::{Interval, SchedulerConfig};

/// Shorter runs are trials, whose schedules need not complete.
const MIN_STEPS: u64 = 4;

/// Maximum number of steps that are checked.
const LOOKED_AT: u64 = 100_000;

/// Warns of schedules that never reach the learning rate.
///
/// Their warm-up is longer than the run, or their decay begins before the warm-up ends.
///
/// # Errors
/// If a schedule needs an unknown run length.
pub(crate) fn warn_of_schedules(
    schedulers: &[Box<dyn SchedulerConfig>],
    max_steps: Option<u64>,
) -> Result<()> {
    for scheduler in schedulers.iter().filter(|one| one.interval() == Interval::Step) {
        let Some(steps) = max_steps.filter(|&steps| steps >= MIN_STEPS) else { continue };
        match peak_below_rate(&**scheduler, steps)? {
            Some(Peak { factor, at_end: true, .. }) => tracing::warn!(
                "the learning rate still rises when the run ends after {steps} steps, at {factor:.3} \
                 of `optimizer.lr`; lower `scheduler.warmup_steps` or train for longer"
            ),
            Some(Peak { factor, step, .. }) => tracing::warn!(
                "the learning rate falls again from step {} on, when it has risen to {factor:.3} of \
                 `optimizer.lr`; lower `scheduler.warmup_steps` or the steps of its decay, or train for longer",
                step + 1
            ),
            None => {}
        }
    }
    Ok(())
}

/// The largest factor of a run.
#[derive(Debug, PartialEq)]
struct Peak {
    factor: f64,
    /// The last step with this factor, counted from 0.
    step: u64,
    /// Whether the last step of the run has this factor.
    at_end: bool,
}

/// Finds the peak of a factor that rises and stays below 1.
fn peak_below_rate(scheduler: &dyn SchedulerConfig, steps: u64) -> Result<Option<Peak>> {
    let factor = |step| scheduler.factor(step, Some(steps));
    let (first, last) = (factor(0)?, factor(steps - 1)?);
    let mut peak = (first, 0);
    let stride = steps.div_ceil(LOOKED_AT);
    for step in (1..steps).step_by(stride as usize).chain([steps - 1]) {
        let now = factor(step)?;
        if now >= peak.0 {
            peak = (now, step);
        }
    }
    let (factor, step) = peak;
    let at_end = step == steps - 1;
    // Between two checked steps the factor may come nearer to 1.
    let is_low = if at_end { last < 1.0 } else { factor < 0.95 };
    Ok((first < factor && is_low).then_some(Peak { factor, step, at_end }))
}

#[cfg(test)]
mod tests {
    use super::{Peak, peak_below_rate};
    use fulgurite_engine::optim::SchedulerConfig;

    fn peak(schedule: &str, steps: u64) -> Option<Peak> {
        let value: Box<dyn SchedulerConfig> = serde_json::from_str(schedule).unwrap();
        peak_below_rate(&*value, steps).unwrap()
    }

    #[test]
    fn too_long_warmup_peaks_at_the_end() {
        let rises = |schedule: &str, steps| peak(schedule, steps).is_some_and(|peak| peak.at_end);
        assert!(rises(r#"{ "type": "constant", "warmup_steps": 100 }"#, 50));
        assert!(rises(r#"{ "type": "cosine", "warmup_steps": 100 }"#, 4));
        assert_eq!(peak(r#"{ "type": "cosine", "warmup_steps": 10 }"#, 50), None);
        assert_eq!(peak(r#"{ "type": "constant" }"#, 50), None);
        // A warm-up that ends with the run reaches the rate.
        assert_eq!(peak(r#"{ "type": "constant", "warmup_steps": 49 }"#, 50), None);
        // The last step begins a new cycle.
        let restarts = r#"{ "type": "cosine_warm_restarts", "first_steps": 49 }"#;
        assert_eq!(peak(restarts, 50), None);
    }

    #[test]
    fn decay_may_begin_before_warmup_ends() {
        let schedule = |warmup| {
            format!(
                r#"{{ "type": "warmup_stable_decay", "warmup_steps": {warmup}, "decay_steps": 80 }}"#
            )
        };
        let low = peak(&schedule(40), 100).unwrap();
        assert!(low.factor < 0.9 && low.step < 40 && !low.at_end, "{low:?}");
        assert_eq!(peak(&schedule(20), 100), None);
    }
}
