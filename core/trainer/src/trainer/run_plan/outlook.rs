//! Times of a run on given hardware: the step, the run, its checkpoints and failures.

use serde::Serialize;

use super::failures::{Failures, Goodput};
use super::hardware::Hardware;
use super::timing::{Recorded, StepTime, step_times};

/// Times on [`Hardware`]. Made by [`RunPlan::of`](super::RunPlan::of).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Outlook {
    /// The hardware's name.
    pub hardware: String,
    /// Whether its numbers were measured.
    pub measured: bool,
    /// Seconds of a step, on the slowest rank.
    pub step_s: f64,
    /// Of these, seconds of computing.
    pub compute_s: f64,
    /// Of these, seconds of waiting for collectives and other stages.
    pub wait_s: f64,
    /// Of these, seconds of waiting for copies between device and host.
    pub copy_wait_s: f64,
    /// Seconds of the step's collectives, hidden or not.
    pub communication_s: f64,
    /// Tokens a second, or other items that the loss counts.
    pub items_per_s: f64,
    /// The part of the hardware's operations that the model's own need, without recomputation and
    /// attention: 6 for each parameter and item, 4 if it is not trained. A row's own experts count.
    pub mfu: f64,
    /// Whether the rank that holds most fits into its device; `None` if either is unknown.
    pub fits: Option<bool>,
    /// Whether what the ranks of a host hold in its own memory fits there; `None` if either is
    /// unknown, and for devices that compute in the host's memory.
    pub fits_host: Option<bool>,
    /// Bytes of a checkpoint with the optimizer's state.
    pub checkpoint_bytes: u64,
    /// Seconds to write it.
    pub checkpoint_s: Option<f64>,
    /// Seconds between checkpoints that lose least time, by Young and Daly.
    pub best_checkpoint_interval_s: Option<f64>,
    /// The part of the time that makes progress, with checkpoints at this interval, if the job
    /// starts again after a failure.
    pub goodput: Option<f64>,
    /// The same by what follows a failure.
    pub goodput_by_recovery: Option<Goodput>,
    /// Days of the configured steps.
    pub run_days: Option<f64>,
    /// The price of the configured steps.
    pub run_price: Option<f64>,
}

/// What a plan knows of a run besides its hardware.
pub(super) struct Facts {
    pub(super) world_size: usize,
    pub(super) ranks_per_host: usize,
    /// Floating-point operations that the model needs for an item.
    pub(super) flops_per_item: f64,
    /// Items that the losses of a step count, over all ranks.
    pub(super) items: f64,
    pub(super) peak_bytes: Option<u64>,
    pub(super) host_bytes: Option<u64>,
    pub(super) checkpoint_bytes: u64,
    pub(super) replicas: usize,
    /// Steps between copies of shards in the memory of hosts.
    pub(super) steps_per_copy: u64,
    pub(super) steps: Option<u64>,
}

