//! Gradient buckets. Gradients are written directly into them and all-reduced as scheduled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Tensor;
use fulgurite_engine::collective::{Label, ProcessGroup, Work};
use fulgurite_engine::memory::{self, MemoryKind};
use fulgurite_engine::parameter::{GradReducer, Parameter, ParameterSlot, accumulation_dtype};
use fulgurite_engine::strategy::GradientPart;
use fulgurite_error::{Error, Result};

use super::super::gradients::{PartialGrads, gradient_after_reduction};
use super::super::reduction::GradientReduction;
use super::bucket::{Item, pack};
use crate::schedule::ddp::{Action, Event, Schedule};

/// Reduces gradients over the replicas.
pub(in crate::mesh_strategy) struct Reducer {
    group: Arc<dyn ProcessGroup>,
    reduction: GradientReduction,
    partial_grads: PartialGrads,
    /// Locked for one look-up, event or local action at a time, never while a collective is started
    /// or waited for.
    state: Mutex<State>,
}

struct State {
    schedule: Schedule,
    buckets: Vec<Bucket>,
    /// In the order of the schedule's parameters.
    gradients: Vec<Gradient>,
    /// FQN → index of the gradient.
    indices: HashMap<String, usize>,
}

struct Bucket {
    flat: Tensor,
    work: Option<Work>,
}

struct Gradient {
    slot: ParameterSlot,
    bucket: usize,
    /// The parameter's view of the bucket.
    view: Tensor,
    /// Whether the current or last backward has gradients for it.
    in_backward: bool,
}

