//! Warnings of schedules whose learning rate is never reached.

use crate::Result;
use fulgurite_engine::optim::{Interval, SchedulerConfig};

/// Runs of fewer steps are trials, whose schedules need not come to an end.
const MIN_STEPS: u64 = 4;

/// Steps of a run that are looked at.
const LOOKED_AT: u64 = 100_000;

/// Warns of schedules whose warm-up is longer than the run, or than their decay leaves it: the learning rate is
/// never reached.
///
/// # Errors
/// If a schedule needs the run's length and there is none.
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
    /// Its last step, counted from 0.
    step: u64,
    /// Whether the factor rises from first to last.
    at_end: bool,
}

/// The peak of a factor that rises and stays below 1.
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
    // Between two steps that were looked at it may come nearer.
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
    fn warm_up_longer_than_the_run_rises_to_its_end() {
        let rises = |schedule: &str, steps| peak(schedule, steps).is_some_and(|peak| peak.at_end);
        assert!(rises(r#"{ "type": "constant", "warmup_steps": 100 }"#, 50));
        assert!(rises(r#"{ "type": "cosine", "warmup_steps": 100 }"#, 4));
        assert_eq!(peak(r#"{ "type": "cosine", "warmup_steps": 10 }"#, 50), None);
        assert_eq!(peak(r#"{ "type": "constant" }"#, 50), None);
        // A warm-up that ends with the run has reached the rate.
        assert_eq!(peak(r#"{ "type": "constant", "warmup_steps": 49 }"#, 50), None);
        // The last step begins a cycle anew.
        let restarts = r#"{ "type": "cosine_warm_restarts", "first_steps": 49 }"#;
        assert_eq!(peak(restarts, 50), None);
    }

    #[test]
    fn decay_may_begin_before_the_warm_up_ends() {
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
