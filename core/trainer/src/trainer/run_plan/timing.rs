//! The time of a step, by going through the ranks' work and collectives in order.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::hardware::{Hardware, Link};
use super::rank_run::PlannedGroup;
use fulgurite_engine::execution::dry_run::Happening;
use fulgurite_engine::memory::Place;

/// The time of a rank's step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct StepTime {
    /// Seconds from its beginning to its end.
    pub(super) step_s: f64,
    /// Seconds of products and passes.
    pub(super) compute_s: f64,
    /// Seconds in which the rank waits for collectives.
    pub(super) wait_s: f64,
    /// Seconds in which it waits for copies between its host and its device.
    pub(super) copy_wait_s: f64,
    /// Seconds of all collectives, hidden or not.
    pub(super) communication_s: f64,
    /// Floating-point operations of products.
    pub(super) flops: f64,
}

/// What happened in the step of a rank of one class.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Recorded {
    pub(super) happenings: Vec<Happening>,
    /// The groups that it names.
    pub(super) groups: Vec<PlannedGroup>,
}

/// Goes through what happened in a step, on a rank of each class at the same time. `class_of` has
/// the class of each rank. `ranks_per_host` ranks share a host.
///
/// On each rank one stream computes, and waits where the engine waited. Collectives run beside it,
/// one after the other in each group, and so do copies in each direction between host and device. A
/// collective begins with the last of its classes, and a message when it is sent.
pub(super) fn step_times(
    recorded: &[Recorded],
    class_of: &[usize],
    hardware: &Hardware,
    ranks_per_host: usize,
) -> Vec<StepTime> {
    let ranks = recorded.iter().enumerate().map(|(class, of)| Rank::new(class, of, class_of));
    let mut replay = Replay {
        hardware,
        ranks_per_host,
        sharing: (ranks_per_host as f64 / hardware.devices_per_host as f64).max(1.0),
        ranks: ranks.collect(),
        meetings: HashMap::new(),
    };
    while replay.go_on() {}
    replay.finish()
}

/// Collectives of the groups of one name in which ranks of several classes meet, or the messages
/// between two classes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Order<'a> {
    group: &'a str,
    is_message: bool,
    /// The messages' name, if they have one.
    message: &'a str,
    /// Of messages: the sender's and the receiver's.
    classes: Vec<usize>,
}

/// The state of an [`Order`].
#[derive(Debug, Default)]
struct Meetings {
    /// When each collective has ended.
    ends: Vec<f64>,
    /// Collectives that still wait for classes.
    open: VecDeque<Open>,
}

#[derive(Debug, Default)]
struct Open {
    /// Number of classes that have come.
    come: usize,
    /// When the last of them came.
    at: f64,
    secs: f64,
}

impl Meetings {
    /// A class comes to collective `index` at `now`; it begins when there are `needed`.
    fn come(&mut self, index: usize, needed: usize, now: f64, secs: f64) {
        // One that was ended without this class.
        let Some(place) = index.checked_sub(self.ends.len()) else { return };
        if place >= self.open.len() {
            self.open.push_back(Open::default());
        }
        let Some(open) = self.open.get_mut(place) else { return };
        (open.come, open.at, open.secs) = (open.come + 1, open.at.max(now), open.secs.max(secs));
        while self.open.front().is_some_and(|open| open.come >= needed) {
            self.end_first(now);
        }
    }

    /// Ends the first collective that has not ended.
    fn end_first(&mut self, now: f64) {
        let Open { at, secs, .. } =
            self.open.pop_front().unwrap_or(Open { at: now, ..Open::default() });
        let before = self.ends.last().copied().unwrap_or(0.0);
        self.ends.push(at.max(before) + secs);
    }
}

/// When a collective ends.
#[derive(Debug)]
enum Ending<'a> {
    At(f64),
    /// Of a copy between host and device.
    CopiedAt(f64),
    /// With the collective of this index of an order.
    Met(Order<'a>, usize),
}

