//! FSDP's schedule. The harness has parameters that count their uses, as layers do, graphs of unit
//! calls, and a driver that checks each action when it performs it.

use std::collections::BTreeSet;

use fulgurite_core::module::Reshard;
use fulgurite_strategies::schedule::fsdp::{Action, Event, Group, Prefetch, ReduceScope, Schedule};
use proptest::prelude::*;

use super::draw;

const RANKS: usize = 3;

/// A part of a step. A route lists the units that a forward calls.
#[derive(Debug, Clone)]
enum Part {
    /// A forward and its backward.
    Plain(Vec<usize>),
    /// Two forwards, and one backward through both.
    Joined(Vec<usize>, Vec<usize>),
    /// Several forwards, then the backward of each, in order or in reverse order. A further forward
    /// follows the first backward, and its backward comes last.
    ForwardsFirst(Vec<Vec<usize>>, bool, Vec<usize>),
    /// A forward, and two backwards through it.
    Twice(Vec<usize>),
    /// A forward that records a graph and discards it.
    Discarded(Vec<usize>),
    /// A forward without a graph.
    NoGrad(Vec<usize>),
}

#[derive(Debug, Clone)]
struct Scenario {
    /// The units, then the root.
    groups: Vec<Group>,
    prefetch: Prefetch,
    /// For some units, the units to gather ahead in forward and in backward, as numbers modulo the
    /// count.
    lists: Vec<(usize, [Vec<usize>; 2])>,
    /// The scope of backwards without synchronisation.
    unsynchronised: ReduceScope,
    /// Whether the units' input needs a gradient; otherwise frozen units at the bottom have no
    /// backward.
    tracked_input: bool,
    /// Whether gradients may come after the next units' backwards began. Each call then uses the
    /// unit's first parameter on every rank and delivers it last. Otherwise ranks that get a unit's
    /// last gradient at different times could differ: one gathers the next unit while another
    /// reduces this one.
    late_gradients: bool,
    steps: Vec<Vec<Part>>,
    seed: u64,
}

impl Scenario {
    fn root(&self) -> usize {
        self.groups.len() - 1
    }

    /// The prefetch lists, of groups.
    fn listed(&self) -> Vec<(usize, [Vec<usize>; 2])> {
        let group = |unit: usize| unit % self.root();
        let lists = |lists: &[Vec<usize>; 2]| {
            lists.clone().map(|list| list.into_iter().map(group).collect())
        };
        self.lists.iter().map(|(unit, of_unit)| (group(*unit), lists(of_unit))).collect()
    }

    /// Maximum number of groups gathered ahead. Listed groups may wait until backward.
    fn ahead(&self) -> usize {
        let listed = self.listed().into_iter().flat_map(|(_, lists)| lists.into_iter().flatten());
        let listed: BTreeSet<usize> = listed.collect();
        self.prefetch.forward.max(self.prefetch.backward) + listed.len()
    }

    /// Whether a parameter is used as a plain tensor, with one gradient for all its uses in a
    /// graph.
    fn is_plain_tensor(&self, group: usize, parameter: usize) -> bool {
        let first = self.late_gradients && parameter == 0;
        !first && draw(self.seed, &[0, group, parameter]).is_multiple_of(3)
    }

    /// Number of uses of a parameter in a rank's call of a unit.
    fn uses(&self, rank: usize, call: &Call, parameter: usize) -> usize {
        // Otherwise the first call would not be part of the graph.
        if parameter == 0 && (self.late_gradients || call.first && !self.tracked_input) {
            return 1;
        }
        match draw(self.seed, &[1, rank, call.id, parameter]) % 4 {
            0 => 0,
            3 => 2,
            _ => 1,
        }
    }
}

/// A call of a unit in a graph.
#[derive(Debug, Clone, Copy)]
struct Call {
    group: usize,
    /// Unique in the scenario.
    id: usize,
    /// Whether it is the forward's first call that uses trainable parameters.
    first: bool,
    /// Whether it is a part of the graph.
    tracked: bool,
}

