//! Calling hooks: callbacks first, then the module.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Callback, HookContext, LightningModule};
use crate::Result;

/// The moments at which hooks are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    FitStart,
    TrainStart,
    TrainEpochStart,
    BeforeOptimizerStep,
    TrainStepEnd,
    TrainEpochEnd,
    ValidationStart,
    ValidationEnd,
    TrainEnd,
    FitEnd,
}

/// Where in the run a hook is called.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moment {
    pub(super) step: u64,
    pub(super) epoch: u64,
}

/// What a checkpoint keeps of a callback.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CallbackState {
    key: String,
    state: serde_json::Value,
}

/// The callbacks of a run, and what hooks say back.
pub(super) struct Hooks {
    callbacks: Vec<Box<dyn Callback>>,
    rank: usize,
    world_size: usize,
    seed: u64,
    print: fn(&str),
    stop: bool,
}

impl Hooks {
    pub(super) fn new(
        callbacks: Vec<Box<dyn Callback>>,
        (rank, world_size): (usize, usize),
        seed: u64,
        print: fn(&str),
    ) -> Self {
        Self { callbacks, rank, world_size, seed, print, stop: false }
    }

    /// What a checkpoint keeps of the callbacks.
    pub(super) fn states(&self) -> Vec<CallbackState> {
        let states = self.callbacks.iter().filter_map(|callback| {
            Some(CallbackState { key: callback.state_key(), state: callback.state()? })
        });
        states.collect()
    }

    /// Gives callbacks what a checkpoint has kept of them.
    pub(super) fn load_states(&mut self, mut states: Vec<CallbackState>) -> Result<()> {
        for callback in &mut self.callbacks {
            let key = callback.state_key();
            if let Some(place) = states.iter().position(|state| state.key == key) {
                callback.load_state(states.remove(place).state)?;
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

    pub(super) fn call<M: LightningModule>(
        &mut self,
        hook: Hook,
        module: &mut M,
        moment: Moment,
        metrics: &BTreeMap<String, f64>,
        data: &dyn Any,
    ) -> Result<()> {
        self.with_context(moment, metrics, data, |callbacks, ctx| {
            for callback in callbacks {
                match hook {
                    Hook::FitStart => callback.on_fit_start(ctx),
                    Hook::TrainStart => callback.on_train_start(ctx),
                    Hook::TrainEpochStart => callback.on_train_epoch_start(ctx),
                    Hook::BeforeOptimizerStep => callback.on_before_optimizer_step(ctx),
                    Hook::TrainStepEnd => callback.on_train_step_end(ctx),
                    Hook::TrainEpochEnd => callback.on_train_epoch_end(ctx),
                    Hook::ValidationStart => callback.on_validation_start(ctx),
                    Hook::ValidationEnd => callback.on_validation_end(ctx),
                    Hook::TrainEnd => callback.on_train_end(ctx),
                    Hook::FitEnd => callback.on_fit_end(ctx),
                }?;
            }
            match hook {
                Hook::FitStart => module.on_fit_start(ctx),
                Hook::TrainStart => module.on_train_start(ctx),
                Hook::TrainEpochStart => module.on_train_epoch_start(ctx),
                Hook::BeforeOptimizerStep => module.on_before_optimizer_step(ctx),
                Hook::TrainStepEnd => module.on_train_step_end(ctx),
                Hook::TrainEpochEnd => module.on_train_epoch_end(ctx),
                Hook::ValidationStart => module.on_validation_start(ctx),
                Hook::ValidationEnd => module.on_validation_end(ctx),
                Hook::TrainEnd => module.on_train_end(ctx),
                Hook::FitEnd => module.on_fit_end(ctx),
            }
        })
    }

    pub(super) fn saved(
        &mut self,
        path: &Path,
        moment: Moment,
        metrics: &BTreeMap<String, f64>,
        data: &dyn Any,
    ) -> Result<()> {
        self.with_context(moment, metrics, data, |callbacks, ctx| {
            callbacks.iter_mut().try_for_each(|callback| callback.on_save_checkpoint(path, ctx))
        })
    }

    fn with_context(
        &mut self,
        moment: Moment,
        metrics: &BTreeMap<String, f64>,
        data: &dyn Any,
        f: impl FnOnce(&mut [Box<dyn Callback>], &mut HookContext) -> Result<()>,
    ) -> Result<()> {
        let mut printed = Vec::new();
        let mut ctx = HookContext {
            step: moment.step,
            epoch: moment.epoch,
            rank: self.rank,
            world_size: self.world_size,
            seed: self.seed,
            metrics,
            data,
            stop: &mut self.stop,
            printed: &mut printed,
        };
        let result = f(&mut self.callbacks, &mut ctx);
        printed.iter().for_each(|text| (self.print)(text));
        result
    }
}