/// A rank on its way through the step.
struct Rank<'a> {
    class: usize,
    of: &'a Recorded,
    /// By group, the classes of its ranks.
    classes: Vec<Vec<usize>>,
    place: usize,
    now: f64,
    /// By group, when the last collective that meets no other class ends.
    free: Vec<f64>,
    /// When the last copy to the device, and the last to the host, ends.
    copied: [f64; 2],
    /// By the collective's number.
    endings: HashMap<u64, Ending<'a>>,
    /// How many collectives of an order it has come to.
    come: HashMap<Order<'a>, usize>,
    time: StepTime,
}

impl<'a> Rank<'a> {
    fn new(class: usize, of: &'a Recorded, class_of: &[usize]) -> Self {
        let classes = of.groups.iter().map(|group| {
            let ranks = group.global_ranks.iter();
            let all: BTreeSet<usize> =
                ranks.filter_map(|&rank| class_of.get(rank)).copied().collect();
            all.into_iter().collect()
        });
        Self {
            class,
            of,
            classes: classes.collect(),
            place: 0,
            now: 0.0,
            free: vec![0.0; of.groups.len()],
            copied: [0.0; 2],
            endings: HashMap::new(),
            come: HashMap::new(),
            time: StepTime::default(),
        }
    }

    /// The order that a collective belongs to; `None` if its ranks are of one class, or if it is
    /// not known to whom a message goes.
    fn order(&self, group: usize, op: &str, message: &'a str) -> Option<Order<'a>> {
        let all = &self.classes[group];
        let other = all.iter().copied().find(|class| *class != self.class)?;
        let (is_message, classes) = match op {
            "send" | "recv" if self.of.groups[group].global_ranks.len() != 2 => return None,
            "send" => (true, vec![self.class, other]),
            "recv" => (true, vec![other, self.class]),
            _ => (false, all.clone()),
        };
        Some(Order { group: &self.of.groups[group].name, is_message, message, classes })
    }

    fn compute(&mut self, secs: f64) {
        self.now += secs;
        self.time.compute_s += secs;
    }

    fn wait(&mut self, until: f64, is_copy: bool) {
        let secs = (until - self.now).max(0.0);
        *(if is_copy { &mut self.time.copy_wait_s } else { &mut self.time.wait_s }) += secs;
        self.now = self.now.max(until);
    }
}

/// The ranks' ways through the step.
struct Replay<'a> {
    hardware: &'a Hardware,
    ranks_per_host: usize,
    /// Ranks that share a device.
    sharing: f64,
    ranks: Vec<Rank<'a>>,
    meetings: HashMap<Order<'a>, Meetings>,
}

impl<'a> Replay<'a> {
    /// Lets each rank go on as far as it can. False if all are at their end.
    fn go_on(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.ranks.len() {
            while self.advance(rank) {
                moved = true;
            }
        }
        moved || self.stop_waiting()
    }

    /// Goes past a rank's next happening. False if it is at its end, or has to wait for others.
    fn advance(&mut self, index: usize) -> bool {
        let Self { hardware, sharing, meetings, .. } = self;
        let rank = &mut self.ranks[index];
        let Some(happening) = rank.of.happenings.get(rank.place) else { return false };
        match happening {
            Happening::Product { sizes, count, dtype } => {
                let one = sizes.iter().map(|&size| size as f64).product::<f64>();
                let reached = one / (one + hardware.half_speed_multiplications);
                let flops = 2.0 * one * *count as f64;
                rank.time.flops += flops;
                let speed = hardware.flops(*dtype) * reached.max(1e-9);
                rank.compute(hardware.launch_s + *sharing * flops / speed);
            }
            Happening::Pass { bytes, place } => {
                // The ranks of a host share its memory.
                let of_host = hardware.host.filter(|_| *place == Place::Host).map(|host| {
                    self.ranks_per_host as f64 * *bytes as f64 / host.memory_bytes_per_s
                });
                let of_device = *sharing * *bytes as f64 / hardware.memory_bytes_per_s;
                rank.compute(hardware.launch_s + of_host.unwrap_or(of_device));
            }
            Happening::Copy { id, bytes, to } => {
                if let Some(host) = hardware.host {
                    let secs = *sharing * *bytes as f64 / host.link.bytes_per_s;
                    let free = &mut rank.copied[usize::from(*to == Place::Host)];
                    *free = free.max(rank.now) + host.link.latency_s + secs;
                    rank.endings.insert(*id, Ending::CopiedAt(*free));
                }
            }
            Happening::Start { id, group, op, bytes, message } => {
                let of = &rank.of.groups[*group];
                let link = link(of, hardware, self.ranks_per_host);
                let secs = collective_s(op, *bytes, of.global_ranks.len(), link);
                let ending = match rank.order(*group, op, message) {
                    None => {
                        let end = rank.free[*group].max(rank.now) + secs;
                        rank.free[*group] = end;
                        Ending::At(end)
                    }
                    Some(order) => {
                        let come = rank.come.entry(order.clone()).or_default();
                        let index = *come;
                        *come += 1;
                        if *op != "recv" {
                            let needed = if order.is_message { 1 } else { order.classes.len() };
                            // Sends of one group go one after the other.
                            let free = if order.is_message { rank.free[*group] } else { 0.0 };
                            let at = rank.now.max(free);
                            rank.free[*group] = at + secs;
                            let meetings = meetings.entry(order.clone()).or_default();
                            meetings.come(index, needed, at, secs);
                        }
                        Ending::Met(order, index)
                    }
                };
                rank.time.communication_s += if *op == "recv" { 0.0 } else { secs };
                rank.endings.insert(*id, ending);
            }
            Happening::Wait { id } => {
                if let Some(ending) = rank.endings.get(id) {
                    let Some(until) = ended(meetings, ending) else { return false };
                    let is_copy = matches!(ending, Ending::CopiedAt(_));
                    rank.endings.remove(id);
                    rank.wait(until, is_copy);
                }
            }
            Happening::Mark(_) => {}
        }
        rank.place += 1;
        true
    }

