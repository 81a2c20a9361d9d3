//! The state machine.

use std::collections::VecDeque;

use fulgurite_engine::module::Reshard;

use super::{Action, Event, Group, Prefetch, ReduceScope};

/// Location of a group's parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Parameters {
    /// Each rank has its shard.
    #[default]
    Sharded,
    /// Gathered ahead; nothing has waited for them yet.
    Prefetched,
    /// A part was kept from forward.
    Part,
    /// Gathered for a forward, or kept from it.
    Unsharded,
    /// Gathered, and the group's backward has begun.
    InBackward,
    /// Gathered, and kept until another group's backward begins.
    BackwardOver,
}

/// Progress of a group's gradients in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gradients {
    /// Gradients of `ready` trainable parameters are ready, but not all.
    Accumulating { ready: usize },
    /// All are ready.
    Complete,
    /// The reduce-scatter is under way.
    Reducing,
    /// The reduce-scatter is done; the all-reduce over the replicas waits for a later backward.
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
    /// Calls in forwards since the last backward pass that recorded a graph.
    forward_calls: usize,
    /// Backwards begun in this backward pass.
    backward_calls: usize,
    /// Groups to gather when its forward or its backward begins, instead of the next ones.
    prefetch: [Vec<usize>; 2],
}

impl GroupState {
    fn is_frozen(&self) -> bool {
        self.group.trainable == 0
    }

    /// Whether all gradients are ready. True for a frozen group.
    fn is_complete(&self) -> bool {
        self.is_frozen() || !matches!(self.gradients, Gradients::Accumulating { .. })
    }
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Schedule {
    groups: Vec<GroupState>,
    prefetch: Prefetch,
    /// Whether a backward pass has begun and not ended.
    in_backward: bool,
    reduce: ReduceScope,
    /// Groups in the order of graph-recording calls, in the forwards before the last backward pass.
    last_forward: Vec<usize>,
    /// Groups in the order of graph-recording calls since the last backward pass.
    forward: Vec<usize>,
    /// Groups whose backward has begun and whose reduction has not, in the order of their
    /// backwards.
    reduction_queue: VecDeque<usize>,
    /// The group whose reduce-scatter is under way.
    reducing: Option<usize>,
    /// Whether forward calls of this step still lack a backward, which a later pass may bring.
    older_forwards: bool,
}

impl Schedule {
    /// Creates a schedule for these groups. The last group is the root, which is kept after forward
    /// ([`Reshard::Never`]).
    ///
    /// # Panics
    /// Without a root.
    pub fn new(groups: &[Group], prefetch: Prefetch) -> Self {
        assert!(!groups.is_empty(), "the last group is the root");
        let state = |&group: &Group| GroupState {
            group,
            parameters: Parameters::Sharded,
            gradients: Gradients::Accumulating { ready: 0 },
            forward_calls: 0,
            backward_calls: 0,
            prefetch: Default::default(),
        };
        Self {
            groups: groups.iter().map(state).collect(),
            prefetch,
            in_backward: false,
            reduce: ReduceScope::default(),
            last_forward: Vec::new(),
            forward: Vec::new(),
            reduction_queue: VecDeque::new(),
            reducing: None,
            older_forwards: false,
        }
    }

    /// Sets the groups to gather when a group's forward begins, instead of the next ones; an empty
    /// list restores the next ones. Gathers all listed groups, regardless of [`Prefetch`].
    pub fn set_forward_prefetch(&mut self, group: usize, groups: Vec<usize>) {
        self.groups[group].prefetch[0] = groups;
    }

    /// Sets the groups to gather, if expected, when a group's backward begins, instead of the
    /// preceding ones; an empty list restores the preceding ones. Gathers all of them, regardless
    /// of [`Prefetch`].
    pub fn set_backward_prefetch(&mut self, group: usize, groups: Vec<usize>) {
        self.groups[group].prefetch[1] = groups;
    }

