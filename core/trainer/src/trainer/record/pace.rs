//! Ranks that are slower than the others (`trainer.slow_rank_factor`).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::fabric::host;
use fulgurite_engine::collective::flight::FlightRecorder;
use fulgurite_engine::collective::{ProcessGroup, all_gather_object};

/// Compares the times that ranks compute. Time in collectives does not count.
pub(crate) struct Pace {
    factor: f64,
    /// The step, the time, and the waits until then, at the last comparison.
    last: Option<(u64, Instant, Duration)>,
    /// Ranks that were slow in the last comparison.
    slow: BTreeSet<usize>,
}

/// Seconds that a rank computes in a step, and its host.
#[derive(Debug, Serialize, Deserialize)]
struct OfRank {
    secs: f64,
    host: String,
}

impl Pace {
    pub(crate) fn new(factor: f64) -> Self {
        Self { factor, last: None, slow: BTreeSet::new() }
    }

    /// Compares the ranks over the steps since the last call. Returns the ranks that were slow
    /// twice in a row, of which rank 0 warns. Collective.
    ///
    /// # Errors
    /// If a peer fails.
    pub(crate) fn compare(
        &mut self,
        recorder: &FlightRecorder,
        world: &dyn ProcessGroup,
        step: u64,
    ) -> Result<Vec<usize>> {
        let (now, waited) = (Instant::now(), recorder.waited());
        let Some((first, begun, waited_before)) = self.last.replace((step, now, waited)) else {
            return Ok(Vec::new());
        };
        let computed = (now - begun).saturating_sub(waited.saturating_sub(waited_before));
        let steps = step.saturating_sub(first).max(1);
        let own = OfRank { secs: computed.as_secs_f64() / steps as f64, host: host() };
        let all = all_gather_object(world, &own)?;
        // The next comparison does not count this one.
        self.last = Some((step, Instant::now(), recorder.waited()));
        let secs: Vec<f64> = all.iter().map(|rank| rank.secs).collect();
        let (median, slow) = slow_ranks(&secs, self.factor);
        let again: Vec<usize> = slow.intersection(&self.slow).copied().collect();
        for &rank in again.iter().filter(|_| world.rank() == 0) {
            tracing::warn!(
                "rank {rank} on {} is slow: in the last steps it computed {:.3} s a step, and half of the ranks at \
                 most {median:.3} s",
                all[rank].host,
                secs[rank]
            );
        }
        self.slow = slow;
        Ok(again)
    }
}

/// Returns the median of the ranks' times, and the ranks with more than `factor` times as much.
fn slow_ranks(secs: &[f64], factor: f64) -> (f64, BTreeSet<usize>) {
    let mut sorted = secs.to_vec();
    sorted.sort_by(f64::total_cmp);
    // The lower one of two, so that one of two ranks can be slow.
    let median = sorted[(sorted.len() - 1) / 2];
    let slow = secs.iter().enumerate().filter(|(_, secs)| **secs > factor * median);
    (median, slow.map(|(rank, _)| rank).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_ranks_exceed_the_median() {
        let slow = |secs: &[f64]| slow_ranks(secs, 1.5).1.into_iter().collect::<Vec<_>>();
        assert_eq!(slow(&[1.0, 1.1, 2.0, 0.9]), [2]);
        assert_eq!(slow(&[1.0, 1.6]), [1]);
        assert!(slow(&[1.0, 1.1, 1.2, 1.4]).is_empty());
        assert_eq!(slow_ranks(&[3.0, 1.0, 2.0], 1.5).0, 2.0);
    }
}
