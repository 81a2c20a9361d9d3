//! An optimizer's step: its loss, its gradient norm and its end.
//!
//! Each of several optimizers has its own losses, gradients and totals. A backward computes and
//! communicates gradients only of the parameters that take one when it begins.
//!
//! Loss and squared norm stay on their device. Either the host reads both together
//! ([`read_step`](StrategyRuntime::read_step)), or ranks sum both on the device
//! ([`sum_on_device`](StrategyRuntime::sum_on_device)).

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use super::runtime::{RuntimeState, StrategyRuntime};
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::execution::read;
use fulgurite_engine::mesh::{DP_CP, DP_SHARD_CP};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::{GradScale, SquaredNorm, StepScale};
use fulgurite_engine::parameter::ParameterSlot;
use fulgurite_engine::strategy::{Loss, StepTotals, StrategyContext};

/// The state of an optimizer's step.
#[derive(Default)]
pub(super) struct StepState {
    /// Summed loss of the micro-batches so far, on its device.
    pub(super) loss_sum: Option<Tensor>,
    /// Loss and norm after [`read_step`](StrategyRuntime::read_step).
    pub(super) read: Option<ReadAhead>,
    pub(super) count: f64,
    /// The first micro-batch count that was negative or not finite.
    pub(super) wrong_count: Option<f64>,
    pub(super) totals: Option<StepTotals>,
    /// Whether the first step's gradients were audited.
    pub(super) audited: bool,
    /// Whether the latest backward skipped the gradient reduction over ranks.
    unsynchronised: bool,
}

/// This rank's loss and squared norm, read from the device together.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadAhead {
    pub(super) loss_sum: f64,
    squared_norm: f64,
}

/// Sums of a step over all ranks, on the device of its gradients.
#[derive(Debug)]
pub(crate) struct DeviceSums {
    /// The loss: one f64.
    loss: Tensor,
    /// The squared norm of the mean gradient: one f64.
    squared_norm: Tensor,
    /// The factor that turns this rank's gradients into the mean.
    factor: f64,
    /// The loss's count over all ranks, on the host.
    pub(crate) count: f64,
}

impl DeviceSums {
    /// Returns the step's scale: the mean gradient times `factor`, with its norm clipped to
    /// `max_norm` and its elements to `clip_value`. If the scale of the step `before` skips the
    /// update, this one skips too.
    pub(crate) fn scale(
        &self,
        (factor, clip_value): (f64, Option<f64>),
        max_norm: Option<f64>,
        before: Option<&StepScale>,
    ) -> Result<StepScale> {
        let scale = GradScale { factor: self.factor * factor, clip_value };
        StepScale::on_device((&self.loss, &self.squared_norm), &scale, max_norm, before)
    }
}

impl StrategyRuntime {
    /// Checks that the step's last backward reduced gradients over ranks.
    ///
    /// # Errors
    /// If the gradients were not reduced: each rank would update with its own gradients.
    pub(crate) fn check_synchronised(&self, optimizer: usize) -> Result<()> {
        if !self.lock_state()?.steps[optimizer].unsynchronised {
            return Ok(());
        }
        Err(Error::other(
            "the optimizer cannot step: the step's last backward ran under `no_backward_sync`, so \
             its gradients are on their own ranks only. Run the last micro-batch's backward with \
             `no_backward_sync(false)`, or without a guard",
        ))
    }

    /// Whether the host may read a step's loss and norm after the update. False with several
    /// optimizers, and in f16, whose loss scale depends on the norm.
    pub(crate) fn can_defer_reads(&self) -> Result<bool> {
        let state = self.lock_state()?;
        let one = state.steps.len() == 1 && state.loss_scale.is_none();
        Ok(one && state.strategy.capabilities().deferred_reads)
    }

    /// Reads the step's loss and this rank's part of the norm together: one wait for the device
    /// instead of two. The [totals](Self::step_totals) and the next [norm](Self::gradient_norm) use
    /// these values. Not collective.
    pub(crate) fn read_step(&self, optimizer: usize) -> Result<()> {
        let _phase = self.phase("gradient norm");
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        let Some(loss_sum) = state.steps[optimizer].loss_sum.clone() else { return Ok(()) };
        let squares = state.squared_norm(context, optimizer)?;
        let (squared_norm, loss_sum) = squares.read_with(&loss_sum, "loss and gradient norm")?;
        state.steps[optimizer].read = Some(ReadAhead { loss_sum, squared_norm });
        Ok(())
    }