    /// Processes an event and returns the actions to perform.
    ///
    /// # Panics
    /// If the event's group is not in the schedule.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::PrepareForward => self.prepare_forward(&mut actions),
            Event::PreForward { group, records_graph } => {
                self.pre_forward(group, records_graph, &mut actions);
            }
            Event::PostForward { group } => match self.groups[group].group.reshard_after_forward {
                Reshard::Always => self.free(group, &mut actions),
                Reshard::Ranks(_) => self.keep_part(group, &mut actions),
                Reshard::Never => {}
            },
            Event::Expect { group, trainable } => self.groups[group].group.trainable = trainable,
            Event::BeginBackward { reduce } => (self.reduce, self.in_backward) = (reduce, true),
            Event::PreBackward { group } => self.pre_backward(group, &mut actions),
            Event::GradientReady { group } => self.gradient_ready(group, &mut actions),
            Event::FinishBackward => self.finish_backward(&mut actions),
            Event::FinishStep => self.older_forwards = false,
            Event::Abandon => self.abandon(&mut actions),
        }
        actions
    }

    /// Whether gradients of this group can be accumulated now: not between the start of their
    /// reduction and the end of the backward pass.
    pub fn accepts_gradients(&self, group: usize) -> bool {
        let gradients = self.groups[group].gradients;
        matches!(gradients, Gradients::Accumulating { .. } | Gradients::Complete)
    }

    fn root(&self) -> usize {
        self.groups.len() - 1
    }

    /// Whether the backward pass belongs to the forwards since the last pass, so that uses of
    /// parameters are counted exactly. Equal on all ranks, which run the same units.
    fn counts_exactly(&self) -> bool {
        let (forwards, backwards) = self.trainable_calls();
        !self.older_forwards && backwards <= forwards
    }

    /// Forward calls and backwards of groups that are not frozen. The output of a frozen group may
    /// lack a backward.
    fn trainable_calls(&self) -> (usize, usize) {
        let trainable = self.groups.iter().filter(|state| !state.is_frozen());
        trainable.fold((0, 0), |(forwards, backwards), state| {
            (forwards + state.forward_calls, backwards + state.backward_calls)
        })
    }

    /// Whether the group's backward may still begin in this backward pass, for the first time or
    /// again. Equal on all ranks.
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
        let listed = self.groups[group].prefetch[0].clone();
        // During backward, recomputed units may find a group freed on some ranks only.
        if !self.in_backward {
            listed.iter().for_each(|&group| self.gather_ahead(group, usize::MAX, actions));
        }
        if !records_graph {
            return;
        }
        let call = self.forward.len();
        self.forward.push(group);
        self.groups[group].forward_calls += 1;
        if listed.is_empty() && self.last_forward.get(call) == Some(&group) {
            let most = self.prefetch.forward;
            let next: Vec<usize> =
                self.last_forward.iter().skip(call + 1).take(most).copied().collect();
            next.into_iter().for_each(|group| self.gather_ahead(group, most, actions));
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
        // Backward visits the forward's calls in reverse, starting at the group's last call.
        let listed = &self.groups[group].prefetch[1];
        let (previous, most): (Vec<usize>, usize) = if listed.is_empty() {
            let call = self.forward.iter().rposition(|&called| called == group).unwrap_or(0);
            let most = self.prefetch.backward;
            (self.forward[..call].iter().rev().take(most).copied().collect(), most)
        } else {
            (listed.clone(), usize::MAX)
        };
        for group in previous {
            if self.is_expected(group) {
                self.gather_ahead(group, most, actions);
            }
        }
        if self.counts_exactly() && !self.groups[group].is_frozen() {
            if !self.groups[group].is_complete() && !self.reduction_queue.contains(&group) {
                self.reduction_queue.push_back(group);
            }
            self.reduce_in_order(actions);
            // A parameter unused in this rank's forward must not delay the group's reduction: other
            // ranks may have used it, and wait.
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

    /// Reduces groups from the head of the queue while they are complete and not expected.
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
        self.in_backward = false;
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

    /// Gathers a group that has not been gathered, and sets its new state.
    fn unshard(&mut self, group: usize, to: Parameters, actions: &mut Vec<Action>) {
        let state = &mut self.groups[group];
        if state.group.parameters == 0 {
            return;
        }
        match std::mem::replace(&mut state.parameters, to) {
            Parameters::Sharded => {
                actions.extend([Action::Gather(group), Action::WaitGather(group)]);
            }
            Parameters::Part => {
                actions.extend([Action::GatherParts(group), Action::WaitGather(group)]);
            }
            Parameters::Prefetched => actions.push(Action::WaitGather(group)),
            Parameters::Unsharded | Parameters::InBackward | Parameters::BackwardOver => {}
        }
    }

    /// Starts gathering a group, unless `most` groups are already gathered ahead: they may not have
    /// been called yet, if this forward differs from the last.
    fn gather_ahead(&mut self, group: usize, most: usize, actions: &mut Vec<Action>) {
        let prefetched = |state: &&GroupState| state.parameters == Parameters::Prefetched;
        if self.groups.iter().filter(prefetched).count() >= most {
            return;
        }
        let state = &mut self.groups[group];
        let gather = match state.parameters {
            Parameters::Sharded if state.group.parameters > 0 => Action::Gather(group),
            Parameters::Part => Action::GatherParts(group),
            _ => return,
        };
        state.parameters = Parameters::Prefetched;
        actions.push(gather);
    }

    /// Frees a gathered group except for a part.
    fn keep_part(&mut self, group: usize, actions: &mut Vec<Action>) {
        let state = &mut self.groups[group];
        if !matches!(state.parameters, Parameters::Sharded | Parameters::Part) {
            state.parameters = Parameters::Part;
            actions.push(Action::KeepPart(group));
        }
    }

    fn abandon(&mut self, actions: &mut Vec<Action>) {
        for (index, state) in self.groups.iter_mut().enumerate() {
            if std::mem::take(&mut state.parameters) != Parameters::Sharded {
                actions.push(Action::Free(index));
            }
            state.gradients = Gradients::Accumulating { ready: 0 };
            (state.forward_calls, state.backward_calls) = (0, 0);
        }
        (self.in_backward, self.reduce) = (false, ReduceScope::default());
        self.older_forwards = false;
        self.reducing = None;
        self.reduction_queue.clear();
        self.forward.clear();
        self.last_forward.clear();
    }

    fn free(&mut self, group: usize, actions: &mut Vec<Action>) {
        match std::mem::take(&mut self.groups[group].parameters) {
            Parameters::Sharded => {}
            Parameters::Prefetched => {
                actions.extend([Action::WaitGather(group), Action::Free(group)]);
            }
            Parameters::Part
            | Parameters::Unsharded
            | Parameters::InBackward
            | Parameters::BackwardOver => actions.push(Action::Free(group)),
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

    /// Starts a group's reduction after waiting for the previous one: besides the gradients being
    /// accumulated, at most one group's unsharded gradients are held.
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
