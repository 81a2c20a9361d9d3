//! A step's loss and count over all ranks, and what ranks tell each other besides if one of them
//! asks.
//!
//! The sum and the count travel in one all-reduce. A rank that has more to say sends NaN in place
//! of its count, so that every rank hears it in the same collective, and all of them exchange
//! [reports](Report) then. So a step in which nothing is unusual communicates nothing more.

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::UnusedParameters;
use super::runtime::{RuntimeState, StrategyRuntime, explain_difference};
use super::step::StepState;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ProcessGroup, ReduceOp, all_gather_object};
use fulgurite_engine::execution::read;
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::parameter::ParameterSlot;
use fulgurite_engine::strategy::{Loss, StepTotals};

/// What a rank says of a step if any rank asks. Numbers are bits, since JSON has no NaN.
#[derive(Serialize, Deserialize)]
struct Report {
    rank: usize,
    count: u64,
    wrong_count: Option<u64>,
    /// The parameters that have no gradient on this rank, by index.
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

    /// The totals of a loss of which no backward is run. Collective.
    pub(crate) fn totals_of(&self, loss: &Loss) -> Result<StepTotals> {
        self.totals_of_losses(loss.sum_value()?, &[loss.count()])
    }

    /// The same of several losses of this rank, whose sums add up to `loss_sum`. Collective.
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
        let sent = [loss_sum, step.count_or_question(unused)];
        let loss = sum(&sent, &**self.mesh().group(DP_CP)?)?;
        let count = self.answered(loss[1], step, unused)?;
        // Tensor-parallel ranks have the same loss, but each has its own flags.
        let flags = match flags {
            [] => Vec::new(),
            flags => sum(flags, &**self.mesh().world())?,
        };
        Ok(StepTotals { loss_sum: loss[0], count, flags })
    }

    /// What the step's losses count, of all ranks, without reading a loss. Collective.
    pub(super) fn total_count(&self, state: &RuntimeState, optimizer: usize) -> Result<f64> {
        let unused = self.unused(state, optimizer);
        let step = &state.steps[optimizer];
        let count = Tensor::new(&[step.count_or_question(&unused)], &Device::Cpu)?;
        let collective = Collective::all_reduce(&count, ReduceOp::Sum);
        self.mesh().group(DP_CP)?.run(collective).map_err(explain_difference)?;
        self.answered(read::host::<f64>(&count)?[0], step, &unused)
    }

    /// The factor of this rank's gradients in the optimizer's update. Collective as
    /// [`step_totals`](Self::step_totals).
    pub(crate) fn grad_scale(&self, optimizer: usize) -> Result<f64> {
        let state = &mut *self.lock_state()?;
        let totals = self.totals(state, optimizer, &[])?;
        let factor = state.loss_scale.map_or(1.0, |scale| scale.factor());
        let local_count = state.steps[optimizer].count;
        Ok(state.strategy.grad_scale(&totals, local_count)? / factor)
    }

    /// Sets what happens to an optimizer's parameters without a gradient.
    pub(crate) fn set_unused(&self, optimizer: usize, policy: UnusedParameters) {
        self.unused_policies().insert(optimizer, policy);
    }

    /// The optimizer's parameters that have got no gradient on this rank since its last step, by
    /// index, if that makes a difference: in the first step the audit asks for them.
    fn unused(&self, state: &RuntimeState, optimizer: usize) -> Vec<usize> {
        let policy = self.unused_policies().get(&optimizer).copied().unwrap_or_default();
        if !state.steps[optimizer].audited || policy == UnusedParameters::Zero {
            return Vec::new();
        }
        let slots = self.slots().iter().zip(&state.delivered).enumerate();
        let own = slots.filter(|(_, (slot, _))| is_of(slot, optimizer));
        own.filter(|(_, (_, delivered))| !**delivered).map(|(index, _)| index).collect()
    }

    /// The sum of all counts, if `sum` is one. Otherwise some rank has asked, and all tell what
    /// they know: parameters without a gradient on any rank lose theirs, which is zero, so that the
    /// optimizer leaves them alone.
    ///
    /// # Errors
    /// On every rank, if a count is negative or not finite on any.
    fn answered(&self, sum: f64, step: &StepState, unused: &[usize]) -> Result<f64> {
        if sum.is_finite() {
            return Ok(sum);
        }
        let report = Report {
            rank: self.mesh().world().rank(),
            count: step.count.to_bits(),
            wrong_count: step.wrong_count.map(f64::to_bits),
            unused: unused.to_owned(),
        };
        let reports = all_gather_object(&**self.mesh().group(DP_CP)?, &report)?;
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
    /// What this rank adds to the sum of counts: its own, or NaN if it has more to say.
    fn count_or_question(&self, unused: &[usize]) -> f64 {
        let asks = self.wrong_count.is_some() || !unused.is_empty();
        if asks { f64::NAN } else { self.count }
    }
}

/// Whether the optimizer updates the parameter.
pub(super) fn is_of(slot: &ParameterSlot, optimizer: usize) -> bool {
    slot.requires_grad() && slot.optimizer() == optimizer
}

/// The error about a loss of `rank` that counts something else than items.
fn wrong_count(rank: usize, count: f64) -> Error {
    Error::other(format!(
        "the count of the loss on rank {rank} is {count}: a `Loss` is a sum and the number of its items, which is finite and \
         not negative; look at how `Loss::new` gets its count"
    ))
}