/// Pending uses of a trainable parameter, counted as `Parameter` does.
#[derive(Debug, Clone, Default)]
struct Uses {
    pending: usize,
    pending_tensor: bool,
    ready: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    Freed,
    Part,
    Gathering,
    Gathered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grads {
    Local,
    Reducing,
    Scattered,
    Replicating,
    Replicated,
}

/// A rank's driver of the schedule.
struct Rank<'a> {
    scenario: &'a Scenario,
    rank: usize,
    schedule: Schedule,
    values: Vec<Values>,
    uses: Vec<Vec<Uses>>,
    grads: Vec<Grads>,
    /// Number of reductions of each group in this backward.
    reductions: Vec<usize>,
    scope: ReduceScope,
    /// Numbers of gradients per group: in the unsharded buffer, scattered, delivered, and all
    /// produced in this step.
    arrived: Vec<[usize; 4]>,
    /// The actions that must be equal on all ranks.
    collectives: Vec<Action>,
    /// Maximum number of gathered groups now.
    limit: usize,
    calls: usize,
    /// Units called since the last backward that are not freed after forward.
    kept: BTreeSet<usize>,
    /// Whether this step's backwards belonged to the forwards since the last backward.
    exact: bool,
    /// In an exact backward: the calls of each unit whose backward has not begun.
    to_come: Option<Vec<usize>>,
}

impl<'a> Rank<'a> {
    fn new(scenario: &'a Scenario, rank: usize) -> Self {
        let n = scenario.groups.len();
        let mut schedule = Schedule::new(&scenario.groups, scenario.prefetch);
        for (group, [forward, backward]) in scenario.listed() {
            schedule.set_forward_prefetch(group, forward);
            schedule.set_backward_prefetch(group, backward);
        }
        Self {
            scenario,
            rank,
            schedule,
            values: vec![Values::Freed; n],
            uses: scenario.groups.iter().map(|g| vec![Uses::default(); g.trainable]).collect(),
            grads: vec![Grads::Local; n],
            reductions: vec![0; n],
            scope: ReduceScope::All,
            arrived: vec![[0; 4]; n],
            collectives: Vec::new(),
            limit: 0,
            calls: 0,
            kept: BTreeSet::new(),
            exact: true,
            to_come: None,
        }
    }

    fn on(&mut self, event: Event) {
        for action in self.schedule.on(event) {
            self.perform(action);
        }
        let ahead = self.values.iter().filter(|&&values| values == Values::Gathering).count();
        assert!(ahead <= self.scenario.ahead(), "{ahead} groups are gathered ahead");
    }

    fn perform(&mut self, action: Action) {
        use Action::{
            CompleteUnused, Deliver, Free, Gather, GatherParts, KeepPart, Reduce, Replicate,
            WaitGather, WaitReduction, WaitReplication,
        };
        if matches!(action, Gather(_) | GatherParts(_) | Reduce(_) | Replicate(_) | Deliver) {
            self.collectives.push(action);
        }
        let expect = |grads: Grads, from: Grads| assert_eq!(grads, from, "{action:?}");
        match action {
            Gather(g) | GatherParts(g) => {
                let from = match action {
                    Gather(_) => Values::Freed,
                    _ => Values::Part,
                };
                assert_eq!(self.values[g], from, "{action:?}");
                assert!(self.scenario.groups[g].parameters > 0, "{action:?}");
                if let Some(to_come) = &self.to_come {
                    assert!(to_come[g] > 0, "{action:?} for no backward");
                }
                self.values[g] = Values::Gathering;
                let whole =
                    |values: &&Values| matches!(values, Values::Gathering | Values::Gathered);
                let held = self.values.iter().filter(whole).count();
                assert!(held <= self.limit, "{held} groups are gathered, expected {}", self.limit);
            }
            WaitGather(g) => {
                assert_eq!(self.values[g], Values::Gathering, "{action:?}");
                self.values[g] = Values::Gathered;
            }
            KeepPart(g) => {
                assert_eq!(self.values[g], Values::Gathered, "{action:?}");
                assert_eq!(self.scenario.groups[g].reshard_after_forward, Reshard::Ranks(2));
                self.values[g] = Values::Part;
            }
            Free(g) => {
                assert!(matches!(self.values[g], Values::Gathered | Values::Part), "{action:?}");
                self.values[g] = Values::Freed;
            }
            CompleteUnused(g) => {
                for p in 0..self.uses[g].len() {
                    self.ready_if_complete(g, p);
                }
            }
            Reduce(g) => {
                expect(self.grads[g], Grads::Local);
                assert!(self.uses[g].iter().all(|uses| uses.ready), "{action:?}: not complete");
                assert!(!self.grads.contains(&Grads::Reducing), "{action:?}: one at a time");
                assert_ne!(self.scope, ReduceScope::None);
                self.reductions[g] += 1;
                self.grads[g] = Grads::Reducing;
            }
            WaitReduction(g) => {
                expect(self.grads[g], Grads::Reducing);
                self.grads[g] = Grads::Scattered;
                self.arrived[g][1] += std::mem::take(&mut self.arrived[g][0]);
            }
            Replicate(g) => {
                expect(self.grads[g], Grads::Scattered);
                assert_eq!(self.scope, ReduceScope::All);
                self.grads[g] = Grads::Replicating;
            }
            WaitReplication(g) => {
                expect(self.grads[g], Grads::Replicating);
                self.grads[g] = Grads::Replicated;
            }
            Deliver => {
                for (g, grads) in self.grads.iter().enumerate() {
                    if *grads == Grads::Replicated {
                        self.arrived[g][2] += std::mem::take(&mut self.arrived[g][1]);
                    }
                }
            }
        }
    }

