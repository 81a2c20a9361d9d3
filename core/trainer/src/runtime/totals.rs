//! A step's loss and count over all ranks, and the ranks' reports of anything unusual.
//!
//! Loss and count share one all-reduce. A rank with more to report sends NaN as its count. All
//! ranks see the NaN in the result and then exchange [reports](Report). An ordinary step needs no
//! further collective.

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::UnusedParameters;
use super::runtime::{RuntimeState, StrategyRuntime, explain_difference};
use super::step::StepState;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp, all_gather_object};
use fulgurite_engine::execution::read;
use fulgurite_engine::parameter::ParameterSlot;
use fulgurite_engine::strategy::{Loss, StepTotals};

/// A rank's report on a step. Counts are f64 bits, because JSON cannot express NaN.
#[derive(Serialize, Deserialize)]
struct Report {
    rank: usize,
    count: u64,
    wrong_count: Option<u64>,
    /// Slot indices of the parameters without a gradient on this rank.
    unused: Vec<usize>,
}

impl StrategyRuntime {
    /// See [`Fabric::step_totals`](crate::fabric::Fabric::step_totals).
    pub(crate) fn step_totals(&self, optimizer: usize, flags: &[f64]) -> Result<StepTotals> {
        self.totals(&mut *self.lock_state()?, optimizer, flags)
    }

    fn totals(
        &self,
        state: &mut RuntimeState,
        optimizer: usize,
        flags: &[f64],
    ) -> Result<StepTotals> {
        if let Some(totals) = &state.steps[optimizer].totals {
            return Ok(totals.clone());
        }
        let unused = self.unused(state, optimizer);
        let step = &state.steps[optimizer];
        let loss_sum = match (&step.read, &step.loss_sum) {
            (Some(read), _) => read.loss_sum,
            (None, Some(loss_sum)) => read::scalar(loss_sum, "loss")?,
            (None, None) => 0.0,
        };
        let totals = self.sum_totals(loss_sum, step, &unused, flags)?;
        state.steps[optimizer].totals = Some(totals.clone());
        Ok(totals)
    }

    /// Returns the totals of a loss without a backward. Collective.
    pub(crate) fn totals_of(&self, loss: &Loss) -> Result<StepTotals> {
        self.totals_of_losses(loss.sum_value()?, &[loss.count()])
    }

    /// Returns the totals of several losses without a backward. `loss_sum` is the sum over this
    /// rank's losses. Collective.
    pub(crate) fn totals_of_losses(&self, loss_sum: f64, counts: &[f64]) -> Result<StepTotals> {
        let mut step = StepState::default();
        counts.iter().for_each(|&count| step.add_count(count));
        self.sum_totals(loss_sum, &step, &[], &[])
    }

    fn sum_totals(
        &self,
        loss_sum: f64,
        step: &StepState,
        unused: &[usize],
        flags: &[f64],
    ) -> Result<StepTotals> {
        let sum = |values: &[f64], group: &dyn ProcessGroup| -> Result<Vec<f64>> {
            let values = Tensor::new(values, &Device::Cpu)?;
            let collective = Collective::all_reduce(&values, ReduceOp::Sum);
            group.run(collective).map_err(explain_difference)?;
            read::host(&values)
        };
        let sent = [loss_sum, step.count_or_report(unused)];
        let loss = sum(&sent, &**self.mesh().loss_ranks()?)?;
        let count = self.answered(loss[1], step, unused)?;
        // Tensor-parallel ranks have the same loss, but each has its own flags.
        let flags = match flags {
            [] => Vec::new(),
            flags => sum(flags, &**self.mesh().world())?,
        };
        Ok(StepTotals { loss_sum: loss[0], count, flags })
    }

    /// Returns the step's loss count over all ranks, without reading a loss. Collective.
    pub(super) fn total_count(&self, state: &RuntimeState, optimizer: usize) -> Result<f64> {
        let unused = self.unused(state, optimizer);
        let step = &state.steps[optimizer];
        let count = Tensor::new(&[step.count_or_report(&unused)], &Device::Cpu)?;
        let collective = Collective::all_reduce(&count, ReduceOp::Sum);
        self.mesh().loss_ranks()?.run(collective).map_err(explain_difference)?;
        self.answered(read::host::<f64>(&count)?[0], step, &unused)
    }

