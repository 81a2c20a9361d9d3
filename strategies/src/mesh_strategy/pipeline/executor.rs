//! A rank's list of actions, run.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp};
use fulgurite_engine::execution::dry_run;
use fulgurite_engine::module::stage::Border;
use fulgurite_engine::parameter::ParameterSlot;
use fulgurite_engine::strategy::{Pipeline, StageWork};
use fulgurite_error::{Error, Result};

use super::assignment::Assignment;
use super::links::{Direction, Inbox, Key, Links, Sent};
use super::{PipelineSettings, ScheduleSource};
use crate::schedule::pipeline::{Action, Kind, Schedule};

/// Runs the pipeline of this rank.
pub(in crate::mesh_strategy) struct Executor {
    group: Arc<dyn ProcessGroup>,
    source: ScheduleSource,
    assignment: Assignment,
    links: Links,
    /// The ranks that share tied parameters.
    tied: Option<Arc<dyn ProcessGroup>>,
    /// Schedules by micro-batches.
    schedules: Mutex<BTreeMap<usize, Arc<Schedule>>>,
    /// Training steps so far.
    steps: AtomicUsize,
}

impl Executor {
    /// Connects the stages. Collective over the pipeline.
    pub(in crate::mesh_strategy) fn new(
        settings: &PipelineSettings,
        assignment: Assignment,
        group: &Arc<dyn ProcessGroup>,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            group: group.clone(),
            source: settings.source.clone(),
            links: Links::new(group, &assignment.rank_of_stage, device)?,
            tied: assignment.tied_group(group)?,
            assignment,
            schedules: Mutex::default(),
            steps: AtomicUsize::default(),
        })
    }

    /// The groups of the pipeline that a step uses, for connecting them.
    pub(in crate::mesh_strategy) fn groups(&self) -> Vec<Arc<dyn ProcessGroup>> {
        self.links.groups().chain(&self.tied).cloned().collect()
    }

    /// Sums the gradients of tied parameters over the two ranks that hold them. Collective over
    /// those.
    pub(in crate::mesh_strategy) fn sum_tied(&self) -> Result<()> {
        let Some(group) = &self.tied else { return Ok(()) };
        for slot in self.assignment.tied.iter().filter(|slot| slot.takes_grad()) {
            let Some(grad) = slot.local_grad() else { continue };
            let sum = grad.detach().copy()?;
            group.run(Collective::all_reduce(&sum, ReduceOp::Sum))?;
            slot.set_local_grad(Some(sum));
        }
        Ok(())
    }

    fn schedule(&self, micro_batches: usize) -> Result<Arc<Schedule>> {
        let mut schedules = self.schedules.lock().expect("no panic while it is held");
        if let Some(schedule) = schedules.get(&micro_batches) {
            return Ok(schedule.clone());
        }
        let schedule = Arc::new(self.source.schedule(self.group.size(), micro_batches)?);
        schedules.insert(micro_batches, schedule.clone());
        Ok(schedule)
    }

    /// The messages that come in a step, by their senders.
    fn expected(&self, micro_batches: usize) -> BTreeMap<usize, usize> {
        let (ranks, own) = (&self.assignment.rank_of_stage, self.group.rank());
        let mut counts = BTreeMap::new();
        for pair in ranks.windows(2).filter(|pair| pair[0] != pair[1]) {
            for (from, to) in [(pair[0], pair[1]), (pair[1], pair[0])] {
                if to == own {
                    *counts.entry(from).or_insert(0) += micro_batches;
                }
            }
        }
        counts
    }

    /// The message that an action needs, and the stage that it comes from.
    fn needed(&self, Action { stage, kind, micro_batch }: Action) -> Option<(Key, usize)> {
        match kind {
            Kind::Forward if stage > 0 => {
                Some(((Direction::Forward, stage, micro_batch), stage - 1))
            }
            Kind::Backward | Kind::BackwardInput if stage + 1 < self.assignment.stages.len() => {
                Some(((Direction::Backward, stage, micro_batch), stage + 1))
            }
            _ => None,
        }
    }

    /// The stage that an action's result goes to.
    fn target(&self, action: Action) -> Option<Key> {
        let last = self.assignment.stages.len() - 1;
        match action.kind {
            Kind::Forward if action.stage < last => {
                Some((Direction::Forward, action.stage + 1, action.micro_batch))
            }
            Kind::Backward | Kind::BackwardInput if action.stage > 0 => {
                Some((Direction::Backward, action.stage - 1, action.micro_batch))
            }
            _ => None,
        }
    }

    fn slots(&self) -> impl Iterator<Item = &ParameterSlot> {
        self.assignment.slots.iter().flatten().chain(&self.assignment.shared)
    }
}

/// The tensors of a step in progress.
struct Step<'a> {
    executor: &'a Executor,
    inbox: Inbox,
    /// Activations and gradients between stages of this rank.
    handed: HashMap<Key, Border>,
    /// Messages under way, oldest first.
    sent: VecDeque<Sent>,
}

/// Messages under way at most. The other rank receives at any time, so waiting for the oldest ends.
const MOST_SENT: usize = 8;

