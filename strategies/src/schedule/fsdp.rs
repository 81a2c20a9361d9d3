//! FSDP's schedule: when groups of parameters are gathered and freed, and their gradients reduced.
//!
//! A *group* is what is gathered and reduced as one: the parameters of a unit, or, in the last group,
//! the *root*, those of no unit. The [`Schedule`] is told [`Event`]s and answers with [`Action`]s.
//!
//! ```
//! use fulgurite_strategies::schedule::fsdp::{Action, Event, Group, ReduceScope, Schedule};
//!
//! let group = Group { parameters: 2, trainable: 1, reshard_after_forward: true };
//! let mut schedule = Schedule::new(&[group, group], 1); // one unit (0) and the root (1)
//! assert_eq!(schedule.on(Event::PrepareForward), [Action::Gather(1), Action::WaitGather(1)]);
//!
//! let forward = schedule.on(Event::PreForward { group: 0, records_graph: true });
//! assert_eq!(forward, [Action::Gather(0), Action::WaitGather(0)]);
//! assert_eq!(schedule.on(Event::PostForward { group: 0 }), [Action::Free(0)]);
//!
//! schedule.on(Event::BeginBackward { reduce: ReduceScope::All });
//! let backward = schedule.on(Event::PreBackward { group: 0 });
//! assert_eq!(backward, [Action::Gather(0), Action::WaitGather(0), Action::CompleteUnused(0)]);
//! assert_eq!(schedule.on(Event::GradientReady { group: 0 }), [Action::Reduce(0)]);
//! schedule.on(Event::GradientReady { group: 1 }); // the root is reduced last
//! let end = schedule.on(Event::FinishBackward);
//! assert_eq!(end[..3], [Action::WaitReduction(0), Action::Replicate(0), Action::Reduce(1)]);
//! ```
//!
//! # States of a group's parameters
//!
//! "Expected" is a group whose backward may still begin in this backward pass, for the first time or
//! again: it has more recorded forward calls than backwards that began.
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | sharded | its forward begins | unsharded | gather, wait |
//! | sharded | its backward begins | in backward | gather, wait |
//! | sharded | a group that it follows (in forward) or precedes (in backward, and it is expected) begins | prefetched | gather |
//! | prefetched | its forward or backward begins | unsharded, in backward | wait |
//! | prefetched | another group's backward begins, and it is not expected | sharded | wait, free |
//! | unsharded | its forward ends, and it is freed after forward | sharded | free |
//! | unsharded | its forward ends otherwise | unsharded | |
//! | unsharded | its backward begins | in backward | |
//! | in backward | its gradients are complete (or it is frozen), and it is not expected | backward over | |
//! | backward over | its backward begins again | in backward | |
//! | backward over | another group's backward begins | sharded | free |
//! | any but the root's | the backward pass ends | sharded | (wait) free |
//! | any | parameters have new values | sharded; the root unsharded | (wait) free; the root: gather, wait |
//!
//! Values are kept in *backward over* because operations behind frozen layers may still read them.
//!
//! # States of a group's gradients, in one backward pass
//!
//! | state | event | next state | actions |
//! |---|---|---|---|
//! | accumulating | all trainable parameters' gradients are ready | complete | |
//! | complete | it is the first in the reduction queue and not expected, or the backward pass ends | reducing | reduce |
//! | reducing | the next group is reduced, or the backward pass ends | replicating, or scattered | wait; replicate |
//! | scattered, replicating | the backward pass ends | accumulating | wait; deliver |
//!
//! Without reduction ([`ReduceScope::None`]) gradients stay complete until the backward pass ends, and
//! the next one adds to them.
//!
//! # What ranks do alike
//!
//! Ranks must start the same collectives in the same order, and they run the same units. They need not
//! use the same parameters in them, so gradients become ready in an order that differs between ranks.
//! What starts a collective therefore follows from events that ranks have in common:
//!
//! - A gather follows from the forwards and backwards that began. When a group is freed may differ
//!   between ranks, for it waits for gradients; but only groups that are not expected are freed during
//!   backward, and no rank gathers those again.
//! - Groups are reduced in the order in which their backwards began, each once it is complete and not
//!   expected and those before it are: a rank that uses a unit's parameters in one of two calls has
//!   their gradients before other ranks do. What is not in that queue (the root, whose gradients come
//!   from anywhere in the graph) is reduced when the backward pass ends, in index order.
//! - Both hold as long as the uses of parameters are counted exactly: the backward that is running is
//!   that of the forwards since the last one. If a backward of the step left forwards behind, or more
//!   backwards began than forwards were called, whatever is gathered stays until the backward pass ends
//!   and whatever is not reduced waits until then.
//!
//! # How much is gathered
//!
//! At most: the root; the group whose forward or backward runs; [`prefetch`](Schedule::new) groups ahead
//! of it; groups whose forward has run and that are not freed after forward; groups whose backward has
//! begun and is not over (a frozen one that was also called where nothing below it is trainable: to the
//! end of the backward pass); groups whose backward is over, until the next one begins. In backward
//! through a chain of units: the root, the current one, those ahead, and one that was kept.