    fn ready_if_complete(&mut self, group: usize, parameter: usize) {
        let uses = &self.uses[group][parameter];
        if uses.pending == 0 && !uses.pending_tensor && !uses.ready {
            self.ready(group, parameter);
        }
    }

    fn ready(&mut self, group: usize, parameter: usize) {
        self.uses[group][parameter].ready = true;
        self.on(Event::GradientReady { group });
    }

    fn begin_uses(&mut self, group: usize, parameter: usize, count: usize) {
        if self.scenario.is_plain_tensor(group, parameter) {
            self.uses[group][parameter].pending_tensor |= count > 0;
        } else {
            self.uses[group][parameter].pending += count;
        }
    }

    fn gradient_arrives(&mut self, group: usize, parameter: usize) {
        assert!(self.schedule.accepts_gradients(group), "a gradient after its reduction");
        self.arrived[group][0] += 1;
        self.arrived[group][3] += 1;
        let uses = &mut self.uses[group][parameter];
        let counted = if self.scenario.is_plain_tensor(group, parameter) {
            std::mem::take(&mut uses.pending_tensor)
        } else {
            // A gradient's computation needs the value.
            assert_eq!(self.values[group], Values::Gathered);
            let counted = uses.pending > 0;
            uses.pending = uses.pending.saturating_sub(1);
            counted
        };
        if counted {
            self.ready_if_complete(group, parameter);
        }
    }

    fn root_is_gathered(&self) -> usize {
        usize::from(self.scenario.groups[self.scenario.root()].parameters > 0)
    }

    fn forward(&mut self, route: &[usize], records_graph: bool) -> Vec<Call> {
        let mut graph: Vec<Call> = Vec::new();
        let mut tracked = self.scenario.tracked_input;
        for &unit in route {
            let group = unit % self.scenario.root();
            let trainable = self.scenario.groups[group].trainable > 0;
            let first = trainable && !tracked;
            tracked |= trainable;
            self.calls += 1;
            let call = Call { group, id: self.calls, first, tracked };
            let kept = self.kept.iter().filter(|&&kept| kept != group).count();
            self.limit = self.root_is_gathered() + self.scenario.ahead() + 1 + kept;
            self.on(Event::PreForward { group, records_graph });
            self.check_gathered(group);
            if records_graph {
                for parameter in 0..self.scenario.groups[group].trainable {
                    let count = self.scenario.uses(self.rank, &call, parameter);
                    self.begin_uses(group, parameter, count);
                }
                graph.push(call);
            }
            self.on(Event::PostForward { group });
            if self.scenario.groups[group].reshard_after_forward == Reshard::Never {
                self.kept.insert(group);
            }
        }
        graph
    }

