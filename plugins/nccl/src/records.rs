//! Positions of a group's ranks: during a long wait, each rank writes its collective to the job's
//! store.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::flight::Notice;
use crate::shared::Shared;

/// Time limit for an answer of the store.
const ANSWER: Duration = Duration::from_secs(1);

/// The collective that a rank waits in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    number: u64,
    /// Description of the collective, equal on all ranks.
    what: String,
    label: Option<String>,
}

impl Record {
    /// Makes the record of a collective. Messages have no record.
    pub(crate) fn of(notice: &Notice) -> Option<Self> {
        let (what, label) = (notice.what.clone(), notice.label.clone());
        notice.number.map(|number| Self { number, what, label })
    }

    fn describe(&self) -> String {
        let label = self.label.as_ref().map_or_else(String::new, |label| format!(", for {label}"));
        format!("collective {} ({}{label})", self.number, self.what)
    }
}

fn key(shared: &Shared, rank: usize) -> String {
    format!("{}/waits/{rank}", shared.key)
}

/// Tells the other ranks this rank's collective, and returns theirs by group rank, if known. Waits
/// for the store for at most a second.
pub(crate) fn exchange(shared: &Shared, own: &Record) -> Vec<Option<Record>> {
    let keys: Vec<String> = (0..shared.global_ranks.len()).map(|rank| key(shared, rank)).collect();
    let (rank, value) = (shared.rank, serde_json::to_vec(own).unwrap_or_default());
    let ask = move |store: &dyn fulgurite_core::collective::Store| -> Vec<Option<Record>> {
        // Without a store, the message just says less.
        let _ = store.set(&keys[rank], &value);
        let read =
            |key: &String| serde_json::from_slice(&store.get(key, Duration::ZERO).ok()?).ok();
        keys.iter().map(read).collect()
    };
    let unknown = || vec![None; shared.global_ranks.len()];
    shared.world.messenger.ask(ANSWER, ask).unwrap_or_else(unknown)
}

/// Returns an error message if a rank is in another collective of the same number.
pub(crate) fn mismatch(shared: &Shared, own: &Record, all: &[Option<Record>]) -> Option<String> {
    let differs = |record: &Record| record.number == own.number && record.what != own.what;
    let (rank, other) = all.iter().enumerate().find_map(|(rank, record)| {
        record.as_ref().filter(|record| differs(record)).map(|record| (rank, record))
    })?;
    // All ranks name the same two, lower rank first.
    let mut both = [(shared.rank, own), (rank, other)];
    both.sort_by_key(|(rank, _)| *rank);
    let [first, second] = both.map(|(rank, record)| {
        format!("rank {} is in {}", shared.global_ranks[rank], record.describe())
    });
    Some(format!(
        "{first}, but {second}: all ranks of a group must call the same collectives, in the same order, with the same \
         shapes and dtypes"
    ))
}

/// Names the peers that have not reached this rank's collective:
/// `rank 2, which waits in collective 3 (…)`.
pub(crate) fn missing(shared: &Shared, notice: &Notice, all: &[Option<Record>]) -> String {
    let describe = |&peer: &usize| {
        let rank = shared.global_ranks[peer];
        match (all.get(peer).and_then(Option::as_ref), notice.number) {
            (Some(record), Some(number)) if record.number == number => None,
            (Some(record), Some(number)) if record.number < number => {
                Some(format!("rank {rank}, which waits in {}", record.describe()))
            }
            _ => Some(format!("rank {rank}")),
        }
    };
    let missing: Vec<String> = notice.peers.iter().filter_map(describe).collect();
    match missing.is_empty() {
        true => "all ranks have come to it, but it does not end: a GPU or a link may be stuck, and NCCL_DEBUG=INFO \
                 says more"
            .to_owned(),
        false => format!("waited for {}", missing.join(", ")),
    }
}