use std::collections::VecDeque;

/// A group of parameters, as the schedule knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Number of parameters. A group of none is never gathered.
    pub parameters: usize,
    /// How many of them get gradients. A group of which none does is frozen.
    pub trainable: usize,
    /// Whether the parameters are freed between forward and backward.
    pub reshard_after_forward: bool,
}

/// Over which ranks a backward reduces gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReduceScope {
    /// No ranks: unsharded gradients are kept, and the next backward adds to them.
    None,
    /// The ranks that share the parameters. This rank's part of the sum is kept, and the next backward's
    /// is added to it.
    Shards,
    /// The ranks that share the parameters, then the replicas: the gradients are the step's.
    #[default]
    All,
}

/// An event for a [`Schedule`]. Groups are indices into the list that it was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The parameters have new values (at first, after a step, after loading).
    PrepareForward,
    /// A unit is about to compute.
    PreForward {
        /// The unit's group.
        group: usize,
        /// Whether a graph is recorded, so that a backward is to be expected.
        records_graph: bool,
    },
    /// A unit has computed.
    PostForward {
        /// The unit's group.
        group: usize,
    },
    /// From here on, backwards have gradients for so many of a group's parameters, because others are paused.
    /// Comes between backwards.
    Expect {
        /// The group.
        group: usize,
        /// [`Group::trainable`].
        trainable: usize,
    },
    /// A backward pass, of a whole loss, begins.
    BeginBackward {
        /// Over which ranks its gradients are reduced.
        reduce: ReduceScope,
    },
    /// A unit's backward begins.
    PreBackward {
        /// The unit's group.
        group: usize,
    },
    /// The gradient of one more of a group's trainable parameters is complete. Comes once in a
    /// backward pass for each of them, at the latest before [`FinishBackward`](Event::FinishBackward).
    GradientReady {
        /// The parameter's group.
        group: usize,
    },
    /// The backward pass has gone through the graph.
    FinishBackward,
    /// The optimizer has stepped: forwards that had no backward will have none.
    FinishStep,
}

/// An action for the driver of a [`Schedule`], which performs them in the order given. The number is the
/// group's index. The machine assumes that every action succeeds; a driver that fails at one cannot go
/// on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start gathering the parameters. Collective over the ranks that share them.
    Gather(usize),
    /// Wait for the parameters' values.
    WaitGather(usize),
    /// Free the gathered values; this rank's shard stays.
    Free(usize),
    /// Report ([`Event::GradientReady`]) the trainable parameters without pending uses: those that this
    /// rank's forward did not use.
    CompleteUnused(usize),
    /// Start reduce-scattering the gradients; later ones go to other memory. Collective over the ranks
    /// that share the parameters.
    Reduce(usize),
    /// Wait for the reduce-scatter, and add what earlier backwards scattered and did not replicate.
    WaitReduction(usize),
    /// Start all-reducing the scattered gradients over the replicas. Collective over those.
    Replicate(usize),
    /// Wait for the replicas.
    WaitReplication(usize),
    /// Add the gradients of all groups that were replicated to the step's. Collective over the
    /// tensor-parallel ranks.
    Deliver,
}

