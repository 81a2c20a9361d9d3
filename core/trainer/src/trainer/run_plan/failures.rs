//! The part of the time that makes progress, in a run that meets failures.

use serde::Serialize;

/// A run that meets failures, at random times that do not depend on each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failures {
    /// Failures of any device in a second.
    pub(super) per_s: f64,
    /// Seconds of a step.
    pub(super) step_s: f64,
    /// Seconds between copies of shards in the memory of hosts.
    pub(super) copies_s: f64,
    /// Seconds in which all ranks send the state to other hosts, each a part.
    pub(super) transfer_s: f64,
    /// Seconds in which the ranks of one replica do so.
    pub(super) replica_transfer_s: f64,
    /// Seconds to write a checkpoint, and to read one.
    pub(super) checkpoint_s: f64,
    /// Seconds between checkpoints.
    pub(super) interval_s: f64,
    /// Seconds from a failure until the ranks that were started again load a checkpoint.
    pub(super) restart_s: f64,
    /// Seconds from a failure until the ranks that are left load a state.
    pub(super) going_on_s: f64,
}

/// The part of the time that makes progress, by what follows a failure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Goodput {
    /// The job starts again, from the last checkpoint.
    pub restart: f64,
    /// The ranks that are left go on from the last checkpoint (`trainer.elastic` with `fsdp`).
    pub going_on: f64,
    /// They go on from copies of shards in the memory of hosts (`trainer.elastic.replicas`). The
    /// steps since the last copy are taken again.
    pub from_copies: f64,
    /// They go on from what replicas hold (`trainer.elastic` with `ddp` or `hsdp`). The interrupted
    /// step is taken again.
    pub with_replicas: f64,
}

impl Goodput {
    pub(super) fn of(run: &Failures) -> Self {
        let Failures { per_s, step_s, copies_s, transfer_s, checkpoint_s, .. } = *run;
        let Failures { interval_s, restart_s, going_on_s, replica_transfer_s, .. } = *run;
        let from_checkpoint =
            |recovery_s| goodput(per_s, interval_s, checkpoint_s, recovery_s + checkpoint_s);
        // Checkpoints are still written.
        let saving = interval_s / (interval_s + checkpoint_s);
        Self {
            restart: from_checkpoint(restart_s),
            going_on: from_checkpoint(going_on_s),
            // A copy that is on the way is lost too.
            from_copies: saving * goodput(per_s, copies_s, 0.0, going_on_s + 2.0 * transfer_s),
            // What replicas hold is sent to the next host, and then to all ranks.
            with_replicas: saving
                * goodput(per_s, step_s, 0.0, going_on_s + 2.0 * replica_transfer_s),
        }
    }
}

/// The part of the time that makes progress if a failure loses the work since the last state, of
/// which one is kept after each `work_s`, in `keep_s`. Going on takes `recovery_s`, in which the
/// next failure may come.
///
/// Exact for failures at random times, as the complete model of Daly, "A higher order estimate of
/// the optimum checkpoint interval for restart dumps", 2006.
fn goodput(failures_per_s: f64, work_s: f64, keep_s: f64, recovery_s: f64) -> f64 {
    let rate = failures_per_s;
    if rate == 0.0 {
        return work_s / (work_s + keep_s);
    }
    let took_s = (rate * recovery_s).exp() * (rate * (work_s + keep_s)).exp_m1() / rate;
    work_s / took_s
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number from 0 to 1 of SplitMix64.
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = *state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Follows a run over this number of pieces of work, failure by failure.
    fn simulated(rate: f64, work_s: f64, keep_s: f64, recovery_s: f64, pieces: u32) -> f64 {
        let mut state = 7;
        let mut until_failure = || -(1.0 - random(&mut state)).ln() / rate;
        let (mut took_s, mut left_s) = (0.0, until_failure());
        for _ in 0..pieces {
            let mut needed_s = work_s + keep_s;
            while left_s < needed_s {
                took_s += left_s;
                left_s = until_failure();
                needed_s = recovery_s + work_s + keep_s;
            }
            (took_s, left_s) = (took_s + needed_s, left_s - needed_s);
        }
        work_s * f64::from(pieces) / took_s
    }

    #[test]
    fn formula_is_that_of_simulated_failures() {
        for (rate, work_s, keep_s, recovery_s) in
            [(1e-3, 200.0, 20.0, 300.0), (1e-4, 600.0, 30.0, 900.0), (1e-2, 30.0, 0.0, 40.0)]
        {
            let (exact, found) = (
                goodput(rate, work_s, keep_s, recovery_s),
                simulated(rate, work_s, keep_s, recovery_s, 400_000),
            );
            assert!((exact - found).abs() < 5e-3 * exact, "{exact} and {found}");
        }
        assert_eq!(goodput(0.0, 90.0, 10.0, 300.0), 0.9);
    }

    #[test]
    fn going_on_loses_less() {
        let run = Failures {
            per_s: 1e-4,
            step_s: 10.0,
            copies_s: 50.0,
            transfer_s: 2.0,
            replica_transfer_s: 4.0,
            checkpoint_s: 20.0,
            interval_s: 600.0,
            restart_s: 600.0,
            going_on_s: 40.0,
        };
        let Goodput { restart, going_on, from_copies, with_replicas } = Goodput::of(&run);
        let rising = [restart, going_on, from_copies, with_replicas, 1.0];
        assert!(rising.is_sorted_by(|a, b| a < b), "{rising:?}");
    }
}
