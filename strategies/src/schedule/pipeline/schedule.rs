//! A pipeline's schedule.

use fulgurite_error::Result;

use super::{Action, Costs, Simulation, Type, check, csv, generate, lower, simulate};

/// Lists of actions, one for each rank of a pipeline. Each stage is computed by one rank, and each
/// micro-batch passes through all stages forwards and backwards, once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    pub(super) rank_of_stage: Vec<usize>,
    pub(super) micro_batches: usize,
    pub(super) lists: Vec<Vec<Action>>,
}

impl Schedule {
    /// A known schedule for `ranks` ranks with `stages_per_rank` stages each. Only computation.
    ///
    /// # Errors
    /// If the schedule does not exist for these numbers; the message says which it needs.
    pub fn new(
        kind: Type,
        ranks: usize,
        stages_per_rank: usize,
        micro_batches: usize,
    ) -> Result<Self> {
        generate::schedule(kind, ranks, stages_per_rank, micro_batches)
    }

    /// Reads a schedule from CSV: a line for each rank, a cell for each action, as PyTorch's
    /// `_load_csv`. Empty cells are passed over; `(0F1;3B0)OVERLAP_F_B` is read as its two actions.
    /// The lists may contain what [`lower`](Self::lower) adds.
    ///
    /// # Errors
    /// - A cell is no action.
    /// - A stage is on two ranks.
    /// - A micro-batch misses an action, or has one twice.
    /// - A rank's actions stand in an impossible order. Deadlocks between ranks are found by
    ///   [`simulate`](Self::simulate).
    pub fn from_csv(text: &str) -> Result<Self> {
        csv::read(text)
    }

    /// The lists as CSV.
    pub fn to_csv(&self) -> String {
        csv::write(self)
    }

    /// The lists with sends and receives between ranks.
    ///
    /// `gathered_stages` is for stages that FSDP shards; PyTorch's is 3. At most this many stages
    /// of a rank are gathered: the computed one, and those that are needed next. A stage's
    /// gradients are reduced after its last backward.
    ///
    /// A send stands after the action that computes what it sends. Its receive is put into the
    /// other rank's list at the same time, so each pair of ranks has its transfers in one order,
    /// and they cannot wait for each other. Stages on one rank hand over without a transfer.
    ///
    /// # Errors
    /// If the lists have transfers already, or cannot be computed to their end.
    pub fn lower(&self, gathered_stages: Option<usize>) -> Result<Self> {
        lower::lower(self, gathered_stages)
    }

    /// Runs the lists of all ranks. A rank computes in the order of its list. Beside it run the
    /// rank's transfers, one after the other, and its gathers and reductions, one after the other.
    ///
    /// # Errors
    /// If ranks wait for each other, or FSDP's actions are not where they must be; the message
    /// shows each rank's place in its list.
    pub fn simulate(&self, costs: &Costs) -> Result<Simulation> {
        simulate::simulate(self, costs)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.lists.len()
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.rank_of_stage.len()
    }

    /// Number of micro-batches of a step.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The rank that computes a stage.
    pub fn rank_of_stage(&self, stage: usize) -> usize {
        self.rank_of_stage[stage]
    }

    /// The actions of a rank, in order.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.lists[rank]
    }

    /// A schedule of these lists, if they are possible.
    pub(super) fn checked(lists: Vec<Vec<Action>>) -> Result<Self> {
        check::schedule(lists)
    }
}