    fn check_gathered(&self, group: usize) {
        for group in [group, self.scenario.root()] {
            let expected = self.scenario.groups[group].parameters > 0;
            assert_eq!(self.values[group] == Values::Gathered, expected, "group {group}");
        }
    }

    /// Runs the backwards of these calls in reverse, and the root's uses. The gradients that come
    /// with each call are rank-specific.
    fn backward(&mut self, graph: &[Call], reduce: ReduceScope) {
        let scenario = self.scenario;
        self.scope = reduce;
        self.on(Event::BeginBackward { reduce });
        let calls: Vec<&Call> = graph.iter().rev().filter(|call| call.tracked).collect();
        // Assigns gradients to the call after whose backward start they come.
        let mut slots: Vec<Vec<(usize, usize)>> = vec![Vec::new(); calls.len().max(1)];
        let last_slot = slots.len() - 1;
        let slot = |at: usize, call: &Call, of: &[usize]| {
            if !scenario.late_gradients {
                return at;
            }
            let latest = draw(scenario.seed, &[2, call.id]) % 3;
            let late = if of.is_empty() { latest } else { draw(scenario.seed, of) % (latest + 1) };
            (at + late).min(last_slot)
        };
        for (at, call) in calls.iter().enumerate() {
            for p in 0..scenario.groups[call.group].trainable {
                let tensor = scenario.is_plain_tensor(call.group, p);
                let later = calls[at + 1..].iter().any(|later| {
                    later.group == call.group && scenario.uses(self.rank, later, p) > 0
                });
                let uses = scenario.uses(self.rank, call, p);
                for use_ in 0..if tensor { uses.min(usize::from(!later)) } else { uses } {
                    let of = [2, self.rank, call.id, p, use_];
                    let at = slot(at, call, if p == 0 { &[] } else { &of });
                    slots[at].push((call.group, p));
                }
            }
        }
        // The root's uses have no call: their gradients come at any time.
        let root = scenario.root();
        for p in 0..scenario.groups[root].trainable {
            let id = graph.first().map_or(0, |call| call.id);
            if draw(scenario.seed, &[3, self.rank, id, p]).is_multiple_of(2) {
                let at = draw(scenario.seed, &[4, self.rank, id, p]) % slots.len();
                slots[at].push((root, p));
            }
        }
        let last_event = |group: usize| {
            if graph.iter().any(|call| call.group == group && !call.tracked) {
                return Some(last_slot); // a backward is expected that never begins
            }
            let begins = calls.iter().rposition(|call| call.group == group);
            let arrives = slots.iter().rposition(|slot| slot.iter().any(|(g, _)| *g == group));
            begins.max(arrives)
        };
        let last_event: Vec<Option<usize>> = (0..root).map(last_event).collect();
        let count = |group| graph.iter().filter(|call| call.group == group).count();
        self.to_come = self.exact.then(|| (0..root).map(count).collect());
        let mut begun = BTreeSet::new();
        for (at, slot) in slots.iter().enumerate() {
            if let Some(call) = calls.get(at) {
                begun.insert(call.group);
                self.kept.remove(&call.group);
                let held =
                    begun.iter().filter(|&&g| !self.exact || last_event[g] >= Some(at)).count();
                self.limit = self.root_is_gathered() + scenario.ahead() + held + self.kept.len();
                self.on(Event::PreBackward { group: call.group });
                self.check_gathered(call.group);
                self.to_come.iter_mut().for_each(|to_come| to_come[call.group] -= 1);
            }
            let mut slot = slot.clone();
            slot.sort_by_key(|&(g, p)| draw(scenario.seed, &[5, self.rank, at, g, p]));
            for (group, p) in slot {
                self.gradient_arrives(group, p);
            }
        }
        self.to_come = None;
        self.finish_backward();
    }