    /// Ends what the rank that is furthest behind waits for, if records of ranks do not meet. False
    /// if no rank waits.
    fn stop_waiting(&mut self) -> bool {
        let waits = |rank: &&Rank<'_>| rank.place < rank.of.happenings.len();
        let waiting = self.ranks.iter().filter(waits).min_by(|a, b| a.now.total_cmp(&b.now));
        let Some(rank) = waiting else { return false };
        let Happening::Wait { id } = &rank.of.happenings[rank.place] else { return false };
        if let Some(Ending::Met(order, _)) = rank.endings.get(id) {
            self.meetings.entry(order.clone()).or_default().end_first(rank.now);
        }
        true
    }

    /// The step ends when its last collective has ended.
    fn finish(self) -> Vec<StepTime> {
        let Self { ranks, meetings, .. } = self;
        let finish = |rank: Rank<'_>| {
            let ends = rank.endings.values().filter_map(|ending| ended(&meetings, ending));
            StepTime { step_s: ends.fold(rank.now, f64::max), ..rank.time }
        };
        ranks.into_iter().map(finish).collect()
    }
}

/// When a collective has ended, if it has.
fn ended<'a>(meetings: &HashMap<Order<'a>, Meetings>, ending: &Ending<'a>) -> Option<f64> {
    match ending {
        Ending::At(end) | Ending::CopiedAt(end) => Some(*end),
        Ending::Met(order, index) => meetings.get(order)?.ends.get(*index).copied(),
    }
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

    use super::super::hardware::Host;
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
        let (op, message) = ("all_gather_into", String::new());
        Happening::Start { id, group: 0, op, bytes, message }
    }

    /// The time of two ranks that do the same.
    fn time_of(step: &[Happening], ranks_per_host: usize) -> StepTime {
        let recorded = Recorded { happenings: step.to_vec(), groups: vec![group([0, 1])] };
        step_times(&[recorded], &[0, 0], &hardware(), ranks_per_host)[0]
    }

    fn pass(secs: usize) -> Happening {
        Happening::Pass { bytes: secs * 1_000_000_000, place: Place::Device }
    }

    fn of(happenings: Vec<Happening>) -> Recorded {
        Recorded { happenings, groups: vec![group([0, 1])] }
    }

    /// The message of this number.
    fn message(id: u64, op: &'static str) -> Happening {
        let message = format!("message {id}");
        Happening::Start { id, group: 0, op, bytes: 1_000_000_000, message }
    }

    /// Ranks of two classes, on hosts of two devices.
    fn times_of(ranks: [Vec<Happening>; 2]) -> [(f64, f64); 2] {
        let hardware = Hardware { devices_per_host: 2, ..hardware() };
        let times = step_times(&ranks.map(of), &[0, 1], &hardware, 2);
        [0, 1].map(|rank: usize| (times[rank].step_s, times[rank].wait_s))
    }

    #[test]
    fn receivers_wait_for_senders() {
        let wait = |id| Happening::Wait { id };
        // Two messages of a second each, sent after 2 s and 3 s.
        let sender = vec![pass(2), message(1, "send"), pass(1), message(2, "send")];
        let receiver =
            vec![message(1, "recv"), message(2, "recv"), wait(1), pass(2), wait(2), pass(1)];
        assert_eq!(times_of([sender, receiver]), [(4.0, 0.0), (6.0, 3.0)]);
    }

    #[test]
    fn messages_meet_by_name() {
        let wait = |id| Happening::Wait { id };
        let sender = vec![message(1, "send"), pass(3), message(2, "send")];
        // The second is expected first.
        let receiver = vec![message(2, "recv"), message(1, "recv"), wait(1), pass(1), wait(2)];
        assert_eq!(times_of([sender, receiver]), [(4.0, 0.0), (4.0, 3.0)]);
    }

    #[test]
    fn collectives_begin_with_the_last() {
        let wait = |id| Happening::Wait { id };
        let gather = start(1, 2_000_000_000);
        let early = vec![gather.clone(), pass(1), wait(1), pass(1)];
        let late = vec![pass(3), gather, wait(1)];
        assert_eq!(times_of([early, late]), [(5.0, 3.0), (4.0, 1.0)]);
    }

    #[test]
    fn records_that_do_not_meet_end() {
        let waits = vec![message(1, "recv"), Happening::Wait { id: 1 }, pass(1)];
        assert_eq!(times_of([waits, vec![pass(2)]]), [(1.0, 0.0), (2.0, 0.0)]);
    }

    #[test]
    fn waits_count_what_computing_does_not_hide() {
        // A gather of 3 GB between two ranks takes 1.5 s, beside a pass of 1 s.
        let step = [start(1, 3_000_000_000), pass(1), Happening::Wait { id: 1 }];
        let time = time_of(&step, 2);
        assert_eq!((time.step_s, time.wait_s), (2.0, 0.0), "two ranks share the host");
        let time = time_of(&step, 1);
        let slow = 15.0 + 1e-3;
        assert!((time.step_s - slow).abs() < 1e-9 && (time.wait_s - slow + 1.0).abs() < 1e-9);
    }

    #[test]
    fn copies_run_beside_passes() {
        let hardware = Hardware {
            host: Some(Host {
                memory_bytes: None,
                memory_bytes_per_s: 5e8,
                link: Link { latency_s: 0.0, bytes_per_s: 1e9 },
            }),
            ..hardware()
        };
        let copy = |id, to| Happening::Copy { id, bytes: 2_000_000_000, to };
        // Two copies of 2 s each to the host, one after the other, and one to the device.
        let happenings = vec![
            copy(1, Place::Host),
            copy(2, Place::Host),
            copy(3, Place::Device),
            pass(1),
            Happening::Wait { id: 3 },
            Happening::Wait { id: 1 },
            Happening::Wait { id: 2 },
            // A pass of the host, whose memory two ranks share: 4 s.
            Happening::Pass { bytes: 1_000_000_000, place: Place::Host },
        ];
        let recorded = Recorded { happenings, groups: Vec::new() };
        let time =
            step_times(&[recorded], &[0, 0], &Hardware { devices_per_host: 2, ..hardware }, 2)[0];
        assert_eq!(
            (time.step_s, time.compute_s, time.copy_wait_s, time.wait_s),
            (8.0, 5.0, 3.0, 0.0)
        );
    }

    #[test]
    fn small_products_are_slower() {
        let product = |n| Happening::Product { sizes: [n; 3], count: 1, dtype: DType::F32 };
        let of = |half: f64| {
            let hardware = Hardware { half_speed_multiplications: half, ..hardware() };
            let recorded = Recorded { happenings: vec![product(1000)], groups: Vec::new() };
            step_times(&[recorded], &[0], &hardware, 1)[0].step_s
        };
        assert_eq!((of(0.0), of(1e9)), (1.0, 2.0));
    }
}
