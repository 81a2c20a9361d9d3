//! The hooks of modules and callbacks.

use std::path::Path;

use super::HookContext;
use crate::Result;

/// The hooks that callbacks and modules can implement. By default each does nothing.
///
/// `D` is the type of [`HookContext::data`]: the module's data module for a
/// [`LightningModule`](super::LightningModule), `()` for a [`Callback`](super::Callback).
///
/// The names are Lightning's, and so is the order in `fit`:
///
/// 1. [`on_fit_start`](Self::on_fit_start), [`on_train_start`](Self::on_train_start);
/// 2. for each epoch [`on_train_epoch_start`](Self::on_train_epoch_start), its steps
///    ([`on_before_optimizer_step`](Self::on_before_optimizer_step) and
///    [`on_train_step_end`](Self::on_train_step_end)), and
///    [`on_train_epoch_end`](Self::on_train_epoch_end);
/// 3. [`on_train_end`](Self::on_train_end), [`on_fit_end`](Self::on_fit_end).
///
/// [`on_validation_start`](Self::on_validation_start) and
/// [`on_validation_end`](Self::on_validation_end) come after the step that made a validation due,
/// [`on_save_checkpoint`](Self::on_save_checkpoint) after each checkpoint. A test has
/// [`on_test_start`](Self::on_test_start) and [`on_test_end`](Self::on_test_end), a prediction
/// [`on_predict_start`](Self::on_predict_start) and [`on_predict_end`](Self::on_predict_end). At each of these points
/// every rank calls the callbacks' hooks, in the order in which the callbacks were added, and then
/// the module's.
///
/// A run that resumes within an epoch does not start that epoch again.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no hooks for the data `{D}`",
    note = "a module or callback without hooks says so in one line: `impl Hooks<{D}> for {Self} {{}}` \
            (for a callback: `impl Hooks for {Self} {{}}`)"
)]
pub trait Hooks<D: ?Sized = ()> {
    /// Once, after the setup of the model.
    fn on_fit_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step.
    fn on_train_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step of each epoch.
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the optimizer's update, when gradients are reduced and checked.
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After each optimizer step.
    fn on_train_step_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After the last step of each epoch.
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before a validation.
    fn on_validation_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a validation.
    fn on_validation_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before a test.
    fn on_test_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a test.
    fn on_test_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before a prediction.
    fn on_predict_start(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a prediction.
    fn on_predict_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a checkpoint was committed at `path`: with `checkpoint.async_save` some steps after
    /// the step of the checkpoint.
    fn on_save_checkpoint(&mut self, path: &Path, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = (path, ctx);
        Ok(())
    }

    /// After the last step.
    fn on_train_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// At the very end, when everything is saved.
    fn on_fit_end(&mut self, ctx: &mut HookContext<D>) -> Result<()> {
        let _ = ctx;
        Ok(())
    }
}

/// One of the [`Hooks`] as a value, to be called on the module and every callback.
#[derive(Debug, Clone, Copy)]
pub(super) enum Hook<'a> {
    FitStart,
    TrainStart,
    TrainEpochStart,
    BeforeOptimizerStep,
    TrainStepEnd,
    TrainEpochEnd,
    ValidationStart,
    ValidationEnd,
    TestStart,
    TestEnd,
    PredictStart,
    PredictEnd,
    SaveCheckpoint(&'a Path),
    TrainEnd,
    FitEnd,
}

impl Hook<'_> {
    pub(super) fn call<D: ?Sized>(
        self,
        hooks: &mut (impl Hooks<D> + ?Sized),
        ctx: &mut HookContext<D>,
    ) -> Result<()> {
        match self {
            Self::FitStart => hooks.on_fit_start(ctx),
            Self::TrainStart => hooks.on_train_start(ctx),
            Self::TrainEpochStart => hooks.on_train_epoch_start(ctx),
            Self::BeforeOptimizerStep => hooks.on_before_optimizer_step(ctx),
            Self::TrainStepEnd => hooks.on_train_step_end(ctx),
            Self::TrainEpochEnd => hooks.on_train_epoch_end(ctx),
            Self::ValidationStart => hooks.on_validation_start(ctx),
            Self::ValidationEnd => hooks.on_validation_end(ctx),
            Self::TestStart => hooks.on_test_start(ctx),
            Self::TestEnd => hooks.on_test_end(ctx),
            Self::PredictStart => hooks.on_predict_start(ctx),
            Self::PredictEnd => hooks.on_predict_end(ctx),
            Self::SaveCheckpoint(path) => hooks.on_save_checkpoint(path, ctx),
            Self::TrainEnd => hooks.on_train_end(ctx),
            Self::FitEnd => hooks.on_fit_end(ctx),
        }
    }
}
