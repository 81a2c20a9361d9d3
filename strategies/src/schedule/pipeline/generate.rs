//! The known schedules.

use fulgurite_error::{Error, Result};

use super::{Action, Kind, Schedule, v_shaped};

/// A known schedule; see the [table](super#schedules).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward and one backward in turns, as soon as a first backward is possible.
    OneForwardOneBackward,
    /// The same with several stages a rank, which shortens the bubble.
    Interleaved,
    /// Gradients of weights fill the bubble, with the memory of `1f1b`: ZB-H1 of *Zero bubble
    /// pipeline parallelism* (Qi et al.).
    ZeroBubble,
    /// The first rank has the first and the last stage. If F, I and W take equally long, ranks wait
    /// only at the start: ZB-V of *Pipeline parallelism with controllable memory* (Qi et al.).
    ZeroBubbleV,
    /// DeepSeek's DualPipe in the shape of a V.
    DualPipeV,
}

impl Type {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::GPipe,
        Self::OneForwardOneBackward,
        Self::Interleaved,
        Self::ZeroBubble,
        Self::ZeroBubbleV,
        Self::DualPipeV,
    ];

    /// The name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneForwardOneBackward => "1f1b",
            Self::Interleaved => "interleaved_1f1b",
            Self::ZeroBubble => "zb_h1",
            Self::ZeroBubbleV => "zb_v",
            Self::DualPipeV => "dual_pipe_v",
        }
    }

    /// The stages of a rank if nothing else is said: as few as the schedule has.
    pub fn stages_per_rank(self) -> usize {
        match self {
            Self::GPipe | Self::OneForwardOneBackward | Self::ZeroBubble => 1,
            Self::Interleaved | Self::ZeroBubbleV | Self::DualPipeV => 2,
        }
    }
}

/// More forwards than this in a step are a mistake.
const MOST_FORWARDS: usize = 1 << 20;

/// Sizes of a pipeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) ranks: usize,
    pub(super) stages_per_rank: usize,
    pub(super) micro_batches: usize,
}

pub(super) fn schedule(
    kind: Type,
    ranks: usize,
    stages_per_rank: usize,
    micro_batches: usize,
) -> Result<Schedule> {
    let name = kind.name();
    let refuse = |why: String| Err(Error::Config(format!("pipeline schedule `{name}`: {why}")));
    if ranks == 0 || stages_per_rank == 0 || micro_batches == 0 {
        return refuse(format!(
            "{ranks} ranks, {stages_per_rank} stages a rank, {micro_batches} micro-batches; expected at least one of each"
        ));
    }
    let stages = ranks.saturating_mul(stages_per_rank);
    if stages.saturating_mul(micro_batches) > MOST_FORWARDS {
        return refuse(format!(
            "{micro_batches} micro-batches through {stages} stages; expected at most {MOST_FORWARDS} forwards in all"
        ));
    }
    let only = match kind {
        Type::OneForwardOneBackward => Some(1),
        Type::ZeroBubbleV | Type::DualPipeV => Some(2),
        _ => None,
    };
    if let Some(only) = only
        && stages_per_rank != only
    {
        let other = if only == 1 { "; `interleaved_1f1b` is for more" } else { "" };
        return refuse(format!("{stages_per_rank} stages a rank; expected {only}{other}"));
    }
    let sizes = Sizes { ranks, stages_per_rank, micro_batches };
    if matches!(kind, Type::Interleaved | Type::ZeroBubble) && sizes.stages_per_rank > 1 {
        let rounds = sizes.rounds();
        if !micro_batches.is_multiple_of(rounds) {
            let below = micro_batches - micro_batches % rounds;
            return refuse(format!(
                "{micro_batches} micro-batches on {ranks} ranks; expected a multiple of {rounds}, the rounds, as {below} or {}",
                below + rounds
            ));
        }
    }
    if kind == Type::DualPipeV && micro_batches < 2 * ranks {
        return refuse(format!(
            "{micro_batches} micro-batches on {ranks} ranks; expected at least two a rank, {}; `zb_v` takes fewer",
            2 * ranks
        ));
    }
    let list = |rank| match kind {
        Type::GPipe => sizes.gpipe(rank),
        Type::OneForwardOneBackward => sizes.one_forward_one_backward(rank, ranks - 1 - rank, None),
        Type::Interleaved => {
            let warm_up = (stages_per_rank - 1) * sizes.round() + 2 * (ranks - 1 - rank);
            sizes.one_forward_one_backward(rank, warm_up, None)
        }
        Type::ZeroBubble => {
            let warm_up = (stages_per_rank - 1) * sizes.round() + ranks - 1 - rank;
            sizes.one_forward_one_backward(rank, warm_up, Some(rank))
        }
        Type::ZeroBubbleV => v_shaped::zero_bubble(sizes, rank),
        Type::DualPipeV => v_shaped::dual_pipe(sizes, rank),
    };
    Schedule::checked((0..ranks).map(list).collect())
}

impl Sizes {
    /// Rounds of a step. In a round a stage computes as many micro-batches as there are ranks, or a
    /// few more.
    fn rounds(self) -> usize {
        if self.stages_per_rank == 1 { 1 } else { (self.micro_batches / self.ranks).max(1) }
    }

    /// Micro-batches of a round.
    fn round(self) -> usize {
        self.micro_batches / self.rounds()
    }

    /// The n-th pair of stage and micro-batch that a rank computes: a round of its first stage, of
    /// its second, and so on.
    fn nth(self, rank: usize, n: usize, backwards: bool) -> (usize, usize) {
        let (round, within) = (self.round(), n % (self.round() * self.stages_per_rank));
        let turn = within / round;
        let local = if backwards { self.stages_per_rank - 1 - turn } else { turn };
        let rounds_before = n / (round * self.stages_per_rank);
        (local * self.ranks + rank, rounds_before * round + within % round)
    }

    fn gpipe(self, rank: usize) -> Vec<Action> {
        let stages = (0..self.stages_per_rank).map(|local| local * self.ranks + rank);
        let all = |kind, stage| (0..self.micro_batches).map(move |m| Action::new(stage, kind, m));
        let forwards = stages.clone().flat_map(|stage| all(Kind::Forward, stage));
        let backwards = stages.rev().flat_map(|stage| all(Kind::Backward, stage));
        forwards.chain(backwards).collect()
    }

    /// `warm_up` forwards, then one forward and one backward in turns, then the backwards that are
    /// left. With `weights_wait`, gradients of weights come this many backwards later than inputs'.
    fn one_forward_one_backward(
        self,
        rank: usize,
        warm_up: usize,
        weights_wait: Option<usize>,
    ) -> Vec<Action> {
        let all = self.micro_batches * self.stages_per_rank;
        let backward = if weights_wait.is_some() { Kind::BackwardInput } else { Kind::Backward };
        let action = |n, kind| {
            let (stage, micro_batch) = self.nth(rank, n, kind != Kind::Forward);
            Action::new(stage, kind, micro_batch)
        };
        let warm_up = warm_up.min(all);
        let mut list: Vec<_> = (0..warm_up).map(|n| action(n, Kind::Forward)).collect();
        for n in 0..all {
            if warm_up + n < all {
                list.push(action(warm_up + n, Kind::Forward));
            }
            list.push(action(n, backward));
            if let Some(later) = weights_wait.and_then(|wait| n.checked_sub(wait)) {
                list.push(action(later, Kind::BackwardWeight));
            }
        }
        let waiting = weights_wait.map_or(0, |wait| wait.min(all));
        list.extend((all - waiting..all).map(|n| action(n, Kind::BackwardWeight)));
        list
    }
}
