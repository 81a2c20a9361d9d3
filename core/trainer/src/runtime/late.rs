//! What a step does on the device alone, so that nobody waits for it.

use candle_core::Tensor;

use super::StrategyRuntime;
use crate::{Error, Result};
use fulgurite_engine::collective::{Collective, ReduceOp};
use fulgurite_engine::mesh::DP_CP;
use fulgurite_engine::optim::{GradScale, StepScale};
use fulgurite_engine::strategy::StepTotals;

impl StrategyRuntime {
    /// Whether [`late_scale`](Self::late_scale) may be asked for: the strategy allows it, there is one optimizer, and the
    /// loss has no scale, which the host sets after each step.
    pub(crate) fn can_step_late(&self) -> Result<bool> {
        let state = self.lock_state()?;
        let one = state.steps.len() == 1 && state.loss_scale.is_none();
        Ok(one && state.strategy.can_step_late())
    }

    /// The scale of this rank's gradients in the optimizer's update, made on the device of the loss, and what the step's
    /// losses count, which the host knows without it. `max_norm` and `clip_value` are limits of clipping; the scale `before`
    /// is that of the last step that was left on the device. Collective.
    pub(crate) fn late_scale(
        &self,
        optimizer: usize,
        (max_norm, clip_value): (Option<f64>, Option<f64>),
        before: Option<&StepScale>,
    ) -> Result<(StepScale, f64)> {
        let _phase = self.phase("gradient norm");
        let context = self.context()?;
        let state = &mut *self.lock_state()?;
        let local_count = state.steps[optimizer].count;
        let Some(loss_sum) = state.steps[optimizer].loss_sum.clone() else {
            return Err(Error::other("there was no backward since the optimizer's last step"));
        };
        let (world, dp_cp) = (self.mesh().world(), self.mesh().group(DP_CP)?);
        let count = self.total_count(state, optimizer)?;
        let totals = StepTotals { loss_sum: f64::NAN, count, flags: Vec::new() };
        let factor = state.strategy.grad_scale(&totals, local_count)?;
        let squares = state.squared_norm(context, optimizer)?.on(loss_sum.device())?;
        // As the host does it, so that the bits are the same.
        let squares = ((squares * factor)? * factor)?;
        // New memory: the loss may share that of its graph.
        let both = Tensor::cat(&[loss_sum.reshape(1)?, squares.reshape(1)?], 0)?;
        let [loss_sum, squares] = if dp_cp.size() == world.size() {
            world.run(Collective::all_reduce(&both, ReduceOp::Sum))?;
            [both.narrow(0, 0, 1)?, both.narrow(0, 1, 1)?]
        } else {
            // Tensor-parallel ranks have the same loss, and each its part of the norm.
            let [loss_sum, squares] =
                [both.narrow(0, 0, 1)?.copy()?, both.narrow(0, 1, 1)?.copy()?];
            dp_cp.run(Collective::all_reduce(&loss_sum, ReduceOp::Sum))?;
            world.run(Collective::all_reduce(&squares, ReduceOp::Sum))?;
            [loss_sum, squares]
        };
        let scale = GradScale { factor, clip_value };
        Ok((StepScale::on_device((&loss_sum, &squares), &scale, max_norm, before)?, count))
    }
}