impl Reducer {
    /// Makes buckets for the parameters of `slots`, given in the expected order of their gradients.
    /// Groups parameters by optimizer. The first bucket holds up to `bucket_bytes[0]`, the others
    /// up to `bucket_bytes[1]`.
    pub(in crate::mesh_strategy) fn new(
        group: Arc<dyn ProcessGroup>,
        reduction: GradientReduction,
        partial_grads: PartialGrads,
        slots: &[ParameterSlot],
        bucket_bytes: [usize; 2],
    ) -> Result<Self> {
        let state = Mutex::new(State::new(&*group, slots, bucket_bytes)?);
        Ok(Self { group, reduction, partial_grads, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while reducing")
    }

    /// Rebuilds the buckets in the order of `slots`. Gradients in the current buckets are lost.
    pub(in crate::mesh_strategy) fn rebuild_buckets(
        &self,
        slots: &[ParameterSlot],
        bucket_bytes: [usize; 2],
    ) -> Result<()> {
        let state = &mut *self.state();
        (state.buckets, state.gradients) = (Vec::new(), Vec::new()); // frees their memory
        *state = State::new(&*self.group, slots, bucket_bytes)?;
        Ok(())
    }

    /// Begins a backward for the parameters that currently take a gradient. Rebuilds the buckets if
    /// one bucket mixes optimizers, as before the first backward.
    pub(in crate::mesh_strategy) fn begin_backward(
        &self,
        synchronise: bool,
        bucket_bytes: [usize; 2],
    ) -> Result<()> {
        let slots = {
            let state = self.state();
            let mixed = state.gradients.windows(2).any(|pair| {
                pair[0].bucket == pair[1].bucket
                    && pair[0].slot.optimizer() != pair[1].slot.optimizer()
            });
            mixed.then(|| state.gradients.iter().map(|g| g.slot.clone()).collect::<Vec<_>>())
        };
        if let Some(slots) = slots {
            self.rebuild_buckets(&slots, bucket_bytes)?;
        }
        let counts = self.state().choose_gradients()?;
        for (bucket, parameters) in counts.into_iter().enumerate() {
            self.on(Event::Expect { bucket, parameters })?;
        }
        self.on(Event::BeginBackward { synchronise })
    }

    /// Ends the step of an optimizer whose parameters hold no gradients any more.
    pub(in crate::mesh_strategy) fn finish_step(&self) -> Result<()> {
        let emptied = self.state().emptied_buckets();
        if !emptied.contains(&false) {
            return self.on(Event::FinishStep);
        }
        let emptied = emptied.iter().enumerate().filter(|(_, emptied)| **emptied);
        emptied.map(|(bucket, _)| bucket).try_for_each(|bucket| self.on(Event::Empty { bucket }))
    }

    /// Discards a failed step and everything under way. Its collectives are complete, or complete
    /// before any later work of the device.
    pub(in crate::mesh_strategy) fn abandon_step(&self) -> Result<()> {
        self.state().buckets.iter_mut().for_each(|bucket| bucket.work = None);
        self.on(Event::Abandon)
    }

    /// Whether a gradient waits for its optimizer's step.
    pub(in crate::mesh_strategy) fn holds_gradients(&self) -> bool {
        self.state().emptied_buckets().contains(&false)
    }

    /// FQNs in the order in which gradients became ready, in the first synchronising backward since
    /// the buckets were made.
    pub(in crate::mesh_strategy) fn ready_order(&self) -> Vec<String> {
        let state = self.state();
        let fqn = |&index: &usize| state.gradients[index].slot.fqn().to_owned();
        state.schedule.ready_order().iter().map(fqn).collect()
    }

    /// Number of parameters whose gradients it reduces.
    pub(in crate::mesh_strategy) fn parameters(&self) -> usize {
        self.state().gradients.len()
    }

    /// Passes an event to the schedule and performs its actions.
    pub(in crate::mesh_strategy) fn on(&self, event: Event) -> Result<()> {
        let actions = self.state().schedule.on(event);
        actions.into_iter().try_for_each(|action| self.perform(action))
    }

    fn perform(&self, action: Action) -> Result<()> {
        // Takes an action's operands out of the state first: never waits for a peer under the lock.
        match action {
            Action::KeepOnOneRank(bucket) => {
                for gradient in self.state().gradients.iter().filter(|g| g.bucket == bucket) {
                    let slot = &gradient.slot;
                    let is_first = self.group.rank() == 0 && self.partial_grads.rank_of(slot) == 0;
                    // On the first rank even if only other ranks had a gradient, but not if the
                    // gradient was cleared since.
                    if is_first && slot.local_grad().is_some() {
                        slot.mark_accumulated();
                    } else {
                        slot.clear_accumulated();
                    }
                }
            }
            Action::AllReduce(bucket) => {
                let flat = self.state().buckets[bucket].flat.clone();
                let parts = || Ok(self.state().parts(bucket));
                let _label = Label::enter(format!("bucket {bucket}"));
                let work = self.reduction.divide_and_all_reduce(&flat, parts, &self.group)?;
                self.state().buckets[bucket].work = Some(work);
            }
            Action::Wait(bucket) => {
                let work = self.state().buckets[bucket].work.take();
                work.map_or(Ok(()), Work::wait)?;
            }
            Action::SumPartialGrads => {
                self.partial_grads.sum(|parameter| self.state().view_in_backward(parameter))?;
            }
            Action::Deliver => {
                for gradient in self.state().gradients.iter().filter(|g| g.in_backward) {
                    gradient.slot.set_local_grad(Some(gradient.view.clone()));
                }
            }
        }
        Ok(())
    }

    fn index_of(&self, parameter: &Parameter) -> Result<usize> {
        let index = self.state().indices.get(parameter.fqn()).copied();
        index.ok_or_else(|| Error::parameter(parameter.fqn(), "is in no gradient bucket"))
    }
}

impl State {
    fn new(
        group: &dyn ProcessGroup,
        slots: &[ParameterSlot],
        [first_bytes, cap_bytes]: [usize; 2],
    ) -> Result<Self> {
        let mut slots = slots.to_vec();
        slots.sort_by_key(|slot| slot.optimizer());
        let items: Vec<Item> = slots
            .iter()
            .map(|slot| Item {
                elements: slot.compute_elem_count(),
                dtype: accumulation_dtype(slot.dtype()),
                optimizer: slot.optimizer(),
            })
            .collect();
        let (mut buckets, mut gradients) = (Vec::new(), Vec::new());
        // Buckets hold consecutive parameters, so `gradients` keeps the order of `slots`.
        for indices in pack(&items, first_bytes, cap_bytes) {
            let total: usize = indices.iter().map(|&i| items[i].elements).sum();
            let (first, bucket) = (indices[0], buckets.len());
            let _kind = memory::of_kind(MemoryKind::Gradients);
            let flat = group.empty(total, items[first].dtype, slots[first].device())?;
            let mut offset = 0;
            for i in indices {
                let view = flat.narrow(0, offset, items[i].elements)?;
                offset += items[i].elements;
                gradients.push(Gradient {
                    slot: slots[i].clone(),
                    bucket,
                    view,
                    in_backward: true,
                });
            }
            buckets.push(Bucket { flat, work: None });
        }
        let bucket_of: Vec<usize> = gradients.iter().map(|gradient| gradient.bucket).collect();
        let fqns = gradients.iter().map(|gradient| gradient.slot.fqn().to_owned());
        let indices = fqns.enumerate().map(|(index, fqn)| (fqn, index)).collect();
        Ok(Self { schedule: Schedule::new(&bucket_of), buckets, gradients, indices })
    }

    /// The parts of a bucket's gradients.
    fn parts(&self, bucket: usize) -> Vec<GradientPart> {
        let part = |gradient: &Gradient| GradientPart {
            parameter: gradient.slot.parameter().clone(),
            shape: gradient.slot.compute_region().sizes,
        };
        self.gradients.iter().filter(|g| g.bucket == bucket).map(part).collect()
    }

    /// The parameter's view, if the backward has a gradient for it.
    fn view_in_backward(&self, parameter: &Parameter) -> Option<Tensor> {
        let gradient = &self.gradients[*self.indices.get(parameter.fqn())?];
        gradient.in_backward.then(|| gradient.view.clone())
    }

    /// Records which parameters the starting backward has gradients for. Returns their number per
    /// bucket.
    fn choose_gradients(&mut self) -> Result<Vec<usize>> {
        let mut counts = vec![0; self.buckets.len()];
        for gradient in &mut self.gradients {
            gradient.in_backward = gradient.slot.takes_grad();
            counts[gradient.bucket] += usize::from(gradient.in_backward);
        }
        let paused = |g: &&Gradient| !g.in_backward && counts[g.bucket] > 0;
        match self.gradients.iter().find(paused) {
            None => Ok(counts),
            Some(gradient) => Err(Error::parameter(
                gradient.slot.fqn(),
                "its gradient is paused, and those of other parameters of the same optimizer are not;                  pause all parameters of an optimizer (`Fabric::toggle_optimizer`)",
            )),
        }
    }

    /// For each bucket, whether no gradient in it waits for a step.
    fn emptied_buckets(&self) -> Vec<bool> {
        let mut emptied = vec![true; self.buckets.len()];
        for gradient in &self.gradients {
            emptied[gradient.bucket] &= gradient.slot.local_grad().is_none();
        }
        emptied
    }
}

impl GradReducer for Reducer {
    fn buffer(&self, slot: &ParameterSlot) -> Result<Tensor> {
        let index = self.index_of(slot)?;
        let state = self.state();
        if !state.schedule.accepts_gradients(index) {
            return Err(gradient_after_reduction(slot));
        }
        Ok(state.gradients[index].view.clone())
    }

    fn ready(&self, slot: &ParameterSlot) -> Result<()> {
        if !slot.has_accumulated() {
            // This rank has no gradient; other ranks may have one.
            self.buffer(slot)?.zero_set()?;
        }
        let index = self.index_of(slot)?;
        let uses_left = slot.has_pending_uses();
        self.on(Event::GradientReady { parameter: index, uses_left })
    }
}
