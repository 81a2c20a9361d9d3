//! Whole tensors of a distributed model and its optimizer, in memory.

use std::collections::BTreeMap;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Fabric, OptimizerState};
use crate::{Error, Result};
use fulgurite_checkpoint::{
    self as checkpoint, GatherOptions, LoadOptions, LoadReport, ParameterFilter, RankZeroSource,
    TensorMap, TensorSource, load_into,
};
use fulgurite_engine::collective::broadcast_object;
use fulgurite_engine::optim::ParamGroup;

/// An optimizer's whole state, like torch's `optimizer.state_dict()`.
///
/// [`FullState::optimizer_state_dict`] returns it.
#[derive(Debug, Clone, Default)]
pub struct OptimizerStateDict {
    /// Whole tensors in host memory, by [`optimizer_key`](checkpoint::optimizer_key)
    /// (`state.{fqn}.exp_avg`). On rank 0; empty on the other ranks.
    pub tensors: BTreeMap<String, Tensor>,
    /// The state that is not a tensor: `step` for the bias correction, and the scalars of schedule
    /// and average. On every rank.
    pub scalars: BTreeMap<String, f64>,
    /// Parameter groups by optimizer name; a single optimizer has the empty name. On every rank.
    pub param_groups: BTreeMap<String, Vec<ParamGroup>>,
}

/// Scalars and parameter groups of an [`OptimizerStateDict`], which rank 0 sends.
#[derive(Serialize, Deserialize)]
struct Numbers {
    scalars: BTreeMap<String, f64>,
    param_groups: BTreeMap<String, Vec<ParamGroup>>,
}

/// Options of [`FullState::summon_full_params`]: parameters, ranks, and whether changes are kept.
///
/// ```
/// use fulgurite_core::fabric::FullParams;
///
/// // One unit of the model, on rank 0, with changes kept.
/// let options = FullParams::of(["model.layers.0"]).rank0_only().writable();
/// ```
#[derive(Debug, Clone, Default)]
pub struct FullParams {
    names: Vec<String>,
    rank0_only: bool,
    writable: bool,
}

impl FullParams {
    /// Chooses all parameters of the model.
    pub fn all() -> Self {
        Self::default()
    }

    /// Chooses parameters by patterns of their names or of enclosing modules, such as a unit's
    /// path.
    pub fn of<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self { names: patterns.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Gathers on rank 0 only. The other ranks get an empty map and use no memory for parameters.
    #[must_use]
    pub fn rank0_only(self) -> Self {
        Self { rank0_only: true, ..self }
    }

    /// Keeps changes of the tensors.
    ///
    /// Each rank takes its shards from its own map, or from rank 0's with
    /// [`rank0_only`](Self::rank0_only).
    #[must_use]
    pub fn writable(self) -> Self {
        Self { writable: true, ..self }
    }
}

/// Whole tensors of a distributed model and its optimizer; see [`Fabric::full_state`].
pub struct FullState<'a>(&'a Fabric);

impl Fabric {
    /// Returns access to whole tensors in memory. Not collective.
    pub fn full_state(&self) -> FullState<'_> {
        FullState(self)
    }
}

