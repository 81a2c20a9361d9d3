//! Schedules in the shape of a V: rank r has stage r and, on the way back, stage 2p − 1 − r.

use super::generate::Sizes;
use super::{Action, Kind};

/// A rank's list in the making. Each kind of action takes the micro-batches of a stage in order.
struct List {
    stages: [usize; 2],
    /// Next micro-batch by stage and kind: forward, gradient of inputs, gradient of weights.
    next: [[usize; 3]; 2],
    actions: Vec<Action>,
}

/// The rank's first stage, and its second one, which is nearer to the loss.
const FIRST: usize = 0;
const SECOND: usize = 1;

impl List {
    fn new(sizes: Sizes, rank: usize) -> Self {
        let stages = [rank, 2 * sizes.ranks - 1 - rank];
        Self { stages, next: Default::default(), actions: Vec::new() }
    }

    fn push(&mut self, of: usize, kind: Kind) {
        let [forward, input, weight] = &mut self.next[of];
        let micro_batch = match kind {
            Kind::Forward => *forward,
            Kind::BackwardWeight => *weight,
            _ => *input,
        };
        match kind {
            Kind::Forward => *forward += 1,
            Kind::BackwardInput => *input += 1,
            Kind::BackwardWeight => *weight += 1,
            _ => (*input, *weight) = (*input + 1, *weight + 1),
        }
        self.actions.push(Action::new(self.stages[of], kind, micro_batch));
    }

    fn extend(&mut self, actions: &[(usize, Kind)]) {
        actions.iter().for_each(|(of, kind)| self.push(*of, *kind));
    }

    /// Gradients of weights that are left of a stage.
    fn weights_left(&self, of: usize) -> usize {
        self.next[of][1] - self.next[of][2]
    }
}

/// ZB-V. Its list is complete with 2p − 1 micro-batches; fewer leave out what they lack.
pub(super) fn zero_bubble(sizes: Sizes, rank: usize) -> Vec<Action> {
    use Kind::{BackwardInput as I, BackwardWeight as W, Forward as F};
    let Sizes { ranks, micro_batches, .. } = sizes;
    let padded = micro_batches.max(2 * ranks - 1);
    let mut list = List::new(sizes, rank);
    for _ in 0..2 * (ranks - rank) - 1 {
        list.push(FIRST, F);
    }
    for _ in 0..rank {
        list.extend(&[(SECOND, F), (FIRST, F)]);
    }
    for _ in 0..ranks - rank {
        list.extend(&[(SECOND, F), (SECOND, I), (SECOND, W)]);
    }
    while list.next[SECOND][0] < list.next[FIRST][0] || list.next[FIRST][0] < padded {
        if list.next[FIRST][0] < padded {
            list.push(FIRST, F);
        }
        list.extend(&[(FIRST, I), (FIRST, W), (SECOND, F), (SECOND, I), (SECOND, W)]);
    }
    for _ in 0..rank {
        list.extend(&[(FIRST, I), (SECOND, I)]);
    }
    for _ in 0..ranks - rank {
        list.extend(&[(FIRST, I), (FIRST, W)]);
    }
    for of in [SECOND, FIRST] {
        for _ in 0..list.weights_left(of) {
            list.push(of, W);
        }
    }
    list.actions.retain(|action| action.micro_batch < micro_batches);
    list.actions
}

/// DualPipeV, in the eight steps of DeepSeek's code. Needs two micro-batches a rank.
pub(super) fn dual_pipe(sizes: Sizes, rank: usize) -> Vec<Action> {
    use Kind::{Backward as B, BackwardInput as I, BackwardWeight as W, Forward as F};
    let Sizes { ranks, micro_batches, .. } = sizes;
    let after = ranks - rank - 1;
    let mut list = List::new(sizes, rank);
    // Stages whose gradients of weights were left, in the order of their gradients of inputs.
    let mut waiting = std::collections::VecDeque::new();
    for _ in 0..2 * after {
        list.push(FIRST, F);
    }
    for _ in 0..rank + 1 {
        list.extend(&[(FIRST, F), (SECOND, F)]);
    }
    for _ in 0..after {
        list.extend(&[(SECOND, I), (SECOND, W), (SECOND, F)]);
    }
    for _ in 0..micro_batches - 2 * ranks + rank + 1 {
        list.extend(&[(FIRST, F), (SECOND, B), (SECOND, F), (FIRST, B)]);
    }
    for _ in 0..after {
        list.extend(&[(SECOND, B), (SECOND, F), (FIRST, B)]);
    }
    // The second half leaves gradients of weights for the end.
    for n in 0..2 * (rank + 1) {
        let of = if n.is_multiple_of(2) { SECOND } else { FIRST };
        if n <= rank {
            list.push(of, B);
        } else {
            list.push(of, I);
            waiting.push_back(of);
        }
    }
    for _ in 0..after {
        if let Some(of) = waiting.pop_front() {
            list.push(of, W);
        }
        list.push(FIRST, I);
        waiting.push_back(FIRST);
    }
    for of in waiting {
        list.push(of, W);
    }
    list.actions
}
