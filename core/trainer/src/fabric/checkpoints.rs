//! Saving and loading checkpoints with Fabric.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Fabric, OptimizerState};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    CheckpointIO, CheckpointIOConfig, DistributedCheckpoint, FullOptions, LoadOptions, LoadReport,
    ParameterFilter, RankZeroSource, RestoreReport, SaveMeta, SaveRequest, TensorSource, load_into,
    open,
};
use fulgurite_config::PluginValue;
use fulgurite_config::registry::kind;
use fulgurite_engine::optim::StateTensor;

/// The state in the manifest of a checkpoint that Fabric saved.
#[derive(Debug, Serialize, Deserialize)]
struct FabricState {
    /// [`OptimizerState::scalars`].
    optimizer: BTreeMap<String, f64>,
    /// [`StrategyExtensions::scalars`](fulgurite_engine::strategy::StrategyExtensions::scalars).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    strategy: BTreeMap<String, f64>,
    /// The program's state.
    user: serde_json::Value,
}

impl Fabric {
    /// Saves model, optimizer and `state` as a distributed checkpoint in `path`. Collective.
    ///
    /// `path` is the checkpoint's directory. `state` is anything that serialises, such as the step
    /// or the position in the data; rank 0's is saved. The save is a transaction.
    ///
    /// # Errors
    /// If the checkpoint cannot be written. The previous content of `path` is untouched then.
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        optimizer: &mut dyn OptimizerState,
        state: &impl Serialize,
    ) -> Result<PathBuf> {
        let (io, name) = local(path.as_ref())?;
        let saved = self.checkpoints().save(&io, name, optimizer, state, serde_json::Value::Null);
        teardown_after(&*io, saved)
    }

    /// Saves the model and `state` as a full checkpoint in the directory `path`. Collective.
    ///
    /// A full checkpoint has whole tensors, in files that `transformers` and candle load. The
    /// optimizer is saved too, if given. Tensors are gathered on rank 0 one by one, and rank 0's
    /// `state` is saved. The save is a transaction.
    ///
    /// # Errors
    /// If the checkpoint cannot be written. The previous content of `path` is untouched then.
    pub fn save_full(
        &self,
        path: impl AsRef<Path>,
        optimizer: Option<&mut dyn OptimizerState>,
        state: &impl Serialize,
        options: &FullOptions,
    ) -> Result<PathBuf> {
        let (io, name) = local(path.as_ref())?;
        let (states, meta) = self.contents(optimizer, state, serde_json::Value::Null)?;
        let saved = self.runtime.save_full_checkpoint(&*io, name, &states, options, meta);
        teardown_after(&*io, saved)
    }

    /// Returns the optimizer's state tensors and the checkpoint's metadata. Collective.
    fn contents(
        &self,
        optimizer: Option<&mut dyn OptimizerState>,
        state: &impl Serialize,
        config: serde_json::Value,
    ) -> Result<(Vec<StateTensor>, SaveMeta)> {
        self.runtime.prepare_save()?;
        let (mut states, mut scalars, mut step) = (Vec::new(), BTreeMap::new(), 0);
        let mut strategy = BTreeMap::new();
        let is_whole = optimizer.is_some();
        if let Some(optimizer) = optimizer {
            states = optimizer.state_tensors()?;
            self.runtime.prepare_save_states(&states)?;
            states.extend(self.runtime.strategy_states()?);
            strategy = self.runtime.strategy_scalars()?;
            (scalars, step) = (optimizer.scalars(), optimizer.steps());
        }
        let user = to_json(state)?;
        let state = to_json(&FabricState { optimizer: scalars, strategy, user })?;
        // Training cannot resume from weights alone, so they never count as the newest checkpoint.
        let saved_at = is_whole.then(|| self.next_saved_at());
        Ok((states, SaveMeta { step, state, config, saved_at, ..SaveMeta::default() }))
    }

    /// Returns the time of a save that begins now.
    ///
    /// It is later than the time of every checkpoint saved or loaded before, even if the clock went
    /// back.
    fn next_saved_at(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |since| since.as_micros() as u64);
        let before = self.saved_at.load(Ordering::Relaxed);
        let saved_at = now.max(before.saturating_add(1));
        self.saved_at.store(saved_at, Ordering::Relaxed);
        saved_at
    }

    /// Loads a distributed checkpoint into the model and, if given, the optimizer. Collective.
    ///
    /// The checkpoint may come from any strategy and number of ranks. Returns the state saved with
    /// it.
    ///
    /// # Errors
    /// If the checkpoint at `path` is missing or incomplete, or belongs to another model. The
    /// message lists every difference, and nothing is changed.
    pub fn load<T: DeserializeOwned>(
        &self,
        path: impl AsRef<Path>,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<T> {
        let source = DistributedCheckpoint::open(path)?;
        Ok(self.checkpoints().load(&source, optimizer, &LoadOptions::default())?.0)
    }

    /// Returns the state saved with a checkpoint.
    pub(crate) fn saved_state<T: DeserializeOwned>(source: &DistributedCheckpoint) -> Result<T> {
        let unreadable = |error: serde_json::Error| {
            let message = format!("its training state cannot be read: {error}");
            Error::checkpoint(source.location(), message)
        };
        let saved = FabricState::deserialize(&source.manifest().state).map_err(unreadable)?;
        T::deserialize(&saved.user).map_err(unreadable)
    }

    /// Fills the model from the weights at `path`. Collective.
    ///
    /// The weights have any format that [`checkpoint::open`](fulgurite_checkpoint::open) takes.
    /// `options` may be a `bool`, for [`strict`](LoadOptions::strict). Returns a report of loaded
    /// tensors and differences, which rank 0 also logs. With
    /// [`broadcast_from_rank0`](LoadOptions::broadcast_from_rank0) only rank 0 opens `path`.
    ///
    /// # Errors
    /// As [`checkpoint::load_raw`](fulgurite_checkpoint::load_raw).
    pub fn load_raw(
        &self,
        path: impl AsRef<Path>,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        self.load_weights(|| open(path), &options.into())
    }

    /// Fills the model from the source that `open` returns, and logs the report. Collective.
    ///
    /// With `broadcast_from_rank0` only rank 0 calls `open`.
    pub(crate) fn load_weights<S: TensorSource>(
        &self,
        open: impl FnOnce() -> Result<S>,
        options: &LoadOptions,
    ) -> Result<LoadReport> {
        let tree = self.module_tree()?;
        let _time = self.measurements().log_execution_time("loading the weights");
        let (location, report) = if options.broadcast_from_rank0 {
            let source = RankZeroSource::new(&**self.world(), || Ok(Box::new(open()?)))?;
            self.warn_of(source.described());
            let location = source.described().location().to_owned();
            let options = self.beside_the_adapter(source.described(), options)?;
            (location, source.load_into(tree, options)?)
        } else {
            let source = open()?;
            self.warn_of(&source);
            let options = self.beside_the_adapter(&source, options)?;
            (source.location().to_owned(), load_into(&source, tree, options)?)
        };
        self.runtime.finish_load()?;
        self.log_report(&location, &report, options);
        Ok(report)
    }

    /// Returns the options for loading a source after an adapter.
    ///
    /// A source without adapters is a base. Some parameters outside the adapter are trained, or
    /// were filled with it. They keep their values, because the base's values are older.
    fn beside_the_adapter(
        &self,
        source: &dyn TensorSource,
        options: &LoadOptions,
    ) -> Result<LoadOptions> {
        let tree = self.module_tree()?;
        let has_adapter = || {
            let names = source.names();
            tree.parameters()
                .iter()
                .any(|p| p.is_adapter() && names.binary_search(&p.fqn()).is_ok())
        };
        if self.adapter_from().is_none() || has_adapter() {
            return Ok(options.clone());
        }
        let trained = tree.trainable().filter(|parameter| !parameter.is_adapter());
        let mut trained: BTreeSet<String> = trained.map(|p| p.fqn().to_owned()).collect();
        trained.extend(
            self.beside_adapter.lock().expect("nobody panics while holding it").iter().cloned(),
        );
        let given = options.filter.clone();
        let filter = ParameterFilter::new("what is not trained beside the adapter", move |name| {
            !trained.contains(name) && given.as_ref().is_none_or(|given| given.keeps(name))
        });
        Ok(LoadOptions { filter: Some(filter), ..options.clone() })
    }

    /// Logs a load's report and its filter on rank 0. Differences are a warning.
    fn log_report(&self, location: &Path, report: &LoadReport, options: &LoadOptions) {
        let filtered = options.filter.as_ref().map(|filter| format!("; chosen: {}", filter.what()));
        let filtered = filtered.unwrap_or_default();
        if self.global_rank() == 0 && !report.new.is_empty() {
            tracing::warn!(
                "{}: has no values for {}, which keep their initial ones",
                location.display(),
                report.new.join(", ")
            );
        }
        match self.global_rank() {
            0 if !report.is_empty() => {
                tracing::warn!("{}: {report}{filtered}", location.display());
            }
            0 => tracing::info!("{}: {report}{filtered}", location.display()),
            _ => {}
        }
    }

    /// Logs the [warning](TensorSource::warning) of a source, on rank 0.
    pub(crate) fn warn_of(&self, source: &dyn TensorSource) {
        if let (0, Some(warning)) = (self.global_rank(), source.warning()) {
            tracing::warn!("{}: {warning}", source.location().display());
        }
    }
}