/// Where a group's parameters are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Parameters {
    /// Each rank has its shard.
    #[default]
    Sharded,
    /// Gathered ahead; nothing has waited for them yet.
    Prefetched,
    /// Gathered for a forward, or kept from it.
    Unsharded,
    /// Gathered, and the group's backward has begun.
    InBackward,
    /// Gathered, and kept until another group's backward begins.
    BackwardOver,
}

/// How far a group's gradients of the backward pass are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gradients {
    /// Those of `ready` trainable parameters are ready, which is not all.
    Accumulating { ready: usize },
    /// All are ready.
    Complete,
    /// The reduce-scatter is under way.
    Reducing,
    /// The reduce-scatter is done, and the replicas wait for a later backward.
    Scattered,
    /// The all-reduce over the replicas is under way.
    Replicating,
}

/// One group's state.
#[derive(Debug, Clone)]
struct GroupState {
    group: Group,
    parameters: Parameters,
    gradients: Gradients,
    /// Calls in the forwards since the last backward pass that recorded a graph.
    forward_calls: usize,
    /// Backwards that began in the backward pass.
    backward_calls: usize,
}

impl GroupState {
    fn is_frozen(&self) -> bool {
        self.group.trainable == 0
    }

    /// Whether all gradients are ready, or there are none.
    fn is_complete(&self) -> bool {
        self.is_frozen() || !matches!(self.gradients, Gradients::Accumulating { .. })
    }
}

/// The state machine. See the [module](self) for its states.
#[derive(Debug, Clone)]
pub struct Schedule {
    groups: Vec<GroupState>,
    prefetch: usize,
    reduce: ReduceScope,
    /// Groups in the order of the calls that recorded a graph, in the forwards before the last backward
    /// pass.
    last_forward: Vec<usize>,
    /// Groups in the order of these calls since the last backward pass.
    forward: Vec<usize>,
    /// Groups whose backward has begun and whose reduction has not, in the order of their backwards.
    reduction_queue: VecDeque<usize>,
    /// The group whose reduce-scatter is under way.
    reducing: Option<usize>,
    /// Whether forward calls of this step were left without a backward, which a later one may bring.
    older_forwards: bool,
}

impl Schedule {
    /// A schedule for these groups, the last of which is the root. Up to `prefetch` groups are gathered
    /// ahead of the one that computes.
    ///
    /// # Panics
    /// Without a root.
    pub fn new(groups: &[Group], prefetch: usize) -> Self {
        assert!(!groups.is_empty(), "the last group is the root");
        let state = |&group: &Group| GroupState {
            group,
            parameters: Parameters::Sharded,
            gradients: Gradients::Accumulating { ready: 0 },
            forward_calls: 0,
            backward_calls: 0,
        };
        Self {
            groups: groups.iter().map(state).collect(),
            prefetch,
            reduce: ReduceScope::default(),
            last_forward: Vec::new(),
            forward: Vec::new(),
            reduction_queue: VecDeque::new(),
            reducing: None,
            older_forwards: false,
        }
    }

