//! The contexts of steps and hooks.

use std::collections::BTreeMap;

/// The context of a step: its position in the run, and the metrics that it logs.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StepContext {
    /// The optimizer step that is being computed, counted from 1.
    pub step: u64,
    /// The epoch of its first sample, counted from 0.
    pub epoch: u64,
    /// The micro-batch within the step, or the batch within a validation, counted from 0.
    pub batch_index: u64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    metrics: BTreeMap<String, (f64, f64)>,
}

impl StepContext {
    /// A context without metrics.
    pub fn new(step: u64, epoch: u64, batch_index: u64, rank: usize, world_size: usize) -> Self {
        Self { step, epoch, batch_index, rank, world_size, metrics: BTreeMap::new() }
    }

    /// Logs a metric of this rank. Several values in one optimizer step, or one validation, are
    /// averaged. Loggers and events get those of rank 0.
    pub fn log(&mut self, name: &str, value: f64) {
        let (sum, count) = self.metrics.entry(name.to_owned()).or_default();
        *sum += value;
        *count += 1.0;
    }

    /// The means of what was logged, by name.
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        self.metrics.iter().map(|(name, (sum, n))| (name.clone(), sum / n)).collect()
    }
}

/// The context of a hook. `D` is the type of the data module that the hook has access to.
pub struct HookContext<'a, D: ?Sized = ()> {
    /// Optimizer steps done.
    pub step: u64,
    /// The epoch of the step that is being or was last computed, counted from 0.
    pub epoch: u64,
    /// This process's global rank.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// The run's seed.
    pub seed: u64,
    /// The latest metrics: `train_loss`, `grad_norm`, `lr`, `val_loss` and what steps logged.
    pub metrics: &'a BTreeMap<String, f64>,
    pub(super) data: &'a D,
    pub(super) stop: &'a mut bool,
    pub(super) printed: &'a mut Vec<String>,
}

impl<'a, D: ?Sized> HookContext<'a, D> {
    /// The run's data module, in hooks of a module; `()` in callbacks, which work with any data
    /// module.
    pub fn data(&self) -> &'a D {
        self.data
    }

    /// The same context with another view of the data.
    pub(super) fn with_data<'b, E: ?Sized>(&'b mut self, data: &'b E) -> HookContext<'b, E> {
        HookContext {
            step: self.step,
            epoch: self.epoch,
            rank: self.rank,
            world_size: self.world_size,
            seed: self.seed,
            metrics: self.metrics,
            data,
            stop: self.stop,
            printed: self.printed,
        }
    }

    /// Whether this is rank 0.
    pub fn is_global_zero(&self) -> bool {
        self.rank == 0
    }

    /// Asks the trainer to stop after this step, on all ranks.
    pub fn stop(&mut self) {
        *self.stop = true;
    }

    /// Prints a text on the terminal; only that of rank 0 is printed.
    pub fn print(&mut self, text: impl Into<String>) {
        if self.rank == 0 {
            self.printed.push(text.into());
        }
    }
}