    /// Sums the step's loss and squared norm over all ranks, on their device. Only the count goes
    /// through the host. Collective.
    ///
    /// # Errors
    /// Before a backward. On every rank, if any rank's loss count is negative or not finite.
    pub(crate) fn sum_on_device(&self, optimizer: usize) -> Result<DeviceSums> {
        let _phase = self.phase("gradient norm");
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        let local_count = state.steps[optimizer].count;
        let Some(loss) = state.steps[optimizer].loss_sum.clone() else {
            return Err(Error::other("there was no backward since the optimizer's last step"));
        };
        let (world, dp_cp) = (self.mesh().world(), self.mesh().group(DP_CP)?);
        let count = self.total_count(state, optimizer)?;
        let totals = StepTotals { loss_sum: f64::NAN, count, flags: Vec::new() };
        let factor = state.strategy.grad_scale(&totals, local_count)?;
        let squares = state.squared_norm(context, optimizer)?.on(loss.device())?;
        // Two multiplications, as on the host, for the same bits.
        let squares = ((squares * factor)? * factor)?;
        // New memory: the loss may share the memory of its graph.
        let both = Tensor::cat(&[loss.reshape(1)?, squares.reshape(1)?], 0)?;
        let [loss, squared_norm] = if dp_cp.size() == world.size() {
            world.run(Collective::all_reduce(&both, ReduceOp::Sum))?;
            [both.narrow(0, 0, 1)?, both.narrow(0, 1, 1)?]
        } else {
            // Tensor-parallel ranks have the same loss, but each has its own part of the norm.
            let [loss, squares] = [both.narrow(0, 0, 1)?.copy()?, both.narrow(0, 1, 1)?.copy()?];
            dp_cp.run(Collective::all_reduce(&loss, ReduceOp::Sum))?;
            world.run(Collective::all_reduce(&squares, ReduceOp::Sum))?;
            [loss, squares]
        };
        Ok(DeviceSums { loss, squared_norm, factor, count })
    }

    /// Returns the norm of the mean gradient of an optimizer's parameters. It may be infinite or
    /// NaN. Collective.
    pub(crate) fn gradient_norm(&self, optimizer: usize) -> Result<f64> {
        let is_read = self.lock_state()?.steps[optimizer].read.is_some();
        // `read_step` has recorded this phase already.
        let _phase = (!is_read).then(|| self.phase("gradient norm"));
        let scale = self.grad_scale(optimizer)?;
        let context = self.context()?;
        let squares = {
            let state = &mut *self.lock_state()?;
            // Taken, not kept: hooks may change the gradients afterwards.
            match state.steps[optimizer].read.take() {
                Some(read) => read.squared_norm,
                None => state.squared_norm(context, optimizer)?.read()?,
            }
        };
        let squares = Tensor::new(&[squares * scale * scale], &Device::Cpu)?;
        self.mesh().world().run(Collective::all_reduce(&squares, ReduceOp::Sum))?;
        Ok(read::host::<f64>(&squares)?[0].sqrt())
    }

    /// Returns the mean gradient's norm for each group of an optimizer's parameters. Collective.
    pub(crate) fn gradient_norms(
        &self,
        optimizer: usize,
        group: &dyn Fn(&str) -> String,
    ) -> Result<BTreeMap<String, f64>> {
        let scale = self.grad_scale(optimizer)?;
        let mut squares = BTreeMap::<String, SquaredNorm>::new();
        for parameter in self.tree()?.trainable().filter(|p| p.optimizer() == optimizer) {
            let own = std::slice::from_ref(parameter);
            let square = SquaredNorm::of(own, &|dim| self.mesh().coordinate(dim))?;
            let sum = squares.entry(group(parameter.fqn())).or_default();
            *sum = std::mem::take(sum).plus(square)?;
        }
        let (groups, squares): (Vec<_>, Vec<_>) = squares.into_iter().unzip();
        let squares = SquaredNorm::read_all(&squares)?;
        let squares: Vec<_> = squares.into_iter().map(|square| square * scale * scale).collect();
        let sums = Tensor::new(squares, &Device::Cpu)?;
        self.mesh().world().run(Collective::all_reduce(&sums, ReduceOp::Sum))?;
        let norms = read::host::<f64>(&sums)?.into_iter().map(f64::sqrt);
        Ok(groups.into_iter().zip(norms).collect())
    }

