//! Comparing the records of several ranks.

use std::collections::{BTreeMap, BTreeSet};

use super::line::{Call, Channel, GroupLine};
use super::log::FlightLog;

/// A call at which ranks got stuck.
#[derive(Debug, Clone, PartialEq)]
pub struct Trouble {
    /// The group's name.
    pub group: String,
    /// The global ranks that make the call: of the group, or sender and receiver of a message.
    pub members: Vec<usize>,
    /// The call's number.
    pub number: u64,
    /// The call on the ranks that have begun it.
    pub calls: BTreeMap<usize, Call>,
    /// Ranks that have not begun it.
    pub behind: Vec<usize>,
    /// Ranks without a record.
    pub unknown: Vec<usize>,
    /// Whether ranks have made different calls.
    pub differs: bool,
}

/// How late a rank was.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lag {
    /// The rank.
    pub rank: usize,
    /// Number of collectives that the rank began last of their group.
    pub last: u64,
    /// Seconds that they began after the last but one rank, in all.
    pub secs: f64,
}

/// A sequence of calls that ranks make together: the collectives of a group, or the messages from
/// one rank to another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Sequence {
    group: String,
    ranks: Vec<usize>,
    /// The group's index among those of this name and these ranks.
    index: usize,
    /// Sender and receiver.
    message: Option<(usize, usize)>,
}

impl Sequence {
    fn members(&self) -> Vec<usize> {
        match self.message {
            None => self.ranks.clone(),
            Some((from, to)) => vec![from, to],
        }
    }
}

/// The calls of one rank.
#[derive(Default)]
struct Calls<'a> {
    /// Number of calls in all.
    count: u64,
    /// The recorded ones, by number.
    by_number: BTreeMap<u64, &'a Call>,
}

type CallsOfRanks<'a> = BTreeMap<usize, Calls<'a>>;

/// The sequences of all ranks.
fn sequences(logs: &[FlightLog]) -> BTreeMap<Sequence, CallsOfRanks<'_>> {
    let mut sequences: BTreeMap<Sequence, CallsOfRanks<'_>> = BTreeMap::new();
    for log in logs {
        let own = log.head.rank;
        let mut of_channels: BTreeMap<_, Calls<'_>> = BTreeMap::new();
        for (&channel, &count) in &log.channels {
            of_channels.insert(channel, Calls { count, ..Calls::default() });
        }
        for call in &log.calls {
            let calls = of_channels.entry((call.group, call.channel)).or_default();
            calls.by_number.insert(call.number, call);
        }
        for ((id, channel), calls) in of_channels {
            let group = &log.groups[id];
            let is_equal =
                |other: &&GroupLine| (&other.name, &other.ranks) == (&group.name, &group.ranks);
            let index = log.groups[..id].iter().filter(is_equal).count();
            let global = |rank: usize| group.ranks.get(rank).copied().unwrap_or(rank);
            let message = match channel {
                Channel::All => None,
                Channel::To(peer) => Some((own, global(peer))),
                Channel::From(peer) => Some((global(peer), own)),
            };
            let (name, ranks) = (group.name.clone(), group.ranks.clone());
            let sequence = Sequence { group: name, ranks, index, message };
            sequences.entry(sequence).or_default().insert(own, calls);
        }
    }
    sequences.retain(|sequence, _| sequence.ranks.len() > 1);
    sequences
}

impl Trouble {
    /// Finds the call at which ranks got stuck, if any.
    ///
    /// If ranks wait for each other in a chain, it is the call that the rank at the chain's end has
    /// not begun. If the chain is a circle, it is the calls of the circle: each waits for a rank of
    /// the next one.
    pub fn find(logs: &[FlightLog]) -> Vec<Self> {
        let recorded: BTreeSet<usize> = logs.iter().map(|log| log.head.rank).collect();
        let all = sequences(logs);
        let in_sequence = all
            .iter()
            .filter_map(|(sequence, calls)| Self::in_sequence(sequence, calls, &recorded));
        let mut found: Vec<Self> = in_sequence.collect();
        found.sort_by(|a, b| a.since().total_cmp(&b.since()));
        let waiting: BTreeSet<usize> = logs
            .iter()
            .filter(|log| log.calls.iter().any(Call::is_stuck))
            .map(|log| log.head.rank)
            .collect();
        let ends_chain = |trouble: &Self| {
            trouble.differs || trouble.missing().any(|rank| !waiting.contains(&rank))
        };
        match found.iter().position(ends_chain) {
            Some(end) => vec![found.swap_remove(end)],
            None => circle(&found),
        }
    }

