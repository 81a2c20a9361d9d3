//! Who is to blame for a wait that has timed out: the rank that is waited for may itself wait for another
//! one, in another group. All ranks write to the region of all ranks whom they wait for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::memory::{Region, WaitRecord};

/// The region of all ranks that share memory, in which they write whom they wait for.
pub(crate) struct Board {
    region: Arc<Region>,
    /// Their global ranks.
    ranks: Vec<usize>,
}

impl Board {
    pub(crate) fn new(region: &Arc<Region>, ranks: &[usize]) -> Arc<Self> {
        Arc::new(Self { region: region.clone(), ranks: ranks.to_vec() })
    }

    /// The waits of a global rank.
    fn waits(&self, rank: usize) -> &[WaitRecord] {
        let place = self.ranks.iter().position(|&one| one == rank);
        place.map_or(&[], |place| &self.region.record(place).waits)
    }
}

/// A wait whose thread has not looked for this long is over, or its process does not run: it is sent a
/// stop signal, or is in a debugger.
const STALE: Duration = Duration::from_secs(1);
/// How long a wait that timed out counts, after which its rank has ended.
const STALE_TIMEOUT: Duration = Duration::from_secs(10);

/// A wait of this process, on record as long as it goes on; one that timed out stays on record.
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

    /// Records that it goes on.
    pub(super) fn goes_on(&self, awaited: usize) {
        let Some(record) = self.record else { return };
        record.awaited.store(awaited as u32 + 1, Ordering::Relaxed);
        record.looked.store(now(), Ordering::Release);
    }

    /// Records that it has timed out.
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

/// From a rank that is waited for to the rank to blame, which waits for nobody: each waits for the next. If
/// they wait for each other, the last is among those before. The ranks are global.
pub(crate) fn chain(board: &Board, awaited: usize) -> Vec<usize> {
    let mut chain = vec![awaited];
    loop {
        let next = waits_for(board, chain[chain.len() - 1]);
        // Of several waits, one that leads to somebody new.
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

/// `, which waits for rank 3, which waits for nobody`; nothing if the first rank waits for nobody.
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

/// Whom a rank waits for.
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

/// Milliseconds of a clock that all processes of the host share.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RegionLayout;

    #[test]
    fn the_rank_that_waits_for_nobody_is_found() {
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
        // One that has given up still counts, one that ended well does not.
        wait.gives_up();
        drop(first);
        assert_eq!(chain(&board, 1), [1]);
        assert_eq!(chain(&board, 2), [2, 3]);
        let _circle = LongWait::begin(&board, 3, 2);
        assert_eq!(text(2), ", which waits for rank 3, which waits for rank 2");
        // It has not looked for long: its process does not run.
        let _stopped = LongWait::begin(&board, 0, 1);
        assert_eq!(chain(&board, 0), [0, 1]);
        board.waits(0)[0].looked.store(now() - 1001, Ordering::Relaxed);
        assert_eq!(chain(&board, 0), [0]);
    }
}
