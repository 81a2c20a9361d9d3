//! Callbacks: hooks that are added to a run from outside of the module.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::hooks::Hook;
use super::log_table::LogTable;
use super::runner::ModuleRunner;
use super::{HookContext, Hooks};
use crate::Result;

/// [`Hooks`] that are added to a run from outside of the module, with state that checkpoints save
/// (Lightning's `Callback`).
///
/// ```
/// use fulgurite_core::Result;
/// use fulgurite_core::trainer::{Callback, HookContext, Hooks, Trainer};
///
/// /// Ends a run whose loss is low enough.
/// struct StopBelow(f64);
///
/// impl Hooks for StopBelow {
///     fn on_train_step_end(&mut self, ctx: &mut HookContext) -> Result<()> {
///         if ctx.metrics["train_loss"] < self.0 {
///             ctx.stop();
///         }
///         Ok(())
///     }
/// }
/// impl Callback for StopBelow {}
///
/// let trainer = Trainer::default().with_callback(Box::new(StopBelow(0.1)));
/// ```
///
/// A run that resumes within an epoch does not start it again, so what a callback remembers from
/// the beginning of an epoch must be part of its [`state`](Callback::state).
pub trait Callback: Hooks + Send {
    /// The key of the callback's state in checkpoints. Callbacks with the same key get their states
    /// in the order in which they were added.
    fn state_key(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// The callback's state, which a checkpoint saves and a resumed run loads; `None` for none.
    /// Called on every rank; that of rank 0 is saved.
    fn state(&self) -> Option<serde_json::Value> {
        None
    }

    /// Loads a state that [`state`](Self::state) has returned. Called on every rank of a resumed
    /// run, before any hook.
    ///
    /// # Errors
    /// If it is no state of this callback.
    fn load_state(&mut self, state: serde_json::Value) -> Result<()> {
        let _ = state;
        Ok(())
    }
}

/// A callback's state in a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CallbackState {
    key: String,
    state: serde_json::Value,
}

/// The position of a run when a hook is called.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    pub(super) step: u64,
    pub(super) epoch: u64,
    /// Whether what is logged is wanted.
    pub(super) logged: bool,
}

/// The callbacks of a run, and whether a hook has asked it to stop.
pub(super) struct Callbacks {
    callbacks: Vec<Box<dyn Callback>>,
    rank: usize,
    world_size: usize,
    seed: u64,
    print: fn(&str),
    stop: bool,
}

impl Callbacks {
    pub(super) fn new(
        callbacks: Vec<Box<dyn Callback>>,
        (rank, world_size): (usize, usize),
        seed: u64,
        print: fn(&str),
    ) -> Self {
        Self { callbacks, rank, world_size, seed, print, stop: false }
    }

    /// The states of the callbacks, for a checkpoint.
    pub(super) fn states(&self) -> Vec<CallbackState> {
        let states = self.callbacks.iter().filter_map(|callback| {
            Some(CallbackState { key: callback.state_key(), state: callback.state()? })
        });
        states.collect()
    }

    /// Loads the states of the callbacks from a checkpoint.
    pub(super) fn load_states(&mut self, mut states: Vec<CallbackState>) -> Result<()> {
        for callback in &mut self.callbacks {
            let key = callback.state_key();
            if let Some(index) = states.iter().position(|state| state.key == key) {
                callback.load_state(states.remove(index).state)?;
            }
        }
        for CallbackState { key, .. } in states.iter().filter(|_| self.rank == 0) {
            tracing::warn!("the checkpoint has a state of a callback that this run lacks: `{key}`");
        }
        Ok(())
    }

    /// Whether a hook on this rank has asked to stop.
    pub(super) fn stop_requested(&self) -> bool {
        self.stop
    }

    /// Calls a hook of every callback, then the module's.
    pub(super) fn call(
        &mut self,
        hook: Hook,
        module: &mut dyn ModuleRunner,
        progress: Progress,
        metrics: &BTreeMap<String, f64>,
        table: &mut LogTable,
    ) -> Result<()> {
        let mut printed = Vec::new();
        let mut ctx = HookContext {
            step: progress.step,
            epoch: progress.epoch,
            rank: self.rank,
            world_size: self.world_size,
            seed: self.seed,
            metrics,
            data: &(),
            stop: &mut self.stop,
            printed: &mut printed,
            wanted: progress.logged,
            table,
        };
        let mut callbacks = self.callbacks.iter_mut();
        let result = callbacks
            .try_for_each(|callback| hook.call(&mut **callback, &mut ctx))
            .and_then(|()| module.call_hook(hook, &mut ctx));
        printed.iter().for_each(|text| (self.print)(text));
        result
    }
}