    /// The ranks that have not begun the call, or whose record is missing.
    fn missing(&self) -> impl Iterator<Item = usize> {
        self.behind.iter().chain(&self.unknown).copied()
    }

    /// When the first rank began the call, in seconds since 1970.
    pub fn since(&self) -> f64 {
        self.calls.values().map(|call| call.begun).fold(f64::INFINITY, f64::min)
    }

    fn in_sequence(
        sequence: &Sequence,
        calls: &CallsOfRanks<'_>,
        recorded: &BTreeSet<usize>,
    ) -> Option<Self> {
        let members = sequence.members();
        let known = || members.iter().filter(|rank| recorded.contains(rank));
        let last = |rank: &usize| calls.get(rank).map_or(0, |calls| calls.count);
        let at = |number: u64| -> BTreeMap<usize, &Call> {
            let of = |rank: &usize| Some((*rank, *calls.get(rank)?.by_number.get(&number)?));
            known().filter_map(of).collect()
        };
        let numbers = calls.values().flat_map(|calls| calls.by_number.keys());
        let numbers: BTreeSet<u64> = numbers.copied().collect();
        let differs = numbers.iter().copied().find(|number| differ(&at(*number)));
        // The first that a rank has not begun, or else the last one.
        let fewest = known().map(last).min().unwrap_or(0);
        let most = known().map(last).max().unwrap_or(0);
        let number = differs.unwrap_or(if fewest < most { fewest + 1 } else { most });
        let begun = at(number);
        let is_stuck = differs.is_some() || begun.values().any(|call| call.is_stuck());
        is_stuck.then(|| Self {
            group: sequence.group.clone(),
            number,
            behind: known().filter(|rank| last(rank) < number).copied().collect(),
            unknown: members.iter().filter(|rank| !recorded.contains(rank)).copied().collect(),
            calls: begun.into_iter().map(|(rank, call)| (rank, call.clone())).collect(),
            differs: differs.is_some(),
            members: members.clone(),
        })
    }
}

/// Follows the waits from the first call on. Returns the calls that come again, or the last one if
/// none does.
fn circle(found: &[Trouble]) -> Vec<Trouble> {
    let next = |trouble: &Trouble| {
        let waits = |other: &Trouble| {
            trouble.missing().any(|rank| other.calls.get(&rank).is_some_and(Call::is_stuck))
        };
        found.iter().position(waits)
    };
    let mut path: Vec<&Trouble> = Vec::new();
    let mut at = (!found.is_empty()).then_some(0);
    while let Some(index) = at {
        let trouble = &found[index];
        if let Some(start) = path.iter().position(|&seen| std::ptr::eq(seen, trouble)) {
            return path[start..].iter().copied().cloned().collect();
        }
        path.push(trouble);
        at = next(trouble);
    }
    path.pop().into_iter().cloned().collect()
}

/// Whether ranks have made different calls under one number.
fn differ(calls: &BTreeMap<usize, &Call>) -> bool {
    let of = |call: &Call| match call.op.as_str() {
        // Each rank sends what it has.
        "all_to_all" => ("all_to_all".to_owned(), None),
        "send" | "recv" => ("message".to_owned(), Some(call.bytes)),
        op => (op.to_owned(), Some(call.bytes)),
    };
    let mut all = calls.values().map(|call| of(call));
    let first = all.next();
    all.any(|other| Some(other) != first)
}