impl FullState<'_> {
    /// Gathers the model on rank 0, as whole tensors by name in host memory. Collective.
    ///
    /// The other ranks get an empty map. A tied parameter appears once, under its first name.
    /// `options` choose the parameters and the dtype.
    ///
    /// Rank 0 needs memory for all chosen tensors. [`Fabric::save_full`], which writes
    /// files, needs memory for one tensor.
    ///
    /// # Errors
    /// On every rank if it fails on any.
    pub fn model_state_dict(&self, options: &GatherOptions) -> Result<BTreeMap<String, Tensor>> {
        self.0.runtime.prepare_save()?;
        let mesh = self.0.device_mesh();
        let coordinate = |dim: &str| mesh.coordinate(dim);
        checkpoint::gather_cpu_state_dict(
            self.0.module_tree()?,
            coordinate,
            &**self.0.world(),
            options,
        )
    }

    /// Fills the model from any source of tensors. Collective.
    ///
    /// A source is a [`TensorMap`] of tensors in memory, a closure as a
    /// [`TensorFn`](checkpoint::TensorFn), or an opened checkpoint. Every rank passes its own
    /// source and reads its part. With [`broadcast_from_rank0`](LoadOptions::broadcast_from_rank0)
    /// only rank 0's source is read, and the other ranks may pass an empty map.
    ///
    /// # Errors
    /// As [`checkpoint::load_into`].
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # use fulgurite_core::checkpoint::{GatherOptions, LoadOptions, TensorMap};
    /// # fn copy(teacher: &Fabric, student: &Fabric) -> Result<()> {
    /// let weights = TensorMap::from(teacher.full_state().model_state_dict(&GatherOptions::default())?);
    /// let options = LoadOptions { broadcast_from_rank0: true, ..LoadOptions::default() };
    /// student.full_state().load_model_state_dict(&weights, options)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn load_model_state_dict(
        &self,
        source: &dyn TensorSource,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        self.0.load_weights(|| Ok(source), &options.into())
    }

    /// Returns the optimizer's whole state. Collective.
    ///
    /// The state has the tensors, gathered on rank 0, the step, and the options of each parameter
    /// group. A run that [loads](Self::load_optimizer_state_dict) the state continues as this run
    /// would. `options` choose the parameters.
    ///
    /// # Errors
    /// On every rank if it fails on any.
    pub fn optimizer_state_dict(
        &self,
        optimizer: &mut dyn OptimizerState,
        options: &GatherOptions,
    ) -> Result<OptimizerStateDict> {
        self.0.runtime.prepare_save()?;
        let mesh = self.0.device_mesh();
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let (tree, world) = (self.0.module_tree()?, &**self.0.world());
        let states = optimizer.state_tensors()?;
        self.0.runtime.prepare_save_states(&states)?;
        let tensors =
            checkpoint::gather_full_optimizer_state(tree, &states, coordinate, world, options)?;
        let (scalars, param_groups) = (optimizer.scalars(), optimizer.param_groups());
        Ok(OptimizerStateDict { tensors, scalars, param_groups })
    }

    /// Restores a whole optimizer state, under any strategy and number of ranks. Collective.
    ///
    /// Rank 0's state is loaded; the other ranks may pass [`OptimizerStateDict::default`]. Tensors
    /// are found by the parameter's name, never by position, and cut for this mesh. The step and
    /// the options of the parameter groups are set as torch's `load_state_dict` sets them. The
    /// optimizer keeps its own learning-rate schedule: `lr` is the rate before the schedule.
    ///
    /// A run that resumes from a checkpoint restores tensors and step, but not the options. They
    /// come from the configuration, so that the learning rate or the decay can be changed.
    ///
    /// # Errors
    /// On every rank: if strict and the state has other parameters; if the state belongs to another
    /// kind of optimizer.
    pub fn load_optimizer_state_dict(
        &self,
        optimizer: &mut dyn OptimizerState,
        state: &OptimizerStateDict,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let (tree, world) = (self.0.module_tree()?, &**self.0.world());
        let OptimizerStateDict { tensors, scalars, param_groups } = state.clone();
        let numbers = broadcast_object(world, &Numbers { scalars, param_groups }, 0)?;
        let source = RankZeroSource::new(world, || Ok(Box::new(TensorMap::from(tensors))))?;
        let states = optimizer.state_tensors()?;
        // Fails for another kind of optimizer before any tensor is changed.
        let before = optimizer.param_groups();
        optimizer.load_param_groups(&numbers.param_groups)?;
        let loaded = source.load_optimizer(tree, &states, options);
        if loaded.is_err() {
            optimizer.load_param_groups(&before)?;
        }
        let report = loaded?;
        optimizer.load_scalars(&numbers.scalars)?;
        if optimizer.averages_weights() {
            self.0.runtime.prepare_forward()?;
        }
        Ok(report)
    }

    /// Returns the whole parameter `name` in host memory, on every rank. Collective.
    ///
    /// For a tied parameter, `name` is any of its names. PyTorch's DTensor has a `full_tensor()`
    /// too.
    ///
    /// # Errors
    /// If the model lacks a parameter of this name, or a peer fails.
    pub fn full_tensor(&self, name: &str) -> Result<Tensor> {
        let tree = self.0.module_tree()?;
        let Some(parameter) = tree.parameter(name) else {
            return Err(unknown(&[name.to_owned()], self.0)?);
        };
        let fqn = parameter.fqn().to_owned();
        let chosen = GatherOptions::default().with_filter({
            let fqn = fqn.clone();
            move |name| name == fqn
        });
        let mut gathered = self.on_all_ranks(self.model_state_dict(&chosen)?)?;
        gathered.remove(&fqn).ok_or_else(|| Error::parameter(&fqn, "could not be gathered"))
    }

    /// Gathers whole parameters while `scope` runs, like PyTorch's `summon_full_params`.
    /// Collective.
    ///
    /// `scope` gets them by name. It reads the parameters, computes with them, or changes them if
    /// `options` are [writable](FullParams::writable). They are the values that the optimizer
    /// updates, in host memory and outside the graph. Call this between steps, on every rank.
    /// `scope` runs on every rank, with an empty map on ranks without parameters.
    ///
    /// To change a parameter, replace its tensor in the map by a tensor of the same shape. If every
    /// rank has its own map, all ranks must make the same change.
    ///
    /// # Errors
    /// The errors of `scope`; if a pattern matches no parameter; if a tensor was added or removed,
    /// or has another shape; if replicas were changed differently. The model is then unchanged,
    /// except in the last case.
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::{Fabric, FullParams}};
    /// # fn tie(fabric: &Fabric) -> Result<()> {
    /// // Norms grow during training: look at the first layer's.
    /// let norms = fabric.full_state().summon_full_params(&FullParams::of(["model.layers.0"]), |params| {
    ///     params
    ///         .values()
    ///         .map(|p| Ok(p.sqr()?.sum_all()?.to_scalar::<f32>()?))
    ///         .collect::<Result<Vec<_>>>()
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn summon_full_params<T>(
        &self,
        options: &FullParams,
        scope: impl FnOnce(&mut BTreeMap<String, Tensor>) -> Result<T>,
    ) -> Result<T> {
        let filter = match options.names.as_slice() {
            [] => None,
            names => Some(ParameterFilter::matching(names)),
        };
        let tree = self.0.module_tree()?;
        let names: Vec<&str> = tree.parameters().iter().map(|p| p.fqn()).collect();
        let idle = options.names.iter().filter(|pattern| {
            let one = ParameterFilter::matching([pattern.as_str()]);
            !names.iter().any(|name| one.keeps(name))
        });
        let idle: Vec<String> = idle.cloned().collect();
        if !idle.is_empty() {
            return Err(unknown(&idle, self.0)?);
        }
        let mut chosen = GatherOptions::default();
        if let Some(filter) = filter.clone() {
            chosen = chosen.with_filter(move |name| filter.keeps(name));
        }
        let gathered = self.model_state_dict(&chosen)?;
        let mut params = match options.rank0_only {
            true => gathered,
            false => self.on_all_ranks(gathered)?,
        };
        let shapes: Vec<_> = params.iter().map(|(n, t)| (n.clone(), t.dims().to_vec())).collect();
        let result = scope(&mut params);
        if !options.writable {
            return result;
        }
        let now: Vec<_> = params.iter().map(|(n, t)| (n.clone(), t.dims().to_vec())).collect();
        let result = result.and_then(|value| match now == shapes {
            true => Ok(value),
            false => Err(Error::other(
                "the parameters that `summon_full_params` gathered have other names or shapes than before; \
                 replace tensors by such of the same shape, and add and remove none",
            )),
        });
        // If `scope` fails on any rank, no rank keeps its changes.
        let failed = self.0.all_gather_object(&result.as_ref().err().map(ToString::to_string))?;
        let value = result?;
        if let Some((rank, message)) =
            failed.into_iter().enumerate().find_map(|(r, m)| Some((r, m?)))
        {
            return Err(Error::PeerFailed { rank, message });
        }
        let load = LoadOptions { filter, ..LoadOptions::default() };
        let source = TensorMap::from(params);
        if options.rank0_only {
            let world = &**self.0.world();
            RankZeroSource::new(world, || Ok(Box::new(source)))?.load_into(tree, load)?;
        } else {
            load_into(&source, tree, load)?;
        }
        self.0.runtime.finish_load()?;
        Ok(value)
    }

    /// Sends rank 0's tensors to every rank. Collective.
    fn on_all_ranks(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        let source =
            RankZeroSource::new(&**self.0.world(), || Ok(Box::new(TensorMap::from(tensors))))?;
        source.tensors()
    }
}

fn unknown(patterns: &[String], fabric: &Fabric) -> Result<Error> {
    let names = fabric.module_tree()?.parameters().iter().map(|p| format!("`{}`", p.fqn()));
    let (names, total) =
        (names.take(5).collect::<Vec<_>>(), fabric.module_tree()?.parameters().len());
    let more = if total > names.len() { ", …" } else { "" };
    let patterns: Vec<String> = patterns.iter().map(|pattern| format!("`{pattern}`")).collect();
    Ok(Error::other(format!(
        "no parameter of the model is called {}; there are {}{more}",
        patterns.join(" or "),
        names.join(", ")
    )))
}
