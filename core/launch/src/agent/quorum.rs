//! The rules by which agents agree on a coordinator, and on what it has decided.
//!
//! Each host of the rendezvous has a *seat* with one [`Record`]. An agent that writes a record
//! names the one that it has read, and the seat refuses if it has another one by now. A coordinator
//! has a *term* and holds the seats whose records have this term. Its decision holds once a
//! majority of the *voters* has recorded it under this term.
//!
//! If a coordinator is silent, another agent claims the seats and goes on from the newest decision
//! there. Two majorities have a seat in common. So the agent finds every decision that holds, and
//! the coordinator before it cannot decide any more (as in Paxos).
//!
//! If the agent of a seat starts again, its record is lost. The seat then has another *life*. It
//! counts again after the coordinator has decided so, by majorities of the voters before and after
//! (as in Raft, one seat at a time).

use serde::{Deserialize, Serialize};

/// The content of a seat.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Record<D> {
    /// The job, at random.
    pub(super) job: u64,
    /// The term of the coordinator that holds the seat. Its remainder by the number of seats is the
    /// seat of the coordinator itself.
    pub(super) term: u64,
    /// The life of that seat when the coordinator claimed this one.
    pub(super) holder: u64,
    /// Grows as long as the coordinator lives.
    pub(super) beat: u64,
    pub(super) decided: Decided<D>,
}

/// A decision. It holds once a majority of the voters has recorded it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Decided<D> {
    /// The term under which it was recorded.
    pub(super) term: u64,
    /// Grows with each decision.
    pub(super) number: u64,
    /// The life of each seat that counts.
    pub(super) voters: Vec<u64>,
    pub(super) value: D,
}

impl<D> Decided<D> {
    fn age(&self) -> (u64, u64) {
        (self.term, self.number)
    }
}

/// A seat as it was last read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Seat<D> {
    pub(super) life: u64,
    pub(super) record: Option<Record<D>>,
}

/// Whether the seats with these lives are a majority of the voters.
pub(super) fn is_majority(voters: &[u64], life: impl Fn(usize) -> Option<u64>) -> bool {
    let those = voters.iter().enumerate().filter(|(seat, own)| life(*seat) == Some(**own));
    2 * those.count() > voters.len()
}

/// The seats that an agent may ask for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Claim<D> {
    pub(super) term: u64,
    /// The records that it has read. A seat refuses if it has another one meanwhile.
    pub(super) read: Vec<Option<Record<D>>>,
    /// The records that it writes in their place.
    pub(super) records: Vec<Option<Record<D>>>,
}

/// Returns what the agent of seat `own` may claim. `seats` are those that it reaches, its own among
/// them, and `is_silent` tells whose records have not changed for so long that their coordinator is
/// lost.
///
/// At the start of a job all seats must be there, and the first one's agent claims them with what
/// `begin` returns: the job, and the value before any decision.
pub(super) fn claim<D: Clone>(
    own: usize,
    seats: &[Option<Seat<D>>],
    is_silent: impl Fn(usize) -> bool,
    begin: impl FnOnce() -> (u64, D),
) -> Option<Claim<D>> {
    let (count, holder) = (seats.len() as u64, seats[own].as_ref()?.life);
    let read = seats.iter().map(|seat| seat.as_ref()?.record.clone()).collect();
    let found = || seats.iter().flatten().filter_map(|seat| seat.record.as_ref());
    let Some(newest) = found().max_by_key(|record| record.decided.age()) else {
        let lives: Option<Vec<u64>> = seats.iter().map(|seat| Some(seat.as_ref()?.life)).collect();
        let voters = lives.filter(|_| own == 0)?;
        let ((job, value), term) = (begin(), count);
        let decided = Decided { term, number: 0, voters, value };
        let record = Record { job, term, holder, beat: 0, decided };
        return Some(Claim { term, read, records: vec![Some(record); seats.len()] });
    };
    let last = found().map(|record| record.term).max()?;
    let term = last - last % count + own as u64;
    let term = if term > last { term } else { term + count };
    let voters = &newest.decided.voters;
    let record = |(at, seat): (usize, &Option<Seat<D>>)| {
        let seat = seat.as_ref().filter(|seat| seat.life == voters[at] && is_silent(at))?;
        // A voter without a record has never had one.
        let record = seat.record.as_ref().unwrap_or(newest);
        Some(Record { term, holder, beat: 0, ..record.clone() })
    };
    let records: Vec<Option<Record<D>>> = seats.iter().enumerate().map(record).collect();
    let asked = |at: usize| records[at].as_ref().map(|_| voters[at]);
    is_majority(voters, asked).then_some(Claim { term, read, records })
}

