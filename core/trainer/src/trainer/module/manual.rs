//! Manual optimization: `training_step` runs backwards and steps the optimizers.

use std::sync::Arc;

use crate::fabric::{FabricOptimizer, FabricOptimizers, NoSyncGuard, StepNumbers};
use crate::run::ClipAlgorithm;
use crate::runtime::StrategyRuntime;
use crate::trainer::StepContext;
use crate::{Error, Result};
use fulgurite_engine::parameter::PausedGradients;
use fulgurite_nn::Loss;

/// The state of a `training_step` with manual optimization.
pub(crate) struct Manual {
    pub(crate) optimizers: FabricOptimizers,
    pub(crate) runtime: Arc<StrategyRuntime>,
    /// `trainer.gradient_clip_val`.
    pub(crate) clip: Option<(f64, ClipAlgorithm)>,
}

impl std::fmt::Debug for Manual {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.optimizers.names()).finish()
    }
}

/// The result of an update by [`StepContext::optimizer_step`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct OptimizerStep {
    /// The mean of the losses since the optimizer's last step, over all ranks.
    pub loss: f64,
    /// The norm of the mean gradient of the optimizer's parameters, before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub lr: f64,
}

/// Methods for manual optimization
/// ([`automatic_optimization`](crate::trainer::LightningModule::automatic_optimization) is
/// `false`). They fail in other steps.
impl StepContext {
    fn manual(&mut self) -> Result<&mut Manual> {
        self.manual.as_mut().ok_or_else(|| {
            Error::other(
                "the trainer optimizes by itself here: backwards and optimizer steps belong into a \
                 `training_step` of a module that returns `false` from \
                 `LightningModule::automatic_optimization`",
            )
        })
    }

    /// Computes a loss with `forward`, runs its backward, clips (`trainer.gradient_clip_val`), and
    /// updates an optimizer's parameters.
    ///
    /// The parameters of the other optimizers are constants in `forward`. All ranks must call it in
    /// the same order. Collective.
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use fulgurite_core::Result;
    /// # use fulgurite_core::nn::Loss;
    /// # use fulgurite_core::trainer::StepContext;
    /// # fn loss_of(x: &Tensor) -> Result<Loss> {
    /// #     Ok(Loss::new(x.sqr()?.sum_all()?, x.dim(0)? as f64))
    /// # }
    /// # fn step(real: &Tensor, ctx: &mut StepContext) -> Result<()> {
    /// // in `training_step`:
    /// let critic = ctx.optimize("critic", |_| loss_of(real))?;
    /// ctx.log("critic_loss", critic.loss);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If the optimizer's name is unknown, and as [`manual_backward`](Self::manual_backward) and
    /// [`optimizer_step`](Self::optimizer_step).
    pub fn optimize(
        &mut self,
        optimizer: &str,
        forward: impl FnOnce(&mut Self) -> Result<Loss>,
    ) -> Result<OptimizerStep> {
        let turn = self.toggle_optimizer(optimizer)?;
        let loss = forward(self)?;
        self.manual_backward(&loss)?;
        drop((loss, turn));
        self.optimizer_step(optimizer)
    }

    /// As [`Fabric::toggle_optimizer`](crate::fabric::Fabric::toggle_optimizer).
    ///
    /// # Errors
    /// If the optimizer's name is unknown.
    pub fn toggle_optimizer(&mut self, optimizer: &str) -> Result<PausedGradients> {
        let manual = self.manual()?;
        manual.optimizers.get(optimizer)?.toggle()
    }

    /// Runs the backward of a loss. Collective, except under
    /// [`no_backward_sync`](Self::no_backward_sync).
    ///
    /// # Errors
    /// As [`Fabric::backward`](crate::fabric::Fabric::backward).
    pub fn manual_backward(&mut self, loss: &Loss) -> Result<()> {
        let is_padding = self.is_padding;
        let manual = self.manual()?;
        match is_padding {
            true => manual.runtime.backward(&loss.ignored()?),
            false => manual.runtime.backward(loss),
        }
    }

    /// As [`Fabric::no_backward_sync`](crate::fabric::Fabric::no_backward_sync), to accumulate
    /// gradients over batches.
    ///
    /// # Errors
    /// If the trainer optimizes.
    pub fn no_backward_sync(&mut self, enabled: bool) -> Result<NoSyncGuard> {
        Ok(self.manual()?.runtime.no_backward_sync(enabled))
    }

    /// Clips the gradients as configured, updates the optimizer's parameters, and clears their
    /// gradients. Collective.
    ///
    /// # Errors
    /// If the optimizer's name is unknown. [`Error::NonFinite`] on every rank if loss or gradient
    /// norm is not finite. As [`FabricOptimizer::step`].
    pub fn optimizer_step(&mut self, optimizer: &str) -> Result<OptimizerStep> {
        let manual = self.manual()?;
        let clip = manual.clip;
        let own = manual.optimizers.get_mut(optimizer)?;
        own.reduce(clip, false)?;
        let lr = own.learning_rate()?;
        let pending = own.update()?;
        own.finish_step()?;
        let StepNumbers { loss, grad_norm } = own.read(pending)?;
        self.last_step = Some((grad_norm, lr));
        let name = if optimizer.is_empty() { String::new() } else { format!("/{optimizer}") };
        for (what, value) in [("grad_norm", grad_norm), ("lr", lr)] {
            self.table.log_own(&format!("{what}{name}"), value, self.source);
        }
        Ok(OptimizerStep { loss, grad_norm, lr })
    }

    /// As [`FabricOptimizer::zero_grad`].
    ///
    /// # Errors
    /// If the optimizer's name is unknown, and as [`FabricOptimizer::zero_grad`].
    pub fn zero_grad(&mut self, optimizer: &str) -> Result<()> {
        self.manual()?.optimizers.get_mut(optimizer)?.zero_grad()
    }

    /// Returns an optimizer by name, to read or change it. Changes must be equal on all ranks.
    ///
    /// A single optimizer is called `""`.
    ///
    /// # Errors
    /// If the optimizer's name is unknown.
    pub fn optimizer_mut(&mut self, name: &str) -> Result<&mut FabricOptimizer> {
        self.manual()?.optimizers.get_mut(name)
    }
}
