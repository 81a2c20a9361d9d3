//! The end of a run: its summary, its profile, its last hooks, and the teardown of saving.

use super::module::hooks::Hook;
use super::record::meter::peak_rss_mib;
use super::record::usage::Used;
use super::session::Session;
use super::{Event, ItemRate, RunStatus};
use crate::profiler::Profile;
use crate::trainer::run_plan::PlanComparison;
use crate::{Error, Result};
use fulgurite_engine::collective::all_gather_object;
use fulgurite_engine::execution::dry_run;
use fulgurite_launch::generation;

/// Emits the summary, and the profile if there is one. Collective.
pub(super) fn summarize(session: &mut Session) -> Result<()> {
    if let Some(profile) = session.setup.fabric.measurements().profile()? {
        report_profile(session, profile)?;
    }
    let peak_rss_mib = all_gather_object(&**session.setup.fabric.world(), &peak_rss_mib())?
        .into_iter()
        .map(|mib| mib.unwrap_or(f64::NAN))
        .collect();
    let used =
        all_gather_object(&**session.setup.fabric.world(), &session.recorder.usage().used())?;
    let peak_device_mib = peak_device_mib(session)?;
    let (recorder, meter) = (&session.recorder, session.recorder.meter());
    let event = Event::Summary {
        steps: session.progress.step(),
        world_size: session.setup.world_size(),
        strategy: session.setup.strategy.clone(),
        first_loss: meter.first_loss(),
        last_loss: meter.last_loss(),
        step_s_median: meter.median_step_secs(),
        rate: ItemRate::new(recorder.items_name(), meter.counts_per_sec()),
        startup_s: meter.startup_secs(),
        // Rank 0 does not know the times of a process whose place it has taken.
        goodput: meter.goodput().filter(|_| session.recorder.goes_on() || generation() == 0),
        skipped_steps: session.skipped_steps(),
        peak_rss_mib,
        peak_device_mib,
        plan: compared(session, &used),
    };
    session.emit(&event)
}

/// Compares the plan with what the ranks' steps took.
fn compared(session: &Session, used: &[Used]) -> PlanComparison {
    let plan = session.setup.plan;
    let step_s = session.recorder.meter().median_step_secs();
    let sum = |sum: Option<u64>, used: &Used| Some(sum? + used.traffic_bytes?);
    PlanComparison {
        peak_bytes: plan.and_then(|plan| plan.peak_bytes),
        measured_peak_bytes: used.iter().map(|used| used.peak_bytes).max().flatten(),
        traffic_bytes_per_step: plan.map(|plan| plan.traffic_bytes_per_step),
        measured_traffic_bytes_per_step: used.iter().fold(Some(0), sum),
        step_s: plan.and_then(|plan| plan.step_s),
        measured_step_s: (!step_s.is_nan()).then_some(step_s),
    }
}

/// Returns the peak memory of all ranks' devices, in MiB; empty if ranks compute on the host.
/// Collective.
fn peak_device_mib(session: &Session) -> Result<Vec<f64>> {
    let fabric = &session.setup.fabric;
    // All ranks have the same kind of device.
    let Some(memory) = fabric.measurements().device_memory()? else { return Ok(Vec::new()) };
    let peaks = all_gather_object(&**fabric.world(), &(memory.peak_bytes as f64))?;
    Ok(peaks.into_iter().map(|peak| peak / f64::from(1 << 20)).collect())
}

/// Reports the profile, and writes the trace.
fn report_profile(
    session: &mut Session,
    (profile, trace): (Profile, Option<String>),
) -> Result<()> {
    if let (Some(trace), 0) = (trace, session.setup.rank()) {
        let path = session.setup.run_dir.join("trace.json");
        std::fs::write(&path, trace).map_err(Error::io("writing the trace", &path))?;
    }
    session.emit(&Event::Profile(profile))
}

/// Reports the profile of rank 0 after an error. The other ranks may have failed.
pub(super) fn profile_on_exception(session: &mut Session) {
    let reported = match session.setup.fabric.measurements().own_profile() {
        Ok(Some(profile)) if session.setup.rank() == 0 => report_profile(session, profile),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = reported {
        tracing::error!("reporting where the time went: {error}");
    }
}

/// Calls the last hooks of a run. Their errors are only shown, because the run already has its
/// result. A dry run has none: it is cut off, and what hooks tell the world would not be true.
pub(super) fn end_hooks(session: &mut Session, status: RunStatus, error: Option<&Error>) {
    if dry_run::is_on() {
        return;
    }
    let exception = error.map(Hook::Exception);
    for hook in exception.into_iter().chain([Hook::Teardown(&status)]) {
        for deciding in [false, true] {
            if let Err(error) = session.call_hook(hook, 0, deciding) {
                tracing::error!("a hook at the end of the run failed: {error}");
            }
        }
    }
    // Values logged here can no longer be reduced.
    session.recorder.forget_hook();
}

/// Tears down the checkpoints' location after the run, and returns the run's own error first.
pub(super) fn tear_down_saving<T>(session: &mut Session, result: Result<T>) -> Result<T> {
    match (result, session.saving.teardown()) {
        (Ok(outcome), torn_down) => torn_down.map(|()| outcome),
        (Err(error), torn_down) => {
            if let Err(second) = torn_down {
                tracing::error!("completing what checkpoints are still under way: {second}");
            }
            Err(error)
        }
    }
}

/// Writes the record of this rank's last collectives if ranks were stuck.
pub(super) fn write_flight_after<T>(session: &mut Session, result: &Result<T>) {
    let (Some(flight), Err(error)) = (&session.flight, result) else { return };
    let Some(dir) = flight.write_after(error) else { return };
    if session.setup.rank() == 0 {
        let dir = dir.display();
        tracing::warn!(
            "each rank's last collectives are in {dir}; `fulgurite flight {dir}` compares them"
        );
        session.recorder.keep_run_dir();
    }
}
