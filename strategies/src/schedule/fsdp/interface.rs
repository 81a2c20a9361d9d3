//! Events and actions of a schedule.

use fulgurite_engine::module::Reshard;

/// A group of parameters, as described to the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Number of parameters. A group of 0 parameters is never gathered.
    pub parameters: usize,
    /// Number of parameters that get gradients. A group is frozen if the number is 0.
    pub trainable: usize,
    /// Treatment of the parameters between forward and backward.
    pub reshard_after_forward: Reshard,
}

/// Numbers of groups gathered ahead of the computing group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefetch {
    /// In forward.
    pub forward: usize,
    /// In backward.
    pub backward: usize,
}

impl From<usize> for Prefetch {
    fn from(groups: usize) -> Self {
        Self { forward: groups, backward: groups }
    }
}

impl Default for Prefetch {
    /// One, as in PyTorch.
    fn default() -> Self {
        Self::from(1)
    }
}

/// The ranks over which a backward reduces gradients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReduceScope {
    /// No ranks: unsharded gradients are kept, and the next backward adds to them.
    None,
    /// The ranks that share the parameters. This rank's part of the sum is kept, and the next
    /// backward adds to it.
    Shards,
    /// The ranks that share the parameters, then the replicas: the result is the step's gradient.
    #[default]
    All,
}

/// An event for a [`Schedule`](super::Schedule). Groups are indices into the schedule's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The parameters have new values (at the start, after a step, after loading).
    PrepareForward,
    /// A unit is about to compute.
    PreForward {
        /// The unit's group.
        group: usize,
        /// Whether a graph is recorded and a backward is therefore expected.
        records_graph: bool,
    },
    /// A unit has computed.
    PostForward {
        /// The unit's group.
        group: usize,
    },
    /// Sets how many of a group's parameters get gradients from the next backwards, because others
    /// are paused. Comes between backwards.
    Expect {
        /// The group.
        group: usize,
        /// [`Group::trainable`].
        trainable: usize,
    },
    /// A backward pass, of a whole loss, begins.
    BeginBackward {
        /// The ranks over which its gradients are reduced.
        reduce: ReduceScope,
    },
    /// A unit's backward begins.
    PreBackward {
        /// The unit's group.
        group: usize,
    },
    /// The gradient of one more trainable parameter of a group is complete. Comes once per backward
    /// pass and parameter, at the latest before [`FinishBackward`](Event::FinishBackward).
    GradientReady {
        /// The parameter's group.
        group: usize,
    },
    /// The backward pass has gone through the graph.
    FinishBackward,
    /// The optimizer has stepped: pending forwards will not get a backward.
    FinishStep,
    /// The step failed at some point and starts again: gradients are lost, and nothing is gathered
    /// or under way. The history of earlier steps is forgotten too, because ranks may have failed
    /// at different points.
    Abandon,
}

/// An action for the driver of a [`Schedule`](super::Schedule), performed in the given order. The
/// number is the group's index. The schedule assumes that every action succeeds; after a failure a
/// driver can only [abandon](Event::Abandon) the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start gathering the parameters. Collective over the ranks that share them.
    Gather(usize),
    /// Start gathering the parameters from the kept parts. Collective over the ranks with these
    /// parts ([`Reshard::Ranks`]).
    GatherParts(usize),
    /// Wait for the parameters' values. The kept part is no longer needed.
    WaitGather(usize),
    /// Free the gathered values, or the kept part; this rank's shard stays.
    Free(usize),
    /// Keep a part of the gathered values ([`Reshard::Ranks`]) and free the rest.
    KeepPart(usize),
    /// Report trainable parameters without pending uses ([`Event::GradientReady`]): this rank's
    /// forward did not use them.
    CompleteUnused(usize),
    /// Start reduce-scattering the gradients; later gradients need other memory. Collective over
    /// the ranks that share the parameters.
    Reduce(usize),
    /// Wait for the reduce-scatter, and add scattered gradients of earlier backwards that were not
    /// replicated.
    WaitReduction(usize),
    /// Start all-reducing the scattered gradients over the replicas. Collective over the replicas.
    /// A driver may queue it right behind the reduce-scatter: the order of the groups is the same.
    Replicate(usize),
    /// Wait for the replicas.
    WaitReplication(usize),
    /// Add the replicated gradients of all groups to the step's gradients. Collective over the
    /// tensor-parallel ranks.
    Deliver,
}