/// A coordinator's hold on the seats.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lead<D> {
    job: u64,
    term: u64,
    holder: u64,
    decided: Decided<D>,
    /// The voters of the last decision that was recorded.
    voters_before: Vec<u64>,
    /// For each seat its life, and the last decision that it has recorded.
    recorded: Vec<Option<(u64, u64)>>,
}

impl<D: Clone> Lead<D> {
    /// The hold of an agent that has written its records at the seats with these lives; `None` if
    /// they are no majority.
    pub(super) fn of(claim: &Claim<D>, granted: &[Option<u64>]) -> Option<Self> {
        let records = claim.records.iter().zip(granted);
        let records = records.filter_map(|(record, granted)| granted.and(record.as_ref()));
        let Record { job, holder, decided, .. } =
            records.max_by_key(|record| record.decided.age())?;
        if !is_majority(&decided.voters, |at| granted[at]) {
            return None;
        }
        let decided = Decided { term: claim.term, ..decided.clone() };
        Some(Self {
            job: *job,
            term: claim.term,
            holder: *holder,
            voters_before: decided.voters.clone(),
            recorded: vec![None; decided.voters.len()],
            decided,
        })
    }

    pub(super) fn term(&self) -> u64 {
        self.term
    }

    pub(super) fn decided(&self) -> &D {
        &self.decided.value
    }

    /// Decides, once it [is recorded](Self::is_recorded).
    pub(super) fn decide(&mut self, value: D) {
        self.decided.number += 1;
        self.decided.value = value;
    }

    /// The record to write in place of the one found, with this beat; `None` if another coordinator
    /// has the seat, or another job.
    pub(super) fn record(&self, found: Option<&Record<D>>, beat: u64) -> Option<Record<D>> {
        if found.is_some_and(|found| found.job != self.job || found.term > self.term) {
            return None;
        }
        let Self { job, term, holder, ref decided, .. } = *self;
        Some(Record { job, term, holder, beat, decided: decided.clone() })
    }

    /// Notes that a seat has a record.
    pub(super) fn note(&mut self, seat: usize, life: u64, record: &Record<D>) {
        // The record of a claim has what was decided before.
        if record.decided.term != self.term {
            return;
        }
        self.recorded[seat] = Some((life, record.decided.number));
        if self.is_recorded() {
            self.voters_before.clone_from(&self.decided.voters);
            // A seat that was empty has everything now.
            if self.decided.voters[seat] != life {
                self.decided.voters[seat] = life;
                self.decided.number += 1;
            }
        }
    }

    /// Whether the last decision holds.
    pub(super) fn is_recorded(&self) -> bool {
        let has = |at: usize| {
            let (life, number) = self.recorded[at]?;
            (number >= self.decided.number).then_some(life)
        };
        is_majority(&self.decided.voters, has) && is_majority(&self.voters_before, has)
    }

    /// Whether the seats that it has written in time are a majority.
    pub(super) fn is_held(&self, in_time: impl Fn(usize) -> bool) -> bool {
        let life = |at: usize| self.recorded[at].filter(|_| in_time(at)).map(|(life, _)| life);
        is_majority(&self.decided.voters, life)
    }
}

/// Returns the term of the coordinator that a majority of the voters knows.
pub(super) fn coordinator<D>(seats: &[Option<Seat<D>>]) -> Option<u64> {
    let record = |at: usize| seats[at].as_ref()?.record.as_ref();
    let known_to_most = |newest: &&Record<D>| {
        let of_term = |at: usize| {
            record(at).filter(|record| record.term == newest.term)?;
            seats[at].as_ref().map(|seat| seat.life)
        };
        is_majority(&newest.decided.voters, of_term)
    };
    // An agent may have claimed fewer seats under a later term.
    let terms = (0..seats.len()).filter_map(record).filter(known_to_most);
    terms.map(|record| record.term).max()
}