pub(super) fn outlook(
    facts: &Facts,
    (recorded, class_of): (&[Recorded], &[usize]),
    hardware: &Hardware,
) -> Outlook {
    let times = step_times(recorded, class_of, hardware, facts.ranks_per_host).into_iter();
    let slowest = times.max_by(|a, b| a.step_s.total_cmp(&b.step_s)).unwrap_or_default();
    let StepTime { step_s, compute_s, wait_s, copy_wait_s, communication_s, .. } = slowest;
    let sharing = (facts.ranks_per_host as f64 / hardware.devices_per_host as f64).max(1.0);
    let devices = facts.world_size as f64 / sharing;
    let peak = hardware.flops.bf16.unwrap_or(hardware.flops.f32).max(hardware.flops.f32);
    let model_flops = facts.flops_per_item * facts.items;
    let on_device = facts.peak_bytes.map(|bytes| bytes as f64 * sharing);
    let on_host = facts.host_bytes.map(|bytes| bytes * facts.ranks_per_host as u64);
    let checkpoint_s =
        hardware.storage_bytes_per_s.map(|speed| facts.checkpoint_bytes as f64 / speed);
    let failures_per_s = hardware.failures_per_device_hour.map(|rate| rate * devices / 3600.0);
    let best = match (checkpoint_s, failures_per_s) {
        (Some(cost), Some(rate)) if rate > 0.0 => Some((2.0 * cost / rate).sqrt()),
        _ => None,
    };
    let bytes_of_rank = facts.checkpoint_bytes as f64 / facts.world_size as f64;
    let transfer_s = bytes_of_rank / hardware.between_hosts.bytes_per_s;
    let by_recovery = match (best, checkpoint_s, failures_per_s) {
        (Some(interval_s), Some(checkpoint_s), Some(per_s)) => Some(Goodput::of(&Failures {
            per_s,
            step_s,
            copies_s: facts.steps_per_copy as f64 * step_s,
            transfer_s,
            replica_transfer_s: facts.replicas as f64 * transfer_s,
            checkpoint_s,
            interval_s,
            restart_s: hardware.restart_s.unwrap_or(300.0),
            going_on_s: hardware.going_on_s.unwrap_or(40.0),
        })),
        _ => None,
    };
    let goodput = by_recovery.map(|by_recovery| by_recovery.restart);
    let run_s = facts.steps.map(|steps| steps as f64 * step_s / goodput.unwrap_or(1.0));
    Outlook {
        hardware: hardware.name.clone(),
        measured: hardware.measured,
        step_s,
        compute_s,
        wait_s,
        copy_wait_s,
        communication_s,
        items_per_s: facts.items / step_s,
        mfu: model_flops / (step_s * devices * peak),
        fits: on_device.zip(hardware.memory_bytes).map(|(needs, has)| needs <= has as f64),
        fits_host: on_host
            .zip(hardware.host.and_then(|host| host.memory_bytes))
            .map(|(needs, has)| needs <= has),
        checkpoint_bytes: facts.checkpoint_bytes,
        checkpoint_s,
        best_checkpoint_interval_s: best,
        goodput,
        goodput_by_recovery: by_recovery,
        run_days: run_s.map(|secs| secs / 86_400.0),
        run_price: run_s
            .zip(hardware.price_per_device_hour)
            .map(|(secs, price)| secs / 3600.0 * price * devices),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_engine::execution::dry_run::Happening;
    use fulgurite_engine::memory::Place;

    const TABLE: &str = r#"
        name = "round numbers"
        devices_per_host = 2
        flops = { f32 = 1e9 }
        memory_bytes_per_s = 1e9
        memory_bytes = 1000
        storage_bytes_per_s = 10
        price_per_device_hour = 2.0
        failures_per_device_hour = 0.9
        within_hosts = { latency_s = 0, bytes_per_s = 1e9 }
        between_hosts = { latency_s = 0, bytes_per_s = 1e9 }
    "#;

    /// Four ranks on two hosts, a step of two seconds.
    fn outlook_of(facts: &Facts) -> Outlook {
        let happenings = vec![Happening::Pass { bytes: 2_000_000_000, place: Place::Device }];
        let recorded = [Recorded { happenings, groups: Vec::new() }];
        outlook(facts, (&recorded, &[0; 4]), &Hardware::parse(TABLE, "test").unwrap())
    }

    fn facts() -> Facts {
        Facts {
            world_size: 4,
            ranks_per_host: 2,
            flops_per_item: 6e6,
            items: 100.0,
            peak_bytes: Some(1000),
            host_bytes: Some(600),
            checkpoint_bytes: 200,
            replicas: 1,
            steps_per_copy: 1,
            steps: Some(900),
        }
    }

    #[test]
    fn times_follow_from_the_table() {
        let out = outlook_of(&facts());
        assert_eq!((out.step_s, out.items_per_s, out.fits), (2.0, 50.0, Some(true)));
        // 6e8 operations in 2 s on 4 devices of 1e9.
        assert!((out.mfu - 0.075).abs() < 1e-12);
        // A checkpoint of 20 s and a failure in 1000 s: every 200 s. A failure costs 320 s, and the
        // work since the last checkpoint.
        assert_eq!((out.checkpoint_s, out.best_checkpoint_interval_s), (Some(20.0), Some(200.0)));
        let goodput = 0.2 / (0.32_f64.exp() * 0.22_f64.exp_m1());
        assert!((out.goodput.unwrap() - goodput).abs() < 1e-12);
        let run_s = 900.0 * 2.0 / goodput;
        assert!((out.run_days.unwrap() * 86_400.0 - run_s).abs() < 1e-6);
        assert!((out.run_price.unwrap() - run_s / 3600.0 * 2.0 * 4.0).abs() < 1e-9);
    }

    #[test]
    fn ranks_that_share_a_device_share_its_memory() {
        let out = outlook_of(&Facts { ranks_per_host: 4, ..facts() });
        assert_eq!((out.step_s, out.fits), (4.0, Some(false)));
        assert_eq!(out.fits_host, None, "the device computes in the host's memory");
        let unknown = outlook_of(&Facts { peak_bytes: None, steps: None, ..facts() });
        assert_eq!((unknown.fits, unknown.run_days), (None, None));
    }
}
