//! The buckets at work: gradients are written straight into them, and a bucket is reduced as soon
//! as it is full.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::{DType, Tensor};
use fulgurite_core::collective::{ProcessGroup, ReduceOp, Work};
use fulgurite_core::parameter::{GradReducer, Parameter};
use fulgurite_core::{Error, Result};

use super::super::late_gradient::late_gradient;
use super::super::summands::Summands;
use super::bucket::{Item, pack};

/// Reduces gradients over the replicas.
pub(in crate::mesh_strategy) struct Reducer {
    group: Arc<dyn ProcessGroup>,
    summands: Summands,
    sync: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    buckets: Vec<Bucket>,
    /// FQN → (bucket, gradient's view of it).
    places: HashMap<String, (usize, Tensor)>,
    /// The first bucket that has not been launched in this backward. Ranks launch buckets in one
    /// order, whatever order they become full in.
    next: usize,
    /// FQNs in the order gradients became ready, in the first backward that synchronised.
    ready_order: Vec<String>,
    /// Whether a backward of this step left uses behind. A later one that they are part of counts only
    /// those of newer forwards, so buckets wait for its end. May differ from rank to rank: the order
    /// in which buckets are launched is the same.
    behind: bool,
}

struct Bucket {
    flat: Tensor,
    parameters: Vec<Parameter>,
    ready: usize,
    work: Option<Work>,
    /// Whether the content is reduced already in this step.
    reduced: bool,
}

impl Reducer {
    pub(in crate::mesh_strategy) fn new(
        group: Arc<dyn ProcessGroup>,
        summands: Summands,
        sync: Arc<AtomicBool>,
    ) -> Self {
        Self { group, summands, sync, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while reducing")
    }

    /// Lays buckets out for `parameters` in the order their gradients become ready. Gradients that
    /// are in the present buckets are lost.
    pub(in crate::mesh_strategy) fn lay_out(
        &self,
        parameters: &[Parameter],
        [first_bytes, cap_bytes]: [usize; 2],
    ) -> Result<()> {
        let dtype = |p: &Parameter| if p.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let items: Vec<Item> = parameters
            .iter()
            .map(|p| Item { elements: p.compute_elem_count(), dtype: dtype(p) })
            .collect();
        let ready_order = std::mem::take(&mut *self.state()).ready_order; // frees the old buckets
        let mut state = State { ready_order, ..State::default() };
        for indices in pack(&items, first_bytes, cap_bytes) {
            let members: Vec<Parameter> = indices.iter().map(|&i| parameters[i].clone()).collect();
            let total: usize = indices.iter().map(|&i| items[i].elements).sum();
            let flat = self.group.empty(total, items[indices[0]].dtype, members[0].device())?;
            let mut offset = 0;
            for (parameter, &i) in members.iter().zip(&indices) {
                let view = flat.narrow(0, offset, items[i].elements)?;
                offset += items[i].elements;
                state.places.insert(parameter.fqn().to_owned(), (state.buckets.len(), view));
            }
            let bucket = Bucket { flat, parameters: members, ready: 0, work: None, reduced: false };
            state.buckets.push(bucket);
        }
        *self.state() = state;
        Ok(())
    }

    /// The order in which gradients became ready in the first backward that synchronised.
    pub(in crate::mesh_strategy) fn ready_order(&self) -> Vec<String> {
        self.state().ready_order.clone()
    }

    /// Before a backward: a bucket that was reduced already in this step keeps the sum on one rank
    /// only, so that reducing it again adds the new gradients once.
    pub(in crate::mesh_strategy) fn begin_backward(&self) {
        for bucket in &mut self.state().buckets {
            if !std::mem::take(&mut bucket.reduced) {
                continue;
            }
            for parameter in &bucket.parameters {
                // On the first rank also for those that only other ranks had a gradient of.
                if self.group.rank() == 0 && self.summands.rank_of(parameter) == 0 {
                    parameter.mark_accumulated();
                } else {
                    parameter.clear_accumulated();
                }
            }
        }
    }

    /// After a backward: waits for the reductions and gives the parameters their gradients.
    pub(in crate::mesh_strategy) fn finish_backward(&self) -> Result<()> {
        let state = &mut *self.state();
        let sync = self.sync.load(Ordering::Relaxed);
        if sync {
            state.launch(&*self.group)?;
        }
        state.next = 0;
        for bucket in &mut state.buckets {
            bucket.ready = 0;
            if let Some(work) = bucket.work.take() {
                work.wait()?;
            }
            bucket.reduced = sync;
        }
        if sync {
            let grad = |p: &Parameter| state.places.get(p.fqn()).map(|(_, view)| view.clone());
            self.summands.sum(grad)?;
        }
        for parameter in state.buckets.iter().flat_map(|bucket| &bucket.parameters) {
            let view = state.places.get(parameter.fqn()).map(|(_, view)| view.clone());
            parameter.set_local_grad(view);
        }
        Ok(())
    }

    /// After an optimizer step: the buckets hold nothing any more.
    pub(in crate::mesh_strategy) fn finish_step(&self) {
        let state = &mut *self.state();
        state.behind = false;
        state.buckets.iter_mut().for_each(|bucket| bucket.reduced = false);
    }
}

impl State {
    /// Starts reducing the buckets that are full and have no other before them that is not.
    fn launch(&mut self, group: &dyn ProcessGroup) -> Result<()> {
        while let Some(bucket) = self.buckets.get_mut(self.next) {
            if bucket.ready < bucket.parameters.len() {
                break;
            }
            bucket.work = Some(group.all_reduce(&bucket.flat, ReduceOp::Sum)?);
            self.next += 1;
        }
        Ok(())
    }
}

impl GradReducer for Reducer {
    fn buffer(&self, parameter: &Parameter) -> Result<Tensor> {
        let state = self.state();
        let Some((index, view)) = state.places.get(parameter.fqn()) else {
            return Err(Error::parameter(parameter.fqn(), "is in no gradient bucket"));
        };
        if state.buckets[*index].work.is_some() {
            return Err(late_gradient(parameter));
        }
        Ok(view.clone())
    }

    fn ready(&self, parameter: &Parameter) -> Result<()> {
        if !parameter.has_accumulated() {
            // No gradient on this rank; others may have one.
            self.buffer(parameter)?.zero_set()?;
        }
        self.state().behind |= parameter.has_pending_uses();
        if !self.sync.load(Ordering::Relaxed) {
            return Ok(());
        }
        let state = &mut *self.state();
        if state.ready_order.len() < state.places.len() {
            state.ready_order.push(parameter.fqn().to_owned());
        }
        let Some((index, _)) = state.places.get(parameter.fqn()) else {
            return Err(Error::parameter(parameter.fqn(), "is in no gradient bucket"));
        };
        state.buckets[*index].ready += 1;
        if state.behind { Ok(()) } else { state.launch(&*self.group) }
    }
}
