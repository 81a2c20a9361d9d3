//! Callbacks: hooks that are added to a run from outside of the module.

use std::any::Any;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Result;
use crate::trainer::checkpoints::saved_state::{CallbackState, SavedState};
use crate::trainer::module::hooks::Hook;
use crate::trainer::{HookContext, Hooks};

/// [`Hooks`] that are added to a run from outside of the module (Lightning's `Callback`).
///
/// They are added by [`Trainer::with_callback`](crate::trainer::Trainer::with_callback),
/// [`LightningModule::configure_callbacks`](crate::trainer::LightningModule::configure_callbacks)
/// or `trainer.callbacks` in the configuration.
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
/// A run that resumes within an epoch does not start that epoch again. So a callback must
/// [save](Hooks::on_save_checkpoint) everything that it remembers from the beginning of an epoch.
pub trait Callback: Hooks + Send + Any {
    /// Returns the key of the callback's state in checkpoints.
    ///
    /// Callbacks with the same key get their states in the order in which they were added.
    fn state_key(&self) -> String {
        std::any::type_name::<Self>().to_owned()
    }

    /// Returns numbers of micro-batches per step, in place of `trainer.accumulate_grad_batches`.
    ///
    /// The key is the epoch, counted from 0, from which on a number holds. The first callback with
    /// any numbers decides. The numbers must be the same on all ranks and during the whole run,
    /// because the run's length, which schedules follow, is computed from them.
    fn accumulate_grad_batches(&self) -> BTreeMap<u64, NonZeroU64> {
        BTreeMap::new()
    }

    /// Returns whether the callback's hooks are called after all others, for callbacks that stop or
    /// save by a metric.
    ///
    /// Values that the other hooks have logged are in [`HookContext::metrics`] then.
    fn decides_by_metrics(&self) -> bool {
        false
    }
}

/// A callback's configuration: an element of `trainer.callbacks`.
#[typetag::serde(tag = "type")]
pub trait CallbackConfig: std::fmt::Debug + Send + Sync {
    /// Builds the callback.
    ///
    /// Called on every rank. Before any rank is started it is called once, and the result is
    /// dropped.
    ///
    /// # Errors
    /// If an option is wrong.
    fn build(&self) -> Result<Box<dyn Callback>>;

    /// Returns the metric that the callback decides by, if any.
    ///
    /// A run that can never log the metric is refused before it starts.
    fn monitor(&self) -> Option<&str> {
        None
    }
}

fulgurite_config::plugin_kind!(
    dyn CallbackConfig,
    fulgurite_config::registry::kind::CALLBACK,
    "trainer.callbacks"
);

/// A callback that a trainer shares with its runs.
#[derive(Clone)]
pub(crate) struct SharedCallback(Arc<Mutex<Box<dyn Callback>>>);

impl SharedCallback {
    pub(crate) fn new(callback: Box<dyn Callback>) -> Self {
        Self(Arc::new(Mutex::new(callback)))
    }

    /// [`Callback::state_key`].
    pub(crate) fn state_key(&self) -> String {
        self.lock().state_key()
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Callback>> {
        // A hook that panicked can only have broken the callback's own state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the first callback of type `C`.
pub(crate) fn read_callback<C: Callback, T>(
    callbacks: &[SharedCallback],
    mut read: impl FnMut(&C) -> T,
) -> Option<T> {
    callbacks.iter().find_map(|callback| {
        let callback = callback.lock();
        let any: &dyn Any = &**callback;
        any.downcast_ref().map(&mut read)
    })
}

/// The callbacks of a run.
pub(crate) struct Callbacks {
    callbacks: Vec<SharedCallback>,
    decide_by_metrics: bool,
    is_global_zero: bool,
}

impl Callbacks {
    /// Joins `callbacks` and the module's own. A module's callback replaces one with the same key.
    pub(crate) fn new(
        mut callbacks: Vec<SharedCallback>,
        of_module: Vec<Box<dyn Callback>>,
        is_global_zero: bool,
    ) -> Self {
        callbacks.retain(|callback| {
            let key = callback.state_key();
            of_module.iter().all(|other| other.state_key() != key)
        });
        callbacks.extend(of_module.into_iter().map(SharedCallback::new));
        let decide_by_metrics = callbacks.iter().any(|c| c.lock().decides_by_metrics());
        Self { callbacks, decide_by_metrics, is_global_zero }
    }

    pub(crate) fn shared(&self) -> &[SharedCallback] {
        &self.callbacks
    }

    /// Returns the states of the callbacks, for a checkpoint.
    pub(crate) fn states(&self) -> Result<Vec<CallbackState>> {
        let mut states = Vec::new();
        for callback in &self.callbacks {
            let (mut callback, mut state) = (callback.lock(), SavedState::default());
            callback.on_save_checkpoint(&mut state)?;
            if !state.is_empty() {
                states.push(CallbackState { key: callback.state_key(), state });
            }
        }
        Ok(states)
    }

    /// Loads the states of the callbacks from a checkpoint.
    pub(crate) fn load_states(&self, mut states: Vec<CallbackState>) -> Result<()> {
        for callback in &self.callbacks {
            let mut callback = callback.lock();
            let key = callback.state_key();
            if let Some(index) = states.iter().position(|state| state.key == key) {
                callback.on_load_checkpoint(&states.remove(index).state)?;
            }
        }
        for CallbackState { key, .. } in states.iter().filter(|_| self.is_global_zero) {
            tracing::warn!("the checkpoint has a state of a callback that this run lacks: `{key}`");
        }
        Ok(())
    }

    /// Returns [`Callback::accumulate_grad_batches`] of the first callback that sets any.
    pub(crate) fn accumulate_by_epoch(&self) -> BTreeMap<u64, NonZeroU64> {
        let all = self.callbacks.iter().map(|callback| callback.lock().accumulate_grad_batches());
        all.into_iter().find(|by_epoch| !by_epoch.is_empty()).unwrap_or_default()
    }

    /// Returns whether any callback [decides by metrics](Callback::decides_by_metrics).
    pub(crate) fn decide_by_metrics(&self) -> bool {
        self.decide_by_metrics
    }

    /// Calls a hook of the callbacks that decide by metrics if `deciding`, otherwise of the others.
    pub(crate) fn call(&self, hook: Hook, deciding: bool, ctx: &mut HookContext) -> Result<()> {
        for callback in &self.callbacks {
            let mut callback = callback.lock();
            if callback.decides_by_metrics() == deciding {
                hook.call(&mut **callback, ctx)?;
            }
        }
        Ok(())
    }
}
