//! The warning of a warm-up that is longer than its run.

use crate::Result;
use fulgurite_engine::optim::{Interval, SchedulerConfig};

/// Runs of fewer steps are trials, whose schedules need not come to an end.
const MIN_STEPS: u64 = 4;

/// Warns of schedules whose warm-up is longer than the run: its learning rate is never reached.
///
/// # Errors
/// If a schedule needs the run's length and there is none.
pub(super) fn warn_of_schedules(
    schedulers: &[Box<dyn SchedulerConfig>],
    max_steps: Option<u64>,
) -> Result<()> {
    for scheduler in schedulers.iter().filter(|one| one.interval() == Interval::Step) {
        if let Some(steps) = max_steps.filter(|&steps| steps >= MIN_STEPS)
            && rises_to_the_end(&**scheduler, steps)?
        {
            let factor = scheduler.factor(steps - 1, max_steps)?;
            tracing::warn!(
                "the learning rate still rises when the run ends after {steps} steps, at {factor:.3} \
                 of `optimizer.lr`; lower `scheduler.warmup_steps` or train for longer"
            );
        }
    }
    Ok(())
}

/// Whether the factor never falls over a run of `steps` steps, and rises in the last one.
fn rises_to_the_end(scheduler: &dyn SchedulerConfig, steps: u64) -> Result<bool> {
    const LOOKED_AT: u64 = 64;
    let factor = |step| scheduler.factor(step, Some(steps));
    let mut before = factor(0)?;
    for i in 1..LOOKED_AT.min(steps) {
        let now = factor((u128::from(steps - 1) * u128::from(i) / u128::from(LOOKED_AT)) as u64)?;
        if now < before {
            return Ok(false);
        }
        before = now;
    }
    let (last, end) = (factor(steps - 2)?, factor(steps - 1)?);
    // A warm-up that ends with the run has reached the rate.
    Ok(before <= last && last < end && end < 1.0)
}

#[cfg(test)]
mod tests {
    use super::rises_to_the_end;
    use fulgurite_engine::optim::SchedulerConfig;

    #[test]
    fn warm_up_longer_than_the_run_rises_to_its_end() {
        let rises = |schedule: &str, steps| {
            let value: Box<dyn SchedulerConfig> = serde_json::from_str(schedule).unwrap();
            rises_to_the_end(&*value, steps).unwrap()
        };
        assert!(rises(r#"{ "type": "constant", "warmup_steps": 100 }"#, 50));
        assert!(rises(r#"{ "type": "cosine", "warmup_steps": 100 }"#, 4));
        assert!(!rises(r#"{ "type": "cosine", "warmup_steps": 10 }"#, 50));
        assert!(!rises(r#"{ "type": "constant" }"#, 50));
        // The last step begins a cycle anew.
        let restarts = r#"{ "type": "cosine_warm_restarts", "first_steps": 49 }"#;
        assert!(!rises(restarts, 50));
    }
}
