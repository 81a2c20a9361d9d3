//! Running the lists of all ranks with given costs.

use std::collections::{HashMap, VecDeque};

use fulgurite_error::{Error, Result};

use super::check::is_transfer;
use super::lower::{stuck, transfer_of};
use super::{Action, Kind, Schedule};

/// How long actions take, in any unit of time. A whole backward takes as long as its two halves.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// A forward of a stage.
    pub forward: f64,
    /// The gradient of a stage's input.
    pub backward_input: f64,
    /// The gradients of a stage's weights.
    pub backward_weight: f64,
    /// A transfer between two ranks.
    pub transfer: f64,
    /// Gathering a stage's parameters.
    pub unshard: f64,
    /// Reducing a stage's gradients.
    pub reduce: f64,
    /// Each stage's computation, as a multiple of the above; 1 for stages beyond the end.
    pub stages: Vec<f64>,
}

impl Default for Costs {
    /// Forward and the halves of a backward take 1, all else nothing.
    fn default() -> Self {
        Self {
            forward: 1.0,
            backward_input: 1.0,
            backward_weight: 1.0,
            transfer: 0.0,
            unshard: 0.0,
            reduce: 0.0,
            stages: Vec::new(),
        }
    }
}

impl Costs {
    fn of(&self, action: Action) -> f64 {
        let stage = self.stages.get(action.stage).copied().unwrap_or(1.0);
        match action.kind {
            Kind::Forward => stage * self.forward,
            Kind::BackwardInput => stage * self.backward_input,
            Kind::BackwardWeight => stage * self.backward_weight,
            Kind::Backward => stage * (self.backward_input + self.backward_weight),
            Kind::Unshard => self.unshard,
            Kind::ReduceGradients => self.reduce,
            Kind::Reshard => 0.0,
            _ => self.transfer,
        }
    }

    fn check(&self) -> Result<()> {
        let Self { forward, backward_input, backward_weight, transfer, unshard, reduce, stages } =
            self;
        let all = [forward, backward_input, backward_weight, transfer, unshard, reduce];
        match all.into_iter().chain(stages).find(|cost| !cost.is_finite() || **cost < 0.0) {
            None => Ok(()),
            Some(cost) => Err(Error::Config(format!(
                "pipeline schedule: a cost of {cost}; expected times of at least 0"
            ))),
        }
    }
}

/// When an action ran.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// The lists of a schedule, run to their end.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    spans: Vec<Vec<Span>>,
    peak_in_flight: Vec<usize>,
    duration: f64,
}

impl Simulation {
    /// The actions of a rank with their times, in the order of its list.
    pub fn spans(&self, rank: usize) -> &[Span] {
        &self.spans[rank]
    }

    /// The time from the first action's start to the last one's end.
    pub fn duration(&self) -> f64 {
        self.duration
    }

    /// The share of the time in which a rank computes nothing.
    pub fn bubble_of(&self, rank: usize) -> f64 {
        let computed = self.spans[rank].iter().filter(|span| span.action.kind.computes());
        let busy: f64 = computed.map(|span| span.end - span.start).sum();
        if self.duration > 0.0 { 1.0 - busy / self.duration } else { 0.0 }
    }

    /// The share of the time in which ranks compute nothing, over all ranks.
    pub fn bubble(&self) -> f64 {
        let ranks = self.spans.len();
        (0..ranks).map(|rank| self.bubble_of(rank)).sum::<f64>() / ranks as f64
    }

    /// By rank, the most micro-batches of its stages whose activations it held at once: from the
    /// start of a forward to the end of the last half of its backward.
    pub fn peak_in_flight(&self) -> &[usize] {
        &self.peak_in_flight
    }
}

/// State of a rank.
#[derive(Default)]
struct Rank {
    place: usize,
    /// When it has computed all before its place.
    now: f64,
    /// Transfers that were started and have not ended, with their place in the list and start.
    transfers: VecDeque<(usize, Action, f64)>,
    /// When the last transfer ended.
    transferred: f64,
    /// When the last gather or reduction ended.
    gathered: f64,
    spans: Vec<Span>,
    in_flight: usize,
    peak_in_flight: usize,
}

struct Run<'a> {
    schedule: &'a Schedule,
    costs: &'a Costs,
    ranks: Vec<Rank>,
    /// When actions ended.
    ends: HashMap<Action, f64>,
    /// By stage, when its parameters are gathered.
    unsharded: HashMap<usize, f64>,
    transfers: bool,
    gathers: bool,
}

