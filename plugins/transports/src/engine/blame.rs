//! Finds the rank to blame for a timeout: the awaited rank may itself wait for another one, in
//! another group.
//!
//! All ranks record which rank they wait for, in the region of all ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::memory::{Region, WaitRecord};

/// The region of all ranks that share memory, in which each records the rank that it waits for.
pub(crate) struct Board {
    region: Arc<Region>,
    /// Global ranks of the region's members.
    ranks: Vec<usize>,
}

impl Board {
    pub(crate) fn new(region: &Arc<Region>, ranks: &[usize]) -> Arc<Self> {
        Arc::new(Self { region: region.clone(), ranks: ranks.to_vec() })
    }

    /// Returns the waits of a global rank.
    fn waits(&self, rank: usize) -> &[WaitRecord] {
        let place = self.ranks.iter().position(|&one| one == rank);
        place.map_or(&[], |place| &self.region.record(place).waits)
    }
}

/// Age at which a wait is ignored: it has ended, or its process is stopped or in a debugger.
const STALE: Duration = Duration::from_secs(1);
/// The same for a wait that timed out, whose rank has ended by then.
const STALE_TIMEOUT: Duration = Duration::from_secs(10);

/// A recorded wait of this process. The record is cleared at its end, unless it timed out.
pub(super) struct LongWait<'a> {
    record: Option<&'a WaitRecord>,
}

impl<'a> LongWait<'a> {
    /// Records that `rank` waits for `awaited`, both global.
    pub(super) fn begin(board: &'a Board, rank: usize, awaited: usize) -> Self {
        let claim = |record: &&WaitRecord| {
            let free = &record.awaited;
            free.compare_exchange(0, awaited as u32 + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let wait = Self { record: board.waits(rank).iter().find(claim) };
        wait.goes_on(awaited);
        wait
    }

    /// Records that the wait continues.
    pub(super) fn goes_on(&self, awaited: usize) {
        let Some(record) = self.record else { return };
        record.awaited.store(awaited as u32 + 1, Ordering::Relaxed);
        record.looked.store(now(), Ordering::Release);
    }

    /// Records that the wait has timed out.
    pub(super) fn gives_up(mut self) {
        if let Some(record) = self.record.take() {
            record.gave_up.store(1, Ordering::Release);
        }
    }
}

impl Drop for LongWait<'_> {
    fn drop(&mut self) {
        if let Some(record) = self.record {
            record.awaited.store(0, Ordering::Release);
        }
    }
}

/// Returns the chain of global ranks from `awaited` on, in which each rank waits for the next.
///
/// The last one is the rank to blame, which waits for no rank. In a cycle, the last rank repeats an
/// earlier one.
pub(crate) fn chain(board: &Board, awaited: usize) -> Vec<usize> {
    let mut chain = vec![awaited];
    loop {
        let next = waits_for(board, chain[chain.len() - 1]);
        // Prefers a wait for a rank outside the chain.
        let new = next.iter().find(|rank| !chain.contains(rank));
        match new.or(next.first()) {
            None => return chain,
            Some(&rank) => {
                let known = chain.contains(&rank);
                chain.push(rank);
                if known {
                    return chain;
                }
            }
        }
    }
}

/// Formats a chain: `, which waits for rank 3, which waits for nobody`. Empty for a chain of one
/// rank.
pub(crate) fn describe(chain: &[usize]) -> String {
    let mut text: String =
        chain[1..].iter().map(|rank| format!(", which waits for rank {rank}")).collect();
    if let [before @ .., last] = chain
        && !before.is_empty()
        && !before.contains(last)
    {
        text.push_str(", which waits for nobody");
    }
    text
}

/// Returns the ranks that a rank waits for.
fn waits_for(board: &Board, rank: usize) -> Vec<usize> {
    let now = now();
    let goes_on = |record: &&WaitRecord| {
        let age = now.saturating_sub(record.looked.load(Ordering::Acquire));
        let gave_up = record.gave_up.load(Ordering::Acquire) != 0;
        age <= (if gave_up { STALE_TIMEOUT } else { STALE }).as_millis() as u64
    };
    let awaited = |awaited: &AtomicU32| (awaited.load(Ordering::Acquire) as usize).checked_sub(1);
    let records = board.waits(rank).iter().filter(goes_on);
    let awaited = records.filter_map(|record| awaited(&record.awaited));
    awaited.filter(|rank| board.ranks.contains(rank)).collect()
}

/// Returns milliseconds of a clock shared by all processes of the host.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RegionLayout;

    #[test]
    fn last_rank_of_wait_chain_is_found() {
        let region = Arc::new(Region::anonymous(RegionLayout::new(4, 4096)).unwrap());
        let board = Board::new(&region, &[0, 1, 2, 3]);
        let text = |awaited| describe(&chain(&board, awaited));
        assert_eq!(text(2), "");
        let wait = LongWait::begin(&board, 2, 3);
        assert_eq!(text(2), ", which waits for rank 3, which waits for nobody");
        let first = LongWait::begin(&board, 1, 2);
        assert_eq!(
            text(1),
            ", which waits for rank 2, which waits for rank 3, which waits for nobody"
        );
        // A wait that timed out still counts. One that ended well does not.
        wait.gives_up();
        drop(first);
        assert_eq!(chain(&board, 1), [1]);
        assert_eq!(chain(&board, 2), [2, 3]);
        let _circle = LongWait::begin(&board, 3, 2);
        assert_eq!(text(2), ", which waits for rank 3, which waits for rank 2");
        // Not looked for long: its process does not run.
        let _stopped = LongWait::begin(&board, 0, 1);
        assert_eq!(chain(&board, 0), [0, 1]);
        board.waits(0)[0].looked.store(now() - 1001, Ordering::Relaxed);
        assert_eq!(chain(&board, 0), [0]);
    }
}