    fn finish_backward(&mut self) {
        for group in 0..self.uses.len() {
            for p in 0..self.uses[group].len() {
                if !self.uses[group][p].ready {
                    self.ready(group, p);
                }
            }
        }
        let delivered = self.collectives.iter().filter(|&&a| a == Action::Deliver).count();
        self.on(Event::FinishBackward);
        let trainable: Vec<bool> = self.scenario.groups.iter().map(|g| g.trainable > 0).collect();
        let reduces = self.scope != ReduceScope::None;
        for (g, &trainable) in trainable.iter().enumerate() {
            let times = usize::from(reduces && trainable);
            assert_eq!(self.reductions[g], times, "group {g} was reduced so often");
            let end = match self.scope {
                _ if !trainable => Grads::Local,
                ReduceScope::None => Grads::Local,
                ReduceScope::Shards => Grads::Scattered,
                ReduceScope::All => Grads::Replicated,
            };
            assert_eq!(self.grads[g], end, "group {g}");
            let expected = g == self.scenario.root() && self.scenario.groups[g].parameters > 0;
            assert_eq!(self.values[g] != Values::Freed, expected, "group {g} after backward");
        }
        let delivers = self.scope == ReduceScope::All && trainable.contains(&true);
        let delivered =
            self.collectives.iter().filter(|&&a| a == Action::Deliver).count() - delivered;
        assert_eq!(delivered, usize::from(delivers));
        self.grads.fill(Grads::Local);
        self.reductions.fill(0);
        self.uses.iter_mut().flatten().for_each(|uses| *uses = Uses::default());
        self.kept.clear();
    }

    fn step(&mut self, step: usize, parts: &[Part]) {
        for (i, part) in parts.iter().enumerate() {
            let last = i + 1 == parts.len();
            let synchronises = |backward: usize| {
                draw(self.scenario.seed, &[6, step, i, backward]).is_multiple_of(2)
            };
            let unsynchronised = self.scenario.unsynchronised;
            let scope = |backward: usize, last: bool| {
                if last || synchronises(backward) { ReduceScope::All } else { unsynchronised }
            };
            let scopes = [scope(0, false), scope(1, false), scope(2, false), scope(0, last)];
            match part {
                Part::Plain(route) => {
                    let graph = self.forward(route, true);
                    self.backward(&graph, scopes[3]);
                }
                Part::Joined(a, b) => {
                    let graph = [self.forward(a, true), self.forward(b, true)].concat();
                    self.backward(&graph, scopes[0]);
                }
                Part::ForwardsFirst(routes, reverse, further) => {
                    self.exact = false;
                    let mut graphs: Vec<_> =
                        routes.iter().map(|route| self.forward(route, true)).collect();
                    if *reverse {
                        graphs.reverse();
                    }
                    self.backward(&graphs[0], scopes[0]);
                    graphs.push(self.forward(further, true));
                    for (graph, scope) in graphs[1..].iter().zip(scopes) {
                        self.backward(graph, scope);
                    }
                }
                Part::Twice(route) => {
                    let graph = self.forward(route, true);
                    self.backward(&graph, scopes[0]);
                    self.exact = false;
                    self.backward(&graph, scopes[1]);
                }
                Part::Discarded(route) => {
                    self.exact = false;
                    self.forward(route, true);
                }
                Part::NoGrad(route) => {
                    self.forward(route, false);
                }
            }
        }
        for [unsharded, scattered, delivered, made] in std::mem::take(&mut self.arrived) {
            assert_eq!([unsharded, scattered, delivered], [0, 0, made], "gradients of a step");
        }
        self.arrived = vec![[0; 4]; self.scenario.groups.len()];
        self.on(Event::FinishStep);
        self.exact = true;
    }