    /// Clears an optimizer's gradients after its update, or after a step that was skipped, and
    /// makes the model ready for a forward. Collective.
    pub(crate) fn finish_step(&self, optimizer: usize, skipped: bool) -> Result<()> {
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        state.clear_gradients(context, optimizer);
        state.strategy.finish_step(context)?;
        // Replicas that train separately keep their own buffers until they synchronise.
        let differ = state.extensions().replicas_differ();
        let dim = if differ { DP_SHARD_CP } else { DP_CP };
        match skipped {
            true => forget_step(context.tree),
            false if differ => self.after_step(self.mesh().group(dim)?)?,
            false => self.after_step(self.mesh().loss_ranks()?)?,
        }
        self.synchronise_buffers(dim)
    }

    /// Discards a step that failed before the optimizers' updates, so that the step can begin
    /// again. Collective. No collective of the failed step may still run.
    pub(crate) fn abandon_step(&self) -> Result<()> {
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        context.slots.iter().for_each(ParameterSlot::abandon_backward);
        forget_step(context.tree);
        (0..state.steps.len()).for_each(|optimizer| state.clear_gradients(context, optimizer));
        if state.extensions().abandon_step(context)? {
            return Ok(());
        }
        Err(Error::other(format!(
            "strategy `{}` cannot begin a step again that has failed, which `trainer.micro_batch_size` = \"auto\" \
             does",
            state.strategy.name()
        )))
    }

    /// Clears an optimizer's gradients since its last step. Not collective.
    ///
    /// # Errors
    /// If the gradients were not reduced over ranks: the strategy still holds them.
    pub(crate) fn zero_grad(&self, optimizer: usize) -> Result<()> {
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        if state.steps[optimizer].unsynchronised {
            return Err(Error::other(
                "gradients of a backward under `no_backward_sync` cannot be forgotten: the strategy keeps \
                 them for the next backward. Run one without the guard first",
            ));
        }
        state.clear_gradients(context, optimizer);
        Ok(())
    }
}

impl RuntimeState {
    /// Returns this rank's part of the squared norm of an optimizer's gradients.
    fn squared_norm(&self, context: StrategyContext<'_>, optimizer: usize) -> Result<SquaredNorm> {
        if self.steps.len() == 1 {
            return self.strategy.squared_norm(context);
        }
        let is_own = |slot: &&ParameterSlot| slot.optimizer() == optimizer;
        let slots: Vec<ParameterSlot> = context.slots.iter().filter(is_own).cloned().collect();
        self.strategy.squared_norm(StrategyContext { slots: &slots, ..context })
    }

    /// Clears the gradients of an optimizer's parameters and the state of its step.
    fn clear_gradients(&mut self, context: StrategyContext<'_>, optimizer: usize) {
        for (slot, delivered) in context.slots.iter().zip(&mut self.delivered) {
            if slot.optimizer() == optimizer {
                slot.end_step();
                *delivered = false;
            }
        }
        let step = &mut self.steps[optimizer];
        *step = StepState { audited: step.audited, ..StepState::default() };
    }
}

impl StepState {
    /// Adds a micro-batch's loss, whose sum is `loss_sum`. `synchronised` says whether its backward
    /// reduces gradients over ranks.
    pub(super) fn add(&mut self, loss: &Loss, loss_sum: &Tensor, synchronised: bool) -> Result<()> {
        self.loss_sum = Some(match self.loss_sum.take() {
            Some(before) => (before + loss_sum)?,
            None => loss_sum.clone(),
        });
        self.add_count(loss.count());
        (self.totals, self.read) = (None, None);
        self.unsynchronised = !synchronised;
        Ok(())
    }

    /// Adds the count of a micro-batch's loss.
    pub(super) fn add_count(&mut self, count: f64) {
        if !(count >= 0.0 && count.is_finite()) {
            self.wrong_count.get_or_insert(count);
        }
        self.count += count;
    }
}

/// Forgets what layers know of a step that changes nothing.
fn forget_step(tree: &ModuleTree) {
    tree.after_step().iter().for_each(|layer| drop(layer.take()));
}