    /// Returns the factor that the optimizer's update applies to this rank's gradients. Collective
    /// like [`step_totals`](Self::step_totals).
    pub(crate) fn grad_scale(&self, optimizer: usize) -> Result<f64> {
        let state = &mut *self.lock_state()?;
        let totals = self.totals(state, optimizer, &[])?;
        let factor = state.loss_scale.map_or(1.0, |scale| scale.factor());
        let local_count = state.steps[optimizer].count;
        Ok(state.strategy.grad_scale(&totals, local_count)? / factor)
    }

    /// Sets the policy for an optimizer's parameters without a gradient.
    pub(crate) fn set_unused(&self, optimizer: usize, policy: UnusedParameters) {
        self.unused_policies().insert(optimizer, policy);
    }

    /// Returns the slot indices of the optimizer's parameters without a gradient on this rank since
    /// its last step. Empty in the first step, which the audit checks, and under
    /// [`UnusedParameters::Zero`].
    fn unused(&self, state: &RuntimeState, optimizer: usize) -> Vec<usize> {
        let policy = self.unused_policies().get(&optimizer).copied().unwrap_or_default();
        if !state.steps[optimizer].audited || policy == UnusedParameters::Zero {
            return Vec::new();
        }
        let slots = self.slots().iter().zip(&state.delivered).enumerate();
        let own = slots.filter(|(_, (slot, _))| is_of(slot, optimizer) && !slot.is_elsewhere());
        own.filter(|(_, (_, delivered))| !**delivered).map(|(index, _)| index).collect()
    }

    /// Returns `sum` if it is finite. Otherwise some rank sent NaN: all ranks exchange reports, and
    /// the count is summed from them. Parameters that got a gradient on no rank lose their zero
    /// gradient, so that the optimizer leaves them alone.
    ///
    /// # Errors
    /// On every rank, if any rank's count is negative or not finite.
    fn answered(&self, sum: f64, step: &StepState, unused: &[usize]) -> Result<f64> {
        if sum.is_finite() {
            return Ok(sum);
        }
        // Parameters of other stages have no gradient here.
        let elsewhere = self.slots().iter().enumerate().filter(|(_, slot)| slot.is_elsewhere());
        let unused: Vec<usize> =
            unused.iter().copied().chain(elsewhere.map(|(index, _)| index)).collect();
        let report = Report {
            rank: self.mesh().world().rank(),
            count: step.count.to_bits(),
            wrong_count: step.wrong_count.map(f64::to_bits),
            unused: unused.clone(),
        };
        let reports = all_gather_object(&**self.mesh().loss_ranks()?, &report)?;
        let wrong = reports.iter().find_map(|report| Some((report.rank, report.wrong_count?)));
        if let Some((rank, bits)) = wrong {
            return Err(wrong_count(rank, f64::from_bits(bits)));
        }
        let count: f64 = reports.iter().map(|report| f64::from_bits(report.count)).sum();
        if !count.is_finite() {
            return Err(Error::other(format!(
                "the counts of the losses of all ranks add up to {count}"
            )));
        }
        let everywhere =
            |index: &&usize| reports.iter().all(|report| report.unused.contains(index));
        unused
            .iter()
            .filter(everywhere)
            .for_each(|&index| self.slots()[index].set_local_grad(None));
        Ok(count)
    }
}

impl StepState {
    /// Returns this rank's term of the count's sum: its count, or NaN if it has more to report.
    fn count_or_report(&self, unused: &[usize]) -> f64 {
        let asks = self.wrong_count.is_some() || !unused.is_empty();
        if asks { f64::NAN } else { self.count }
    }
}

/// Whether the optimizer updates the parameter.
pub(super) fn is_of(slot: &ParameterSlot, optimizer: usize) -> bool {
    slot.requires_grad() && slot.optimizer() == optimizer
}

/// The error about a loss of `rank` whose count is negative or not finite.
fn wrong_count(rank: usize, count: f64) -> Error {
    Error::other(format!(
        "the count of the loss on rank {rank} is {count}: a `Loss` is a sum and the number of its items, which is finite and \
         not negative; look at how `Loss::new` gets its count"
    ))
}
