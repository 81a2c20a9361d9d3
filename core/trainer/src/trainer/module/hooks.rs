//! The hooks of modules and callbacks.

use std::path::Path;

use crate::trainer::checkpoints::saved_state::SavedState;
use crate::trainer::{HookContext, RunStatus};
use crate::{Error, Result};
use fulgurite_nn::Loss;

/// Writes the trait, and the enum of its methods as values, which are called on the module and
/// every callback.
macro_rules! hooks {
    ($($(#[$doc:meta])* $name:ident $(($arg:ident: &$ty:ty))? => $variant:ident;)*) => {
        /// The hooks that callbacks and modules can implement. The defaults do nothing.
        ///
        /// `D` is the type of [`HookContext::data`]: the module's data module for a
        /// [`LightningModule`](crate::trainer::LightningModule), `()` for a
        /// [`Callback`](crate::trainer::Callback).
        ///
        /// Names and order in `fit` are as in Lightning, except that gradients are cleared after
        /// the update:
        ///
        /// 1. [`setup`](Self::setup), [`on_fit_start`](Self::on_fit_start), with a checkpoint
        ///    [`on_load_checkpoint`](Self::on_load_checkpoint), then the sanity check:
        ///    [`on_sanity_check_start`](Self::on_sanity_check_start), a short validation,
        ///    [`on_sanity_check_end`](Self::on_sanity_check_end);
        /// 2. [`on_train_start`](Self::on_train_start);
        /// 3. for each epoch [`on_train_epoch_start`](Self::on_train_epoch_start), its steps, and
        ///    [`on_train_epoch_end`](Self::on_train_epoch_end);
        /// 4. [`on_train_end`](Self::on_train_end), [`on_fit_end`](Self::on_fit_end),
        ///    [`teardown`](Self::teardown).
        ///
        /// A step has, for each of its micro-batches,
        /// [`on_train_batch_start`](Self::on_train_batch_start), the forward,
        /// [`on_before_backward`](Self::on_before_backward), the backward,
        /// [`on_after_backward`](Self::on_after_backward) and
        /// [`on_train_batch_end`](Self::on_train_batch_end); after the last backward
        /// [`on_before_optimizer_step`](Self::on_before_optimizer_step), the update,
        /// [`on_before_zero_grad`](Self::on_before_zero_grad), and in the end
        /// [`on_train_step_end`](Self::on_train_step_end).
        ///
        /// A validation comes after the step that made it due. It has
        /// [`on_validation_start`](Self::on_validation_start),
        /// [`on_validation_epoch_start`](Self::on_validation_epoch_start), for each batch
        /// [`on_validation_batch_start`](Self::on_validation_batch_start) and
        /// [`on_validation_batch_end`](Self::on_validation_batch_end),
        /// [`on_validation_epoch_end`](Self::on_validation_epoch_end) and
        /// [`on_validation_end`](Self::on_validation_end). A test and a prediction have the like.
        ///
        /// At each of these points every rank calls the callbacks' hooks in the order in which they
        /// were added, then the module's. Hooks of callbacks that
        /// [decide by metrics](crate::trainer::Callback::decides_by_metrics) come last.
        ///
        /// A run that resumes within an epoch does not start that epoch again.
        #[diagnostic::on_unimplemented(
            message = "`{Self}` has no hooks for the data `{D}`",
            note = "a module or callback without hooks says so in one line: `impl Hooks<{D}> for {Self} {{}}` \
                    (for a callback: `impl Hooks for {Self} {{}}`)"
        )]
        pub trait Hooks<D: ?Sized = ()> {
            $(
                $(#[$doc])*
                fn $name(&mut self, $($arg: &$ty,)? ctx: &mut HookContext<D>) -> Result<()> {
                    let _ = ($($arg,)? ctx);
                    Ok(())
                }
            )*

            /// Before a checkpoint is saved: adds state of this module or callback to it.
            ///
            /// Called on every rank; rank 0's state is saved.
            ///
            /// # Errors
            /// If the state cannot be saved; this ends the run.
            fn on_save_checkpoint(&mut self, state: &mut SavedState) -> Result<()> {
                let _ = state;
                Ok(())
            }

            /// Loads the state that [`on_save_checkpoint`](Self::on_save_checkpoint) saved.
            ///
            /// Called on every rank of a resumed run, if any state was saved.
            ///
            /// # Errors
            /// If the state does not belong to this module or callback.
            fn on_load_checkpoint(&mut self, state: &SavedState) -> Result<()> {
                let _ = state;
                Ok(())
            }
        }

        /// One of the [`Hooks`] as a value, which is called on the module and every callback.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Hook<'a> {
            $($variant $((&'a $ty))?,)*
        }

        impl Hook<'_> {
            pub(crate) fn call<D: ?Sized>(
                self,
                hooks: &mut (impl Hooks<D> + ?Sized),
                ctx: &mut HookContext<D>,
            ) -> Result<()> {
                match self {
                    $(Self::$variant $(($arg))? => hooks.$name($($arg,)? ctx),)*
                }
            }
        }
    };
}

hooks! {
    /// First, when the model is set up but before anything is loaded into it.
    /// [`HookContext::stage`] is the trainer's task.
    setup => Setup;

    /// Once before training, after `setup`.
    on_fit_start => FitStart;

    /// Before the short validation of a new run (`trainer.num_sanity_val_steps`).
    on_sanity_check_start => SanityCheckStart;

    /// After the short validation of a new run.
    on_sanity_check_end => SanityCheckEnd;

    /// Before the first step.
    on_train_start => TrainStart;

    /// Before the first step of each epoch.
    on_train_epoch_start => TrainEpochStart;

    /// Before each micro-batch; [`HookContext::batch_index`] is its index in the step.
    on_train_batch_start => TrainBatchStart;

    /// Before the backward of a micro-batch's loss, which is this rank's own.
    on_before_backward(loss: &Loss) => BeforeBackward;

    /// After a micro-batch's backward. The gradients are sums over the micro-batches so far; after
    /// the last one they are sums over all ranks.
    on_after_backward => AfterBackward;

    /// After each micro-batch.
    on_train_batch_end => TrainBatchEnd;

    /// Before the optimizer's update, when gradients are reduced and checked.
    on_before_optimizer_step => BeforeOptimizerStep;

    /// After the optimizer's update, before the gradients are cleared. No forward may run here.
    on_before_zero_grad => BeforeZeroGrad;

    /// After each optimizer step.
    on_train_step_end => TrainStepEnd;

    /// After the last step of each epoch.
    on_train_epoch_end => TrainEpochEnd;

    /// Before a validation.
    on_validation_start => ValidationStart;

    /// Before the first batch of a validation.
    on_validation_epoch_start => ValidationEpochStart;

    /// Before each batch of a validation.
    on_validation_batch_start => ValidationBatchStart;

    /// After each batch of a validation.
    on_validation_batch_end => ValidationBatchEnd;

    /// After the last batch, when [`HookContext::metrics`] has the values that the steps logged.
    on_validation_epoch_end => ValidationEpochEnd;

    /// After a validation.
    on_validation_end => ValidationEnd;

    /// Before a test.
    on_test_start => TestStart;

    /// Before the first batch of a test.
    on_test_epoch_start => TestEpochStart;

    /// Before each batch of a test.
    on_test_batch_start => TestBatchStart;

    /// After each batch of a test.
    on_test_batch_end => TestBatchEnd;

    /// After the last batch, when [`HookContext::metrics`] has the values that the steps logged.
    on_test_epoch_end => TestEpochEnd;

    /// After a test.
    on_test_end => TestEnd;

    /// Before a prediction.
    on_predict_start => PredictStart;

    /// Before the first batch of a prediction.
    on_predict_epoch_start => PredictEpochStart;

    /// Before each batch of a prediction.
    on_predict_batch_start => PredictBatchStart;

    /// After each batch of a prediction.
    on_predict_batch_end => PredictBatchEnd;

    /// After the last batch.
    on_predict_epoch_end => PredictEpochEnd;

    /// After a prediction.
    on_predict_end => PredictEnd;

    /// After a checkpoint was committed at `path`. With `checkpoint.async_save` this is some steps
    /// after the checkpoint's step.
    after_save_checkpoint(path: &Path) => AfterSaveCheckpoint;

    /// After the last step.
    on_train_end => TrainEnd;

    /// After everything is saved.
    on_fit_end => FitEnd;

    /// When an error or an interruption ([`Error::Interrupted`]) ends the run.
    ///
    /// Other ranks may have failed or not, so the hook must not call collectives.
    on_exception(error: &Error) => Exception;

    /// At the very end, also after an error. The hook must not call collectives.
    teardown(status: &RunStatus) => Teardown;
}
