//! The time of a step, by going through a rank's work and collectives in order.

use std::collections::HashMap;

use super::hardware::{Hardware, Link};
use super::rank_run::PlannedGroup;
use fulgurite_engine::execution::dry_run::Happening;

/// The time of a rank's step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StepTime {
    /// Seconds from its beginning to its end.
    pub(super) step_s: f64,
    /// Seconds of products and passes.
    pub(super) compute_s: f64,
    /// Seconds in which the rank waits for collectives.
    pub(super) wait_s: f64,
    /// Seconds of all collectives, hidden or not.
    pub(super) communication_s: f64,
    /// Floating-point operations of products.
    pub(super) flops: f64,
}

/// Goes through what happened in a step. `ranks_per_host` ranks share a host.
///
/// One stream computes. Collectives run beside it, one after the other in each group, and the
/// computing stream waits for those that the engine waited for.
pub(super) fn step_time(
    happenings: &[Happening],
    groups: &[PlannedGroup],
    hardware: &Hardware,
    ranks_per_host: usize,
) -> StepTime {
    let sharing = (ranks_per_host as f64 / hardware.devices_per_host as f64).max(1.0);
    let mut time = StepTime::default();
    let mut free = vec![0.0f64; groups.len()];
    let mut ends: HashMap<u64, f64> = HashMap::new();
    let mut now = 0.0;
    for happening in happenings {
        let work = match happening {
            Happening::Product { sizes, count, dtype } => {
                let one = sizes.iter().map(|&size| size as f64).product::<f64>();
                let reached = one / (one + hardware.half_speed_multiplications);
                let flops = 2.0 * one * *count as f64;
                time.flops += flops;
                hardware.launch_s + sharing * flops / (hardware.flops(*dtype) * reached.max(1e-9))
            }
            Happening::Pass { bytes } => {
                hardware.launch_s + sharing * *bytes as f64 / hardware.memory_bytes_per_s
            }
            Happening::Start { id, group, op, bytes } => {
                let of = &groups[*group];
                let link = link(of, hardware, ranks_per_host);
                let secs = collective_s(op, *bytes, of.global_ranks.len(), link);
                let end = free[*group].max(now) + secs;
                time.communication_s += secs;
                free[*group] = end;
                ends.insert(*id, end);
                0.0
            }
            Happening::Wait { id } => {
                let until = ends.remove(id).unwrap_or(now).max(now);
                time.wait_s += until - now;
                now = until;
                0.0
            }
            Happening::Mark(_) => 0.0,
        };
        now += work;
        time.compute_s += work;
    }
    // The step ends when its last collective has ended.
    time.step_s = ends.into_values().fold(now, f64::max);
    time
}

/// The slowest connection between a group's ranks.
fn link(group: &PlannedGroup, hardware: &Hardware, ranks_per_host: usize) -> Link {
    match group.spans_hosts(ranks_per_host) {
        true => hardware.between_hosts,
        false => hardware.within_hosts,
    }
}

/// Seconds of a collective of `n` ranks by a ring, which moves the fewest bytes.
fn collective_s(op: &str, bytes: u64, n: usize, link: Link) -> f64 {
    let (n, bytes) = (n as f64, bytes as f64);
    let (steps, moved) = match op {
        "all_reduce" => (2.0 * (n - 1.0), 2.0 * bytes * (n - 1.0) / n),
        "all_gather_into" | "reduce_scatter" | "all_to_all" => (n - 1.0, bytes * (n - 1.0) / n),
        "barrier" => (n.log2().ceil(), 0.0),
        _ => (1.0, bytes),
    };
    // Small messages go along a tree.
    let steps = steps.min(2.0 * n.log2().ceil().max(1.0));
    steps * link.latency_s + moved / link.bytes_per_s
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn hardware() -> Hardware {
        let text = r#"
            name = "round numbers"
            flops = { f32 = 2e9 }
            memory_bytes_per_s = 1e9
            within_hosts = { latency_s = 0, bytes_per_s = 1e9 }
            between_hosts = { latency_s = 1e-3, bytes_per_s = 1e8 }
        "#;
        Hardware::parse(text, "test").unwrap()
    }

    fn group(ranks: [usize; 2]) -> PlannedGroup {
        PlannedGroup { name: "g".to_owned(), global_ranks: ranks.to_vec() }
    }

    fn start(id: u64, bytes: u64) -> Happening {
        Happening::Start { id, group: 0, op: "all_gather_into", bytes }
    }

    #[test]
    fn waits_count_what_computing_does_not_hide() {
        let pass = Happening::Pass { bytes: 1_000_000_000 };
        // A gather of 3 GB between two ranks takes 1.5 s, beside a pass of 1 s.
        let step = [start(1, 3_000_000_000), pass, Happening::Wait { id: 1 }];
        let time = step_time(&step, &[group([0, 1])], &hardware(), 2);
        assert_eq!((time.step_s, time.wait_s), (2.0, 0.0), "two ranks share the host");
        let time = step_time(&step, &[group([0, 1])], &hardware(), 1);
        let slow = 15.0 + 1e-3;
        assert!((time.step_s - slow).abs() < 1e-9 && (time.wait_s - slow + 1.0).abs() < 1e-9);
    }

    #[test]
    fn small_products_are_slower() {
        let product = |n| Happening::Product { sizes: [n; 3], count: 1, dtype: DType::F32 };
        let of = |half: f64| {
            let hardware = Hardware { half_speed_multiplications: half, ..hardware() };
            step_time(&[product(1000)], &[], &hardware, 1).step_s
        };
        assert_eq!((of(0.0), of(1e9)), (1.0, 2.0));
    }
}