pub(super) fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Simulation> {
    costs.check()?;
    let has =
        |test: fn(Kind) -> bool| schedule.lists.iter().flatten().any(|action| test(action.kind));
    let mut run = Run {
        schedule,
        costs,
        ranks: schedule.lists.iter().map(|_| Rank::default()).collect(),
        ends: HashMap::new(),
        unsharded: HashMap::new(),
        transfers: has(is_transfer),
        gathers: has(|kind| kind == Kind::Unshard),
    };
    while run.advance()? {}
    let places: Vec<_> = run.ranks.iter().map(Rank::first_unfinished).collect();
    let finished = |(rank, place): (usize, &usize)| *place == schedule.actions(rank).len();
    if !places.iter().enumerate().all(finished) {
        return Err(stuck(schedule, &places));
    }
    run.check_sharding_at_end()?;
    let spans: Vec<_> = run.ranks.iter().map(|rank| rank.spans.clone()).collect();
    let all = || spans.iter().flatten();
    let start = all().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let end = all().map(|span| span.end).fold(0.0, f64::max);
    let peak_in_flight = run.ranks.iter().map(|rank| rank.peak_in_flight).collect();
    Ok(Simulation { spans, peak_in_flight, duration: end - start })
}

impl Rank {
    /// The place of the first action that has not ended.
    fn first_unfinished(&self) -> usize {
        self.transfers.front().map_or(self.place, |(place, ..)| *place)
    }
}