/// How late each recorded rank was in the collectives that all ranks of their groups have begun.
/// The clocks of hosts may differ.
pub fn lags(logs: &[FlightLog]) -> Vec<Lag> {
    let mut lags: BTreeMap<usize, Lag> = logs
        .iter()
        .map(|log| log.head.rank)
        .map(|rank| (rank, Lag { rank, last: 0, secs: 0.0 }))
        .collect();
    for (sequence, calls) in sequences(logs) {
        let members = sequence.members();
        if sequence.message.is_some() || !members.iter().all(|rank| calls.contains_key(rank)) {
            continue;
        }
        for number in calls[&members[0]].by_number.keys() {
            let begun = |rank: &usize| Some((calls[rank].by_number.get(number)?.begun, *rank));
            let Some(mut begun) = members.iter().map(begun).collect::<Option<Vec<_>>>() else {
                continue;
            };
            begun.sort_by(|a, b| a.0.total_cmp(&b.0));
            let [.., (before, _), (at, rank)] = begun[..] else { continue };
            if let Some(lag) = lags.get_mut(&rank) {
                lag.last += 1;
                lag.secs += at - before;
            }
        }
    }
    lags.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::flight::FlightHead;

    /// The record of a rank in `world`, of three ranks, and in pairs. A call is its group, channel,
    /// method, beginning and end.
    fn log(rank: usize, calls: &[(&str, Channel, &str, f64, Option<f64>)]) -> FlightLog {
        let mut groups = Vec::new();
        let mut channels = BTreeMap::new();
        let mut all = Vec::new();
        for &(name, channel, op, begun, ended) in calls {
            let known = groups.iter().position(|group: &GroupLine| group.name == name);
            let group = known.unwrap_or(groups.len());
            if known.is_none() {
                let ranks = match name {
                    "world" => vec![0, 1, 2],
                    pair => pair.bytes().map(|digit| usize::from(digit - b'0')).collect(),
                };
                groups.push(GroupLine { id: group, name: name.to_owned(), ranks });
            }
            let number = channels.entry((group, channel)).or_insert(0);
            *number += 1;
            all.push(Call {
                group,
                channel,
                number: *number,
                op: op.to_owned(),
                bytes: 8,
                label: None,
                begun,
                started: None,
                waited: None,
                ended,
                failed: false,
            });
        }
        let head = FlightHead {
            rank,
            world_size: 3,
            host: String::new(),
            written: 100.0,
            calls: all.len() as u64,
        };
        FlightLog { head, groups, channels, calls: all }
    }

    const ALL: Channel = Channel::All;

    fn done(at: f64) -> (&'static str, Channel, &'static str, f64, Option<f64>) {
        ("world", ALL, "barrier", at, Some(at + 0.5))
    }

    fn one(logs: &[FlightLog]) -> Trouble {
        let [trouble] = &Trouble::find(logs)[..] else { panic!("one call") };
        trouble.clone()
    }

    #[test]
    fn nothing_is_found_in_a_complete_record() {
        let logs: Vec<_> = (0..3).map(|rank| log(rank, &[done(1.0), done(2.0)])).collect();
        assert_eq!(Trouble::find(&logs), []);
        // The sender of a broadcast may be a call ahead.
        let ahead = log(0, &[done(1.0), done(2.0), ("world", ALL, "broadcast", 3.0, Some(3.1))]);
        assert_eq!(Trouble::find(&[ahead, logs[1].clone(), logs[2].clone()]), []);
    }

    #[test]
    fn rank_that_has_not_begun_is_behind() {
        let waits = |rank| log(rank, &[done(1.0), ("world", ALL, "all_reduce", 2.0, None)]);
        let trouble = one(&[waits(0), log(1, &[done(1.0)]), waits(2)]);
        assert_eq!((trouble.behind, trouble.number, trouble.differs), (vec![1], 2, false));
        assert_eq!(trouble.calls.keys().copied().collect::<Vec<_>>(), [0, 2]);
        // Without its record only the others' wait is known.
        let trouble = one(&[waits(0), waits(2)]);
        assert_eq!((trouble.behind, trouble.unknown), (vec![], vec![1]));
    }

    #[test]
    fn chain_of_waits_ends_at_who_waits_for_none() {
        let logs = [
            log(0, &[("01", ALL, "all_reduce", 5.0, None)]),
            log(1, &[("12", ALL, "all_reduce", 6.0, None)]),
            log(2, &[done(1.0)]),
        ];
        let trouble = one(&logs);
        assert_eq!((&*trouble.group, trouble.behind), ("12", vec![2]));
    }

    /// Rank 0 waits for rank 1, and ranks 1 and 2 for each other.
    #[test]
    fn circle_of_waits_is_found() {
        let logs = [
            log(0, &[("01", ALL, "all_reduce", 1.0, None)]),
            log(1, &[("12", ALL, "all_reduce", 2.0, None)]),
            log(2, &[("world", Channel::From(1), "recv", 3.0, None)]),
        ];
        let found = Trouble::find(&logs);
        let names: Vec<_> = found.iter().map(|trouble| &*trouble.group).collect();
        assert_eq!(names, ["12", "world"]);
        assert_eq!((&found[0].behind[..], &found[1].behind[..]), (&[2][..], &[1][..]));
    }

    /// Ranks 1 and 2 have begun the same call, which does not end.
    #[test]
    fn chain_may_end_at_a_call_that_all_have_begun() {
        let both = [("12", ALL, "all_reduce", 2.0, None)];
        let logs = [log(0, &[("01", ALL, "all_reduce", 1.0, None)]), log(1, &both), log(2, &both)];
        let trouble = one(&logs);
        assert_eq!((&*trouble.group, trouble.behind), ("12", vec![]));
    }

    /// Rank 2 is stuck in its own code, and has started a gather early.
    #[test]
    fn early_start_is_no_wait() {
        let early = ("12", ALL, "all_gather_into", 1.5, None);
        let mut stuck = log(2, &[early, done(1.0)]);
        stuck.calls[0].started = Some(1.5);
        let logs = [
            log(0, &[("01", ALL, "all_reduce", 5.0, None)]),
            log(1, &[early, ("12", ALL, "all_reduce", 6.0, None)]),
            stuck,
        ];
        let trouble = one(&logs);
        assert_eq!((&*trouble.group, trouble.number, trouble.behind), ("12", 2, vec![2]));
    }

    #[test]
    fn different_calls_are_found() {
        let calls = |op| [done(1.0), ("world", ALL, op, 2.0, None)];
        let logs = [
            log(0, &calls("all_reduce")),
            log(1, &calls("broadcast")),
            log(2, &calls("all_reduce")),
        ];
        let trouble = one(&logs);
        assert!(trouble.differs && trouble.number == 2 && trouble.calls[&1].op == "broadcast");
    }

    #[test]
    fn message_that_was_not_sent_is_found() {
        let sent = ("world", Channel::To(1), "send", 1.0, Some(1.1));
        let received = |at, ended| ("world", Channel::From(0), "recv", at, ended);
        let logs = [
            log(0, &[sent]),
            log(1, &[received(1.0, Some(1.2)), received(2.0, None)]),
            log(2, &[]),
        ];
        let trouble = one(&logs);
        assert_eq!((trouble.members, trouble.behind, trouble.number), (vec![0, 1], vec![0], 2));
    }

    #[test]
    fn ring_may_lack_what_was_long_ago() {
        // Rank 1's record no longer has the barrier, but its number.
        let mut late = log(1, &[done(1.0), ("12", ALL, "all_reduce", 2.0, Some(2.1))]);
        late.calls.remove(0);
        let logs = [
            log(0, &[done(1.0)]),
            late,
            log(2, &[done(1.0), ("12", ALL, "all_reduce", 2.0, Some(2.1))]),
        ];
        assert_eq!(Trouble::find(&logs), []);
    }

    #[test]
    fn lateness_is_counted_by_rank() {
        let at = |times: [f64; 2]| times.map(done);
        let logs = [log(0, &at([1.0, 2.0])), log(1, &at([1.5, 2.25])), log(2, &at([1.25, 4.25]))];
        let found = lags(&logs).into_iter().map(|lag| (lag.rank, lag.last, lag.secs));
        assert_eq!(found.collect::<Vec<_>>(), [(0, 0, 0.0), (1, 1, 0.25), (2, 1, 2.0)]);
    }
}