impl Step<'_> {
    /// The rank that a message comes from, if it is not this one.
    fn sender(&self, neighbour: usize) -> Option<usize> {
        let from = self.executor.assignment.rank_of_stage[neighbour];
        (from != self.executor.group.rank()).then_some(from)
    }

    /// Lets a dry run have what an action will need. In a real run it may come that early.
    fn expect(&mut self, action: Option<&Action>) -> Result<()> {
        let needed = action.and_then(|action| self.executor.needed(*action));
        match needed.and_then(|(key, neighbour)| Some((key, self.sender(neighbour)?))) {
            Some((key, from)) => self.inbox.expect(key, from),
            None => Ok(()),
        }
    }

    /// Takes the tensors that a stage of this rank gets from its neighbour for an action.
    fn take(&mut self, action: Action) -> Result<Option<Border>> {
        let Some((key, neighbour)) = self.executor.needed(action) else { return Ok(None) };
        if let Some(from) = self.sender(neighbour) {
            return self.inbox.take(key, from).map(Some);
        }
        self.handed.remove(&key).map(Some).ok_or_else(|| {
            Error::other(format!(
                "the pipeline's schedule computes stage {} before stage {neighbour} for micro-batch {}",
                key.1, key.2
            ))
        })
    }

    fn give(&mut self, key: Key, border: Border) -> Result<()> {
        let executor = self.executor;
        let rank = executor.assignment.rank_of_stage[key.1];
        if rank == executor.group.rank() {
            self.handed.insert(key, border);
        } else {
            self.inbox.note_sent(key, &border);
            self.sent.push_back(executor.links.send(rank, key, &border)?);
        }
        match self.sent.len() > MOST_SENT {
            true => self.sent.pop_front().map_or(Ok(()), Sent::wait),
            false => Ok(()),
        }
    }

    /// Computes an action.
    fn compute(&mut self, action: Action, work: &mut dyn StageWork) -> Result<()> {
        let Action { stage, kind, micro_batch } = action;
        let stages = &self.executor.assignment.stages;
        let result = match kind {
            Kind::Forward => {
                let input = self.take(action)?;
                work.forward((stage, &stages[stage]), micro_batch, input)?
            }
            Kind::Backward | Kind::BackwardInput => {
                let grads = self
                    .take(action)?
                    .map(|border| border.tensors.into_iter().map(|of| of.tensor).collect());
                let leaves_weights = kind == Kind::BackwardInput;
                let grads = work.backward(stage, micro_batch, grads, leaves_weights)?;
                grads.map(Border::of_gradients)
            }
            Kind::BackwardWeight => {
                work.weights(stage, micro_batch)?;
                None
            }
            _ => None,
        };
        match (self.executor.target(action), result) {
            (Some(key), Some(border)) => self.give(key, border),
            (None, None) => Ok(()),
            (Some(_), None) => {
                Err(Error::other(format!("`{action}` of the pipeline gave nothing")))
            }
            (None, Some(_)) => {
                Err(Error::other(format!("`{action}` of the pipeline gave a tensor")))
            }
        }
    }
}

impl Pipeline for Executor {
    fn train(&self, micro_batches: usize, work: &mut dyn StageWork) -> Result<()> {
        let schedule = self.schedule(micro_batches)?;
        let actions = schedule.actions(self.group.rank());
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        let inbox = self.links.receive_all(&self.expected(micro_batches), step)?;
        let (handed, sent) = (HashMap::new(), VecDeque::new());
        let mut step = Step { executor: self, inbox, handed, sent };
        self.slots().for_each(ParameterSlot::hold);
        let mut ended = vec![0; self.assignment.stages.len()];
        let mut actions = actions.iter().filter(|action| action.kind.computes()).peekable();
        step.expect(actions.peek().copied())?;
        while let Some(action) = actions.next() {
            step.expect(actions.peek().copied())?;
            let slots = &self.assignment.slots[action.stage];
            let ends = matches!(action.kind, Kind::Backward | Kind::BackwardWeight);
            ended[action.stage] += usize::from(ends);
            let is_last = ends && ended[action.stage] == micro_batches;
            // The stage's last backward declares its gradients ready, one by one.
            if is_last && action.kind == Kind::Backward {
                slots.iter().for_each(ParameterSlot::release);
            }
            step.compute(*action, work)?;
            if is_last && action.kind == Kind::BackwardWeight {
                slots.iter().try_for_each(ParameterSlot::finish_hold)?;
            }
        }
        self.assignment.shared.iter().try_for_each(ParameterSlot::finish_hold)?;
        let Step { inbox, sent, .. } = step;
        inbox.finish()?;
        sent.into_iter().try_for_each(Sent::wait)
    }

    fn evaluate(&self, work: &mut dyn StageWork) -> Result<()> {
        if dry_run::is_on() {
            return Err(Error::other("a plan of a pipeline has training steps alone"));
        }
        let Assignment { stages, rank_of_stage, .. } = &self.assignment;
        let (own, mut handed, mut sent) = (self.group.rank(), None, Vec::new());
        for (index, stage) in stages.iter().enumerate() {
            if rank_of_stage[index] != own {
                continue;
            }
            let input = match index {
                0 => None,
                _ if rank_of_stage[index - 1] == own => handed.take(),
                _ => Some(self.links.receive(rank_of_stage[index - 1])?.1),
            };
            let Some(border) = work.forward((index, stage), 0, input)? else { continue };
            let next = rank_of_stage[index + 1];
            if next == own {
                handed = Some(border);
            } else {
                let key = (Direction::Forward, index + 1, 0);
                sent.push(self.links.send(next, key, &border)?);
            }
        }
        sent.into_iter().try_for_each(Sent::wait)
    }

    fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    fn last_rank(&self) -> usize {
        self.assignment.rank_of_stage[self.assignment.stages.len() - 1]
    }
}

/// An empty gradient for parameters of other stages, so that the optimizer counts its step alike on
/// all ranks.
pub(in crate::mesh_strategy) fn empty_gradient(slot: &ParameterSlot) -> Result<Tensor> {
    Ok(slot.local()?.values.zeros_like()?)
}