    /// Processes an event and returns the actions to perform.
    ///
    /// # Panics
    /// If the event's group is not one of those that the schedule was made of.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::PrepareForward => self.prepare_forward(&mut actions),
            Event::PreForward { group, records_graph } => {
                self.pre_forward(group, records_graph, &mut actions);
            }
            Event::PostForward { group } => {
                if self.groups[group].group.reshard_after_forward {
                    self.free(group, &mut actions);
                }
            }
            Event::Expect { group, trainable } => self.groups[group].group.trainable = trainable,
            Event::BeginBackward { reduce } => self.reduce = reduce,
            Event::PreBackward { group } => self.pre_backward(group, &mut actions),
            Event::GradientReady { group } => self.gradient_ready(group, &mut actions),
            Event::FinishBackward => self.finish_backward(&mut actions),
            Event::FinishStep => self.older_forwards = false,
        }
        actions
    }

    /// Whether gradients of this group can be accumulated now: not between the start of their reduction
    /// and the end of the backward pass.
    pub fn accepts_gradients(&self, group: usize) -> bool {
        let gradients = self.groups[group].gradients;
        matches!(gradients, Gradients::Accumulating { .. } | Gradients::Complete)
    }

    fn root(&self) -> usize {
        self.groups.len() - 1
    }

    /// Whether the backward pass is that of the forwards since the last one, so that uses of
    /// parameters are counted exactly. The same on all ranks, which run the same units.
    fn counts_exactly(&self) -> bool {
        let (forwards, backwards) = self.trainable_calls();
        !self.older_forwards && backwards <= forwards
    }

    /// Forward calls and backwards of groups that are not frozen. A frozen group's output may have no
    /// backward.
    fn trainable_calls(&self) -> (usize, usize) {
        let trainable = self.groups.iter().filter(|state| !state.is_frozen());
        trainable.fold((0, 0), |(forwards, backwards), state| {
            (forwards + state.forward_calls, backwards + state.backward_calls)
        })
    }

    /// Whether the group's backward may still begin in this backward pass, for the first time or
    /// again. The same on all ranks.
    fn is_expected(&self, group: usize) -> bool {
        let state = &self.groups[group];
        !self.counts_exactly() || state.backward_calls < state.forward_calls
    }

    fn prepare_forward(&mut self, actions: &mut Vec<Action>) {
        (0..self.groups.len()).for_each(|group| self.free(group, actions));
        self.unshard(self.root(), Parameters::Unsharded, actions);
    }

    fn pre_forward(&mut self, group: usize, records_graph: bool, actions: &mut Vec<Action>) {
        self.unshard(group, Parameters::Unsharded, actions);
        if !records_graph {
            return;
        }
        let call = self.forward.len();
        self.forward.push(group);
        self.groups[group].forward_calls += 1;
        if self.last_forward.get(call) == Some(&group) {
            let next: Vec<usize> =
                self.last_forward.iter().skip(call + 1).take(self.prefetch).copied().collect();
            next.into_iter().for_each(|group| self.gather_ahead(group, actions));
        }
    }

    fn pre_backward(&mut self, group: usize, actions: &mut Vec<Action>) {
        self.groups[group].backward_calls += 1;
        for other in (0..self.groups.len()).filter(|&other| other != group) {
            let needless = match self.groups[other].parameters {
                Parameters::BackwardOver => true,
                Parameters::Prefetched => !self.is_expected(other),
                _ => false,
            };
            if needless {
                self.free(other, actions);
            }
        }
        self.unshard(group, Parameters::InBackward, actions);
        self.end_backward_if_over(group);
        // Backward goes through the forward's calls in reverse, from the group's last one.
        let call = self.forward.iter().rposition(|&called| called == group).unwrap_or(0);
        let previous: Vec<usize> =
            self.forward[..call].iter().rev().take(self.prefetch).copied().collect();
        for group in previous {
            if self.is_expected(group) {
                self.gather_ahead(group, actions);
            }
        }
        if self.counts_exactly() && !self.groups[group].is_frozen() {
            if !self.groups[group].is_complete() && !self.reduction_queue.contains(&group) {
                self.reduction_queue.push_back(group);
            }
            self.reduce_in_order(actions);
            // A parameter that this rank's forward did not use must not delay the group's reduction:
            // other ranks may have used it, and wait.
            actions.push(Action::CompleteUnused(group));
        }
    }

    fn gradient_ready(&mut self, group: usize, actions: &mut Vec<Action>) {
        let state = &mut self.groups[group];
        let Gradients::Accumulating { ready } = &mut state.gradients else { return };
        *ready += 1;
        if *ready < state.group.trainable {
            return;
        }
        state.gradients = Gradients::Complete;
        self.reduce_in_order(actions);
        self.end_backward_if_over(group);
    }

    /// Reduces groups from the head of the queue, as long as they are complete and not expected.
    fn reduce_in_order(&mut self, actions: &mut Vec<Action>) {
        while let Some(&first) = self.reduction_queue.front()
            && self.reduce != ReduceScope::None
            && self.groups[first].is_complete()
            && !self.is_expected(first)
        {
            self.reduction_queue.pop_front();
            self.reduce(first, actions);
        }
    }

    fn finish_backward(&mut self, actions: &mut Vec<Action>) {
        let queue = std::mem::take(&mut self.reduction_queue);
        if self.reduce != ReduceScope::None {
            queue.into_iter().for_each(|group| self.reduce(group, actions));
            for group in 0..self.groups.len() {
                if !self.groups[group].is_frozen() && self.accepts_gradients(group) {
                    self.reduce(group, actions);
                }
            }
            self.finish_reduction(actions);
        }
        let replicating = |state: &&GroupState| state.gradients == Gradients::Replicating;
        if self.groups.iter().any(|state| replicating(&state)) {
            let groups = self.groups.iter().enumerate();
            let groups = groups.filter(|(_, state)| replicating(state));
            actions.extend(groups.map(|(group, _)| Action::WaitReplication(group)));
            actions.push(Action::Deliver);
        }
        for group in 0..self.root() {
            self.free(group, actions);
        }
        let (forwards, backwards) = self.trainable_calls();
        self.older_forwards |= forwards != backwards;
        for state in &mut self.groups {
            state.gradients = Gradients::Accumulating { ready: 0 };
            (state.forward_calls, state.backward_calls) = (0, 0);
        }
        if !self.forward.is_empty() {
            self.last_forward = std::mem::take(&mut self.forward);
        }
    }

    /// Gathers a group if it has no values, and sets its new state.
    fn unshard(&mut self, group: usize, to: Parameters, actions: &mut Vec<Action>) {
        let state = &mut self.groups[group];
        if state.group.parameters == 0 {
            return;
        }
        match std::mem::replace(&mut state.parameters, to) {
            Parameters::Sharded => {
                actions.extend([Action::Gather(group), Action::WaitGather(group)]);
            }
            Parameters::Prefetched => actions.push(Action::WaitGather(group)),
            Parameters::Unsharded | Parameters::InBackward | Parameters::BackwardOver => {}
        }
    }

    /// Starts gathering a group, unless the maximum is gathered ahead already: groups gathered ahead may
    /// not have been called yet, if this forward differs from the last.
    fn gather_ahead(&mut self, group: usize, actions: &mut Vec<Action>) {
        let prefetched = |state: &&GroupState| state.parameters == Parameters::Prefetched;
        let ahead = self.groups.iter().filter(prefetched).count();
        let state = &mut self.groups[group];
        let sharded = state.parameters == Parameters::Sharded && state.group.parameters > 0;
        if sharded && ahead < self.prefetch {
            state.parameters = Parameters::Prefetched;
            actions.push(Action::Gather(group));
        }
    }

    fn free(&mut self, group: usize, actions: &mut Vec<Action>) {
        match std::mem::take(&mut self.groups[group].parameters) {
            Parameters::Sharded => {}
            Parameters::Prefetched => {
                actions.extend([Action::WaitGather(group), Action::Free(group)]);
            }
            Parameters::Unsharded | Parameters::InBackward | Parameters::BackwardOver => {
                actions.push(Action::Free(group));
            }
        }
    }

    /// Marks a group's backward as over, if its gradients are complete and it is not expected.
    fn end_backward_if_over(&mut self, group: usize) {
        let over = self.groups[group].is_complete() && !self.is_expected(group);
        let state = &mut self.groups[group];
        if over && state.parameters == Parameters::InBackward {
            state.parameters = Parameters::BackwardOver;
        }
    }

    /// Starts a group's reduction, after waiting for the previous one: at most one group's unsharded
    /// gradients are held besides those being accumulated.
    fn reduce(&mut self, group: usize, actions: &mut Vec<Action>) {
        self.finish_reduction(actions);
        self.groups[group].gradients = Gradients::Reducing;
        self.reducing = Some(group);
        actions.push(Action::Reduce(group));
    }

    fn finish_reduction(&mut self, actions: &mut Vec<Action>) {
        let Some(group) = self.reducing.take() else { return };
        actions.push(Action::WaitReduction(group));
        self.groups[group].gradients = if self.reduce == ReduceScope::All {
            actions.push(Action::Replicate(group));
            Gradients::Replicating
        } else {
            Gradients::Scattered
        };
    }
}