/// Checkpoints in any place, of parts of the model, and in other formats; see
/// [`Fabric::checkpoints`].
pub struct Checkpoints<'a>(pub(super) &'a Fabric);

impl Fabric {
    /// Returns access to checkpoints in any place, of parts of the model, and in other formats. Not
    /// collective.
    ///
    /// [`save`](Self::save), [`save_full`](Self::save_full), [`load`](Self::load) and
    /// [`load_raw`](Self::load_raw) are for whole models in directories.
    pub fn checkpoints(&self) -> Checkpoints<'_> {
        Checkpoints(self)
    }
}

impl Checkpoints<'_> {
    /// Like [`Fabric::save`], as the checkpoint `name` of any `io`. Collective.
    ///
    /// Also saves the run's configuration. The caller calls [`teardown`](CheckpointIO::teardown)
    /// after the last save.
    ///
    /// # Errors
    /// As [`Fabric::save`].
    pub fn save(
        &self,
        io: &Arc<dyn CheckpointIO>,
        name: &str,
        optimizer: &mut dyn OptimizerState,
        state: &impl Serialize,
        config: serde_json::Value,
    ) -> Result<PathBuf> {
        let request = self.save_request(name, Some(optimizer), state, config)?;
        request.run(&**io, &**self.0.world())
    }

    /// Like [`Fabric::save_full`], as the checkpoint `name` of any `io`. Collective.
    ///
    /// Also saves the run's configuration. The caller calls [`teardown`](CheckpointIO::teardown)
    /// after the last save.
    ///
    /// # Errors
    /// As [`Fabric::save_full`].
    pub fn save_full(
        &self,
        io: &Arc<dyn CheckpointIO>,
        name: &str,
        optimizer: Option<&mut dyn OptimizerState>,
        state: &impl Serialize,
        config: serde_json::Value,
    ) -> Result<PathBuf> {
        let (states, meta) = self.0.contents(optimizer, state, config)?;
        let options = FullOptions::default();
        self.0.runtime.save_full_checkpoint(&**io, name, &states, &options, meta)
    }

    /// Returns this rank's part of a checkpoint `name` of the current state. Collective.
    ///
    /// Without an optimizer it holds the weights only. Save it with [`SaveRequest::run`] or, in the
    /// background, with an [`AsyncSaver`](fulgurite_checkpoint::AsyncSaver). It shares the model's
    /// memory.
    ///
    /// # Errors
    /// If a peer fails, or `state` cannot be written as JSON.
    pub fn save_request(
        &self,
        name: &str,
        optimizer: Option<&mut dyn OptimizerState>,
        state: &impl Serialize,
        config: serde_json::Value,
    ) -> Result<SaveRequest> {
        let (states, meta) = self.0.contents(optimizer, state, config)?;
        self.0.runtime.save_request(name, &states, meta)
    }

    /// Like [`save_request`](Self::save_request), of what this rank's replica has. Not collective.
    ///
    /// # Errors
    /// If replicas have trained separately or divide the optimizer's state.
    pub(crate) fn held_request(
        &self,
        name: &str,
        optimizer: Option<&mut dyn OptimizerState>,
        state: &impl Serialize,
        config: serde_json::Value,
    ) -> Result<SaveRequest> {
        self.0.runtime.check_replicas_equal()?;
        let (states, meta) = self.0.contents(optimizer, state, config)?;
        self.0.runtime.held_request(name, &states, meta)
    }

    /// Like [`Fabric::load`], from an opened checkpoint and with options. Collective.
    ///
    /// With options a part of the checkpoint is loaded, parameters are renamed, or the model may
    /// have changed. Also returns a report of loaded tensors and differences. Rank 0 logs the
    /// model's part of the report.
    ///
    /// # Errors
    /// As [`Fabric::load`], if [`strict`](LoadOptions::strict). Otherwise differences are
    /// allowed.
    pub fn load<T: DeserializeOwned>(
        &self,
        source: &DistributedCheckpoint,
        optimizer: Option<&mut dyn OptimizerState>,
        options: &LoadOptions,
    ) -> Result<(T, RestoreReport)> {
        let _time = self.0.measurements().log_execution_time("loading the checkpoint");
        self.0.warn_of(source);
        let unreadable = |error: serde_json::Error| {
            let message = format!("its training state cannot be read: {error}");
            Error::checkpoint(source.location(), message)
        };
        let saved = FabricState::deserialize(&source.manifest().state).map_err(unreadable)?;
        let state = T::deserialize(&saved.user).map_err(unreadable)?;
        let report = match optimizer.filter(|_| !options.weights_only) {
            Some(_) if saved.optimizer.is_empty() && source.optimizer().is_empty() => {
                let message = "it has weights alone, from which training cannot go on; to start from \
                               them set `checkpoint.weights_only = true`";
                return Err(Error::checkpoint(source.location(), message));
            }
            Some(optimizer) => {
                let mut states = optimizer.state_tensors()?;
                states.extend(self.0.runtime.strategy_states()?);
                let report = self.0.runtime.load_checkpoint(source, Some(&states), options)?;
                optimizer.load_scalars(&saved.optimizer)?;
                self.0.runtime.load_strategy_scalars(&saved.strategy)?;
                report
            }
            None => self.0.runtime.load_checkpoint(source, None, options)?,
        };
        self.0.log_report(source.location(), &report.model, options);
        self.0.saved_at.fetch_max(source.manifest().saved_at.unwrap_or(0), Ordering::Relaxed);
        Ok((state, report))
    }

    /// Makes the model ready for a forward after its local shards were written. Collective.
    ///
    /// [`Fabric::load`] calls it itself.
    ///
    /// # Errors
    /// If replicas have different values, or a peer fails.
    pub fn finish_load(&self) -> Result<()> {
        self.0.runtime.finish_load()
    }
}

/// Returns the checkpoint IO for the directory of a path on disk, and the checkpoint's name in it.
fn local(path: &Path) -> Result<(Arc<dyn CheckpointIO>, &str)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
    else {
        return Err(Error::checkpoint(path, "a checkpoint needs a directory name"));
    };
    let io = PluginValue::new("local")
        .build::<Box<dyn CheckpointIOConfig>>(kind::CHECKPOINT_IO, "checkpoint.io")?
        .build(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?;
    Ok((io, name))
}

/// Tears `io` down after a save, and returns the first error of the two.
fn teardown_after<T>(io: &dyn CheckpointIO, saved: Result<T>) -> Result<T> {
    let teardown_after = io.teardown();
    saved.and_then(|saved| teardown_after.map(|()| saved))
}

fn to_json<T: Serialize>(value: &T) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|e| Error::other(format!("encoding training state: {e}")))
}
