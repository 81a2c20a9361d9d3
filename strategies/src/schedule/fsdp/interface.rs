//! What a schedule is told, and what it answers.

use fulgurite_engine::module::Reshard;

/// A group of parameters, as the schedule knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Number of parameters. A group of none is never gathered.
    pub parameters: usize,
    /// How many of them get gradients. A group of which none does is frozen.
    pub trainable: usize,
    /// What is kept of the parameters between forward and backward.
    pub reshard_after_forward: Reshard,
}

/// How many groups are gathered ahead of the one that computes.
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

/// An event for a [`Schedule`](super::Schedule). Groups are indices into the list that it was made of.
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
    /// The step failed at any point, and is begun again: gradients are lost, and nothing is gathered or under
    /// way any more. What is remembered of earlier steps is forgotten too, since ranks may have failed at different points.
    Abandon,
}

/// An action for the driver of a [`Schedule`](super::Schedule), which performs them in the order given. The number is the
/// group's index. The machine assumes that every action succeeds; a driver that fails at one can only
/// [abandon](Event::Abandon) the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Start gathering the parameters. Collective over the ranks that share them.
    Gather(usize),
    /// Start gathering the parameters from the parts that were kept. Collective over the ranks that
    /// have these ([`Reshard::Ranks`]).
    GatherParts(usize),
    /// Wait for the parameters' values. The part that was kept is not needed any more.
    WaitGather(usize),
    /// Free the gathered values, or the part that was kept of them; this rank's shard stays.
    Free(usize),
    /// Keep a part of the gathered values ([`Reshard::Ranks`]) and free the rest.
    KeepPart(usize),
    /// Report ([`Event::GradientReady`]) the trainable parameters without pending uses: those that this
    /// rank's forward did not use.
    CompleteUnused(usize),
    /// Start reduce-scattering the gradients; later ones go to other memory. Collective over the ranks
    /// that share the parameters.
    Reduce(usize),
    /// Wait for the reduce-scatter, and add what earlier backwards scattered and did not replicate.
    WaitReduction(usize),
    /// Start all-reducing the scattered gradients over the replicas. Collective over those. A driver may start it behind the
    /// reduce-scatter, before that is waited for: in the order of the groups it is the same.
    Replicate(usize),
    /// Wait for the replicas.
    WaitReplication(usize),
    /// Add the gradients of all groups that were replicated to the step's. Collective over the
    /// tensor-parallel ranks.
    Deliver,
}