impl Run<'_> {
    /// Lets each rank go on as far as it can. False if none could.
    fn advance(&mut self) -> Result<bool> {
        let mut progress = false;
        for rank in 0..self.ranks.len() {
            while let Some(action) = self.schedule.actions(rank).get(self.ranks[rank].place) {
                if !self.start(rank, *action)? {
                    break;
                }
                self.ranks[rank].place += 1;
                progress = true;
            }
        }
        for rank in 0..self.ranks.len() {
            while self.transfer(rank) {
                progress = true;
            }
        }
        Ok(progress)
    }

    /// Runs an action, or queues a transfer. False if the action must wait.
    fn start(&mut self, rank: usize, action: Action) -> Result<bool> {
        let now = self.ranks[rank].now;
        if is_transfer(action.kind) {
            let place = self.ranks[rank].place;
            self.ranks[rank].transfers.push_back((place, action, now));
            // Its span is filled in when it ends.
            self.ranks[rank].spans.push(Span { action, start: now, end: now });
            return Ok(true);
        }
        let Some(ready) = self.ready(action) else { return Ok(false) };
        let cost = self.costs.of(action);
        let state = &mut self.ranks[rank];
        let (start, end) = match action.kind {
            Kind::Unshard | Kind::ReduceGradients => {
                let start = ready.max(now).max(state.gathered);
                state.gathered = start + cost;
                (start, start + cost)
            }
            Kind::Reshard => (now, now),
            _ => {
                let start = ready.max(now);
                state.now = start + cost;
                (start, start + cost)
            }
        };
        match action.kind {
            Kind::Forward => {
                state.in_flight += 1;
                state.peak_in_flight = state.peak_in_flight.max(state.in_flight);
            }
            Kind::Backward | Kind::BackwardWeight => state.in_flight -= 1,
            _ => {}
        }
        state.spans.push(Span { action, start, end });
        self.shard(rank, action, end)?;
        self.ends.insert(action, end);
        Ok(true)
    }

    /// When what an action needs is there. `None`: it is not known yet.
    fn ready(&self, action: Action) -> Option<f64> {
        let last = self.schedule.stages() - 1;
        let neighbour = match action.kind {
            Kind::Forward => action.stage.checked_sub(1),
            Kind::BackwardInput | Kind::Backward if action.stage < last => Some(action.stage + 1),
            _ => None,
        };
        let mut ready = 0.0;
        if let Some(stage) = neighbour {
            let elsewhere =
                self.schedule.rank_of_stage(stage) != self.schedule.rank_of_stage(action.stage);
            let there = Action { stage, ..action };
            ready = match action.kind {
                _ if elsewhere && self.transfers => {
                    let forward = action.kind == Kind::Forward;
                    let kind = if forward { Kind::ReceiveForward } else { Kind::ReceiveBackward };
                    *self.ends.get(&action.with(kind))?
                }
                Kind::Forward => self.ends.get(&there)? + self.hop(elsewhere),
                _ => {
                    let halves = self.ends.get(&there.with(Kind::BackwardInput));
                    let whole = || self.ends.get(&there.with(Kind::Backward));
                    halves.or_else(whole)? + self.hop(elsewhere)
                }
            };
        }
        match self.unsharded.get(&action.stage) {
            Some(gathered) if action.kind.computes() => Some(ready.max(*gathered)),
            _ => Some(ready),
        }
    }

    /// The time to the other rank, in lists without transfers.
    fn hop(&self, elsewhere: bool) -> f64 {
        if elsewhere { self.costs.transfer } else { 0.0 }
    }

    /// Checks and notes what an action means for parameters that FSDP has sharded.
    fn shard(&mut self, rank: usize, action: Action, end: f64) -> Result<()> {
        let wrong = |why: &str| {
            Err(Error::Config(format!("pipeline schedule, rank {rank}: `{action}`: {why}")))
        };
        let stage = action.stage;
        let reduce = Action::new(stage, Kind::ReduceGradients, 0);
        match action.kind {
            Kind::Unshard if self.unsharded.insert(stage, end).is_some() => {
                wrong("the stage is gathered already")
            }
            Kind::Reshard if self.unsharded.remove(&stage).is_none() => {
                wrong("the stage is not gathered")
            }
            kind if kind.computes() && self.gathers && !self.unsharded.contains_key(&stage) => {
                wrong("the stage is not gathered at this point")
            }
            Kind::Backward | Kind::BackwardWeight if self.ends.contains_key(&reduce) => {
                wrong("the stage's gradients were reduced before this")
            }
            _ => Ok(()),
        }
    }

    fn check_sharding_at_end(&self) -> Result<()> {
        let error = |message: String| Err(Error::Config(format!("pipeline schedule: {message}")));
        if let Some(stage) = self.unsharded.keys().min() {
            return error(format!(
                "stage {stage} is still gathered at the end; `{stage}RESHARD` is missing"
            ));
        }
        let reduced =
            |stage: usize| self.ends.contains_key(&Action::new(stage, Kind::ReduceGradients, 0));
        let stages = 0..self.schedule.stages();
        if stages.clone().any(reduced)
            && let Some(stage) = stages.clone().find(|stage| !reduced(*stage))
        {
            return error(format!(
                "the gradients of stage {stage} are not reduced; `{stage}REDUCE_GRAD` is missing"
            ));
        }
        Ok(())
    }

    /// Ends the rank's first waiting transfer if it is a send, has its tensor, and is met by its
    /// receive.
    fn transfer(&mut self, rank: usize) -> bool {
        let Some((place, send, started)) = self.ranks[rank].transfers.front().copied() else {
            return false;
        };
        let computed = match send.kind {
            Kind::SendForward => self.ends.get(&send.with(Kind::Forward)),
            Kind::SendBackward => {
                let input = self.ends.get(&send.with(Kind::BackwardInput));
                input.or_else(|| self.ends.get(&send.with(Kind::Backward)))
            }
            _ => return false,
        };
        let Some(computed) = computed.copied() else { return false };
        let compute = if send.kind == Kind::SendForward { Kind::Forward } else { Kind::Backward };
        let Some((_, receive)) = transfer_of(send.with(compute), self.schedule.stages() - 1) else {
            return false;
        };
        let peer = self.schedule.rank_of_stage(receive.stage);
        let Some((peer_place, _, peer_started)) =
            self.ranks[peer].transfers.front().copied().filter(|(_, action, _)| *action == receive)
        else {
            return false;
        };
        let [own_free, peer_free] = [rank, peer].map(|rank| self.ranks[rank].transferred);
        let start =
            [started, computed, peer_started, own_free, peer_free].into_iter().fold(0.0, f64::max);
        let end = start + self.costs.transfer;
        for (rank, place, action) in [(rank, place, send), (peer, peer_place, receive)] {
            let state = &mut self.ranks[rank];
            state.transfers.pop_front();
            state.transferred = end;
            state.spans[place] = Span { action, start, end };
            self.ends.insert(action, end);
        }
        true
    }
}
