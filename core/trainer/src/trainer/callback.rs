//! Behaviour that is added to a run without touching the module.

use super::HookContext;
use crate::Result;

/// Hooks around a run (Lightning's `Callback`). Every rank calls every hook, callbacks before the
/// module's hook of the same name, in the order they were added.
///
/// Order in `fit`: `on_fit_start`, `on_train_start`, then for each epoch `on_train_epoch_start`, its
/// steps (`on_before_optimizer_step`, `on_train_step_end`, and `on_validation_start`,
/// `on_validation_end` when due) and `on_train_epoch_end`, and last `on_train_end`, `on_fit_end`.
///
/// A run that resumes within an epoch does not start it again: what a callback needs to know of an
/// epoch's beginning belongs to its [`state`](Callback::state).
pub trait Callback: Send {
    /// What the callback's state is saved under. Of several callbacks with the same key, the first
    /// added gets the first state, and so on.
    fn state_key(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// What a checkpoint keeps of this callback, so that a resumed run goes on with it; `None` if
    /// there is nothing. Asked of every rank; rank 0's is saved.
    fn state(&self) -> Option<serde_json::Value> {
        None
    }

    /// Takes up a state that [`state`](Self::state) gave when a checkpoint was saved. Called on
    /// every rank of a run that resumes from it, before any hook.
    ///
    /// # Errors
    /// If it is no state of this callback.
    fn load_state(&mut self, state: serde_json::Value) -> Result<()> {
        let _ = state;
        Ok(())
    }

    /// Once, when the model is set up.
    fn on_fit_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step.
    fn on_train_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before the first step of each epoch.
    fn on_train_epoch_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// When gradients are complete, reduced and checked, before the optimizer uses them.
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After each optimizer step.
    fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After the last step of each epoch.
    fn on_train_epoch_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// Before a validation.
    fn on_validation_start(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a validation.
    fn on_validation_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// After a checkpoint was committed at `path`; with `checkpoint.async_save` some steps after the
    /// one whose result it holds.
    fn on_save_checkpoint(&mut self, path: &std::path::Path, ctx: &mut HookContext) -> Result<()> {
        let _ = (path, ctx);
        Ok(())
    }

    /// After the last step.
    fn on_train_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }

    /// At the very end, when everything is saved.
    fn on_fit_end(&mut self, ctx: &mut HookContext) -> Result<()> {
        let _ = ctx;
        Ok(())
    }
}