    /// Runs the whole scenario. Returns the rank's communication.
    fn run(mut self) -> Vec<Action> {
        self.limit = 1;
        self.on(Event::PrepareForward);
        for (i, step) in self.scenario.steps.iter().enumerate() {
            self.step(i, step);
            self.limit = 1;
            self.on(Event::PrepareForward);
            self.kept.clear();
        }
        self.collectives
    }
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let reshard = prop_oneof![
        3 => Just(Reshard::Always),
        1 => Just(Reshard::Never),
        1 => Just(Reshard::Ranks(2)),
    ];
    let group =
        (0..3usize, 0..3usize, reshard).prop_map(|(trainable, frozen, reshard_after_forward)| {
            Group { parameters: trainable + frozen, trainable, reshard_after_forward }
        });
    let groups = prop::collection::vec(group, 2..7).prop_map(|mut groups| {
        let last = groups.len() - 1;
        groups[last].reshard_after_forward = Reshard::Never;
        groups
    });
    // Numbers are taken modulo the number of units; most forwards call the units in order.
    let route = prop_oneof![
        3 => (1..7usize).prop_map(|n| (0..n).collect::<Vec<_>>()),
        1 => prop::collection::vec(0..6usize, 1..8),
    ];
    let part = prop_oneof![
        4 => route.clone().prop_map(Part::Plain),
        1 => (route.clone(), route.clone()).prop_map(|(a, b)| Part::Joined(a, b)),
        1 => (prop::collection::vec(route.clone(), 2..4), any::<bool>(), route.clone())
            .prop_map(|(routes, reverse, further)| Part::ForwardsFirst(routes, reverse, further)),
        1 => route.clone().prop_map(Part::Twice),
        1 => route.clone().prop_map(Part::Discarded),
        1 => route.clone().prop_map(Part::NoGrad),
    ];
    let step = (prop::collection::vec(part, 0..4), route).prop_map(|(mut parts, route)| {
        parts.push(Part::Plain(route));
        parts
    });
    let scopes =
        prop_oneof![Just(ReduceScope::None), Just(ReduceScope::Shards), Just(ReduceScope::All)];
    let prefetch =
        (0..4usize, 0..4usize).prop_map(|(forward, backward)| Prefetch { forward, backward });
    let list = || prop::collection::vec(0..6usize, 0..3);
    let lists = (0..6usize, list(), list()).prop_map(|(unit, f, b)| (unit, [f, b]));
    let lists = prop_oneof![Just(Vec::new()), prop::collection::vec(lists, 1..4)];
    (
        groups,
        (prefetch, lists),
        scopes,
        any::<bool>(),
        any::<bool>(),
        prop::collection::vec(step, 1..4),
        any::<u64>(),
    )
        .prop_map(
            |(
                groups,
                (prefetch, lists),
                unsynchronised,
                tracked_input,
                late_gradients,
                steps,
                seed,
            )| {
                Scenario {
                    groups,
                    prefetch,
                    lists,
                    unsynchronised,
                    tracked_input,
                    late_gradients,
                    steps,
                    seed,
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Each rank's driver checks its actions; the test checks that all ranks communicate alike.
    #[test]
    fn ranks_with_different_parameters_agree(scenario in scenario()) {
        let runs: Vec<Vec<Action>> =
            (0..RANKS).map(|rank| Rank::new(&scenario, rank).run()).collect();
        for run in &runs[1..] {
            prop_assert_eq!(run, &runs[0]);
        }
    }
}

/// Two units and the root.
fn groups() -> [Group; 3] {
    let group =
        |reshard_after_forward| Group { parameters: 2, trainable: 2, reshard_after_forward };
    [group(Reshard::Always), group(Reshard::Ranks(2)), group(Reshard::Never)]
}

fn any_event() -> impl Strategy<Value = Event> {
    let group = 0..3usize;
    prop_oneof![
        Just(Event::PrepareForward),
        (group.clone(), any::<bool>())
            .prop_map(|(group, records_graph)| Event::PreForward { group, records_graph }),
        group.clone().prop_map(|group| Event::PostForward { group }),
        prop_oneof![Just(ReduceScope::None), Just(ReduceScope::Shards), Just(ReduceScope::All)]
            .prop_map(|reduce| Event::BeginBackward { reduce }),
        group.clone().prop_map(|group| Event::PreBackward { group }),
        group.prop_map(|group| Event::GradientReady { group }),
        Just(Event::FinishBackward),
        Just(Event::FinishStep),
    ]
}

proptest! {
    /// Ranks fail at different points, and must communicate alike afterwards.
    #[test]
    fn an_abandoned_step_leaves_nothing_behind(
        before in prop::collection::vec(any_event(), 0..40), after in prop::collection::vec(any_event(), 0..40)
    ) {
        let (mut schedule, mut fresh) =
            (Schedule::new(&groups(), 1.into()), Schedule::new(&groups(), 1.into()));
        let mut gathered = BTreeSet::new();
        for event in before {
            for action in schedule.on(event) {
                match action {
                    Action::Gather(group) | Action::GatherParts(group) => _ = gathered.insert(group),
                    Action::Free(group) => _ = gathered.remove(&group),
                    // The part is freed too.
                    _ => {}
                }
            }
        }
        let freed: BTreeSet<usize> = schedule
            .on(Event::Abandon)
            .into_iter()
            .map(|action| match action {
                Action::Free(group) => group,
                action => panic!("{action:?} needs the other ranks"),
            })
            .collect();
        prop_assert_eq!(freed, gathered);
        for event in after {
            prop_assert_eq!(schedule.on(event), fresh.on(event));
        }
    }
}

/// The actions of a chain of units in a step, once the forward order is known.
#[test]
fn units_are_gathered_ahead_and_reduced_early() {
    let group = Group { parameters: 1, trainable: 1, reshard_after_forward: Reshard::Always };
    let mut schedule = Schedule::new(&[group; 4], 1.into());
    schedule.on(Event::PrepareForward);
    let mut actions = Vec::new();
    for _ in 0..2 {
        actions.clear();
        for group in 0..3 {
            actions.extend(schedule.on(Event::PreForward { group, records_graph: true }));
            actions.extend(schedule.on(Event::PostForward { group }));
        }
        schedule.on(Event::BeginBackward { reduce: ReduceScope::All });
        for group in (0..3).rev() {
            actions.extend(schedule.on(Event::PreBackward { group }));
            actions.extend(schedule.on(Event::GradientReady { group }));
        }
        actions.extend(schedule.on(Event::GradientReady { group: 3 }));
        actions.extend(schedule.on(Event::FinishBackward));
    }
    actions.retain(|action| !matches!(action, Action::CompleteUnused(_)));
    let text: Vec<String> = actions.iter().map(|action| format!("{action:?}")).collect();
    insta::assert_snapshot!(text.join(" "), @"Gather(0) WaitGather(0) Gather(1) Free(0) WaitGather(1) Gather(2) Free(1) WaitGather(2) Free(2) Gather(2) WaitGather(2) Gather(1) Reduce(2) Free(2) WaitGather(1) Gather(0) WaitReduction(2) Replicate(2) Reduce(1) Free(1) WaitGather(0) WaitReduction(1) Replicate(1) Reduce(0) WaitReduction(0) Replicate(0) Reduce(3) WaitReduction(3) Replicate(3) WaitReplication(0) WaitReplication(1) WaitReplication(2) WaitReplication(3) Deliver Free(0)");
}

/// A forward that differs from the last one leaves gathered units that it does not call. In
/// backward they make room for the called units.
#[test]
fn skipped_units_are_freed_in_backward() {
    let group = Group { parameters: 1, trainable: 1, reshard_after_forward: Reshard::Always };
    let mut schedule = Schedule::new(&[group; 5], 1.into());
    let forward = |schedule: &mut Schedule, route: &[usize]| -> Vec<Action> {
        let call = |&group| {
            let mut actions = schedule.on(Event::PreForward { group, records_graph: true });
            actions.extend(schedule.on(Event::PostForward { group }));
            actions
        };
        route.iter().flat_map(call).collect()
    };
    forward(&mut schedule, &[0, 1, 2, 3]);
    schedule.on(Event::FinishBackward);
    schedule.on(Event::FinishStep);
    let actions = forward(&mut schedule, &[0, 2, 3]);
    assert!(actions.contains(&Action::Gather(1)) && !actions.contains(&Action::WaitGather(1)));
    assert_eq!(
        schedule.on(Event::PreBackward { group: 3 }),
        [
            Action::WaitGather(1),
            Action::Free(1),
            Action::Gather(3),
            Action::WaitGather(3),
            Action::Gather(2),
            Action::CompleteUnused(3)
        ]
    );
}
