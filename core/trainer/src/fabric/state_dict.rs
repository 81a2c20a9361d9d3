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

/// An optimizer's whole state, as torch's `optimizer.state_dict()` has it: of
/// [`Fabric::optimizer_state_dict`].
#[derive(Debug, Clone, Default)]
pub struct OptimizerStateDict {
    /// The state's tensors, whole, by [`optimizer_key`](checkpoint::optimizer_key) (`state.{fqn}.exp_avg`), in
    /// host memory; on rank 0, and none on the others.
    pub tensors: BTreeMap<String, Tensor>,
    /// The numbers of the state: `step`, by which the bias correction goes, and those of schedule and average. On
    /// every rank.
    pub scalars: BTreeMap<String, f64>,
    /// The options that parameters are updated with, by the optimizer's name; that of a single one is empty. On
    /// every rank.
    pub param_groups: BTreeMap<String, Vec<ParamGroup>>,
}

/// The numbers and options of an [`OptimizerStateDict`], as rank 0 sends them.
#[derive(Serialize, Deserialize)]
struct Numbers {
    scalars: BTreeMap<String, f64>,
    param_groups: BTreeMap<String, Vec<ParamGroup>>,
}

/// Which parameters [`Fabric::summon_full_params`] gathers, where, and whether changes are kept.
///
/// ```
/// use fulgurite_core::fabric::FullParams;
///
/// // One unit of the model, on rank 0, to be changed there.
/// let options = FullParams::of(["model.layers.0"]).rank0_only().writable();
/// ```
#[derive(Debug, Clone, Default)]
pub struct FullParams {
    names: Vec<String>,
    rank0_only: bool,
    writable: bool,
}

impl FullParams {
    /// Those of the whole model.
    pub fn all() -> Self {
        Self::default()
    }

    /// Those whose names, or a module around them, match one of these patterns, such as the path of a unit.
    pub fn of<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self { names: patterns.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Gathers on rank 0 alone; the others get none, and need no memory for them.
    #[must_use]
    pub fn rank0_only(self) -> Self {
        Self { rank0_only: true, ..self }
    }

    /// Keeps what is changed: each rank takes its part of its own tensors, or with
    /// [`rank0_only`](Self::rank0_only) of rank 0's.
    #[must_use]
    pub fn writable(self) -> Self {
        Self { writable: true, ..self }
    }
}

impl Fabric {
    /// The model as whole tensors by name, in host memory, on rank 0; the other ranks get an empty map. A tied
    /// parameter is there once, under its first name. `options` choose which, and the dtype. Collective.
    ///
    /// Rank 0 holds the result, the others nothing. As files, [`save_full`](Self::save_full) needs the memory of
    /// one tensor.
    ///
    /// # Errors
    /// On every rank if it fails on any.
    pub fn model_state_dict(&self, options: &GatherOptions) -> Result<BTreeMap<String, Tensor>> {
        self.runtime.prepare_save()?;
        let mesh = self.device_mesh();
        let coordinate = |dim: &str| mesh.coordinate(dim);
        checkpoint::gather_cpu_state_dict(self.module_tree()?, coordinate, &**self.world(), options)
    }

    /// Fills the model from tensors of any source: a [`TensorMap`] of tensors in memory, a closure as a
    /// [`TensorFn`](checkpoint::TensorFn), an opened checkpoint. Every rank gives its own, and reads its part; with
    /// [`broadcast_from_rank0`](LoadOptions::broadcast_from_rank0) that of rank 0 counts, and the others may give an
    /// empty map. Collective.
    ///
    /// # Errors
    /// As [`checkpoint::load_into`].
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::Fabric};
    /// # use fulgurite_core::checkpoint::{GatherOptions, LoadOptions, TensorMap};
    /// # fn copy(teacher: &Fabric, student: &Fabric) -> Result<()> {
    /// let weights = TensorMap::from(teacher.model_state_dict(&GatherOptions::default())?);
    /// let options = LoadOptions { broadcast_from_rank0: true, ..LoadOptions::default() };
    /// student.load_model_state_dict(&weights, options)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn load_model_state_dict(
        &self,
        source: &dyn TensorSource,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        self.load_weights(|| Ok(source), &options.into())
    }

    /// The optimizer's whole state: tensors, gathered on rank 0, the step, and the options of each parameter
    /// group. With [`load_optimizer_state_dict`](Self::load_optimizer_state_dict) another run goes on as this one
    /// would. `options` choose by parameter. Collective.
    ///
    /// # Errors
    /// On every rank if it fails on any.
    pub fn optimizer_state_dict(
        &self,
        optimizer: &mut dyn OptimizerState,
        options: &GatherOptions,
    ) -> Result<OptimizerStateDict> {
        self.runtime.prepare_save()?;
        let mesh = self.device_mesh();
        let coordinate = |dim: &str| mesh.coordinate(dim);
        let (tree, world) = (self.module_tree()?, &**self.world());
        let states = optimizer.state_tensors()?;
        self.runtime.prepare_save_states(&states)?;
        let tensors =
            checkpoint::gather_full_optimizer_state(tree, &states, coordinate, world, options)?;
        let (scalars, param_groups) = (optimizer.scalars(), optimizer.param_groups());
        Ok(OptimizerStateDict { tensors, scalars, param_groups })
    }

    /// Restores a whole state under any strategy and number of ranks: that of rank 0 counts, the others may give
    /// [`OptimizerStateDict::default`]. Tensors are found by the parameter's name, never by position, and cut for
    /// this mesh; the step and the options of the parameter groups are set as torch's `load_state_dict` sets
    /// them. A learning-rate schedule stays the optimizer's own: `lr` is the rate before it. Collective.
    ///
    /// A checkpoint of a run that goes on restores tensors and step and not the options: there the configuration
    /// says the learning rate, the decay and the rest, so that they can be changed.
    ///
    /// # Errors
    /// On every rank: if strict, and it is the state of other parameters; if it is of another kind of optimizer.
    pub fn load_optimizer_state_dict(
        &self,
        optimizer: &mut dyn OptimizerState,
        state: &OptimizerStateDict,
        options: impl Into<LoadOptions>,
    ) -> Result<LoadReport> {
        let (tree, world) = (self.module_tree()?, &**self.world());
        let OptimizerStateDict { tensors, scalars, param_groups } = state.clone();
        let numbers = broadcast_object(world, &Numbers { scalars, param_groups }, 0)?;
        let source = RankZeroSource::new(world, || Ok(Box::new(TensorMap::from(tensors))))?;
        let states = optimizer.state_tensors()?;
        // Refused before tensors are changed: what follows cannot be of another kind any more.
        let before = optimizer.param_groups();
        optimizer.load_param_groups(&numbers.param_groups)?;
        let loaded = source.load_optimizer(tree, &states, options);
        if loaded.is_err() {
            optimizer.load_param_groups(&before)?;
        }
        let report = loaded?;
        optimizer.load_scalars(&numbers.scalars)?;
        Ok(report)
    }

    /// The whole of the parameter `name` (any of its names, if it is tied), in host memory, on every rank, as
    /// `full_tensor()` of PyTorch's DTensor. Collective.
    ///
    /// # Errors
    /// If the model has no parameter of this name, or a peer fails.
    pub fn full_tensor(&self, name: &str) -> Result<Tensor> {
        let tree = self.module_tree()?;
        let Some(parameter) = tree.parameter(name) else {
            return Err(unknown(&[name.to_owned()], self)?);
        };
        let fqn = parameter.fqn().to_owned();
        let chosen = GatherOptions::default().with_filter({
            let fqn = fqn.clone();
            move |name| name == fqn
        });
        let mut gathered = self.on_all_ranks(self.model_state_dict(&chosen)?)?;
        gathered.remove(&fqn).ok_or_else(|| Error::parameter(&fqn, "could not be gathered"))
    }

    /// Gathers whole parameters for the time of `scope`, by name, as PyTorch's `summon_full_params`: to look at
    /// them, to compute with them, or to change them if `options` say so. They are the values that the optimizer
    /// updates, in host memory and outside the graph. To be called between steps. Collective: every rank calls it,
    /// and `scope` runs on every rank, on those without parameters with an empty map.
    ///
    /// To change a parameter replace its tensor in the map by one of the same shape. Where every rank has its own
    /// map, they must make the same change.
    ///
    /// # Errors
    /// Those of `scope`; if a pattern matches no parameter; if a changed tensor has another shape, or one was
    /// added or removed; if replicas were changed differently. The model is then as it was, but in the last case.
    ///
    /// ```
    /// # use fulgurite_core::{Result, fabric::{Fabric, FullParams}};
    /// # fn tie(fabric: &Fabric) -> Result<()> {
    /// // Norms grow over a training: look at the first layer's.
    /// let norms = fabric.summon_full_params(&FullParams::of(["model.layers.0"]), |params| {
    ///     params.values().map(|p| Ok(p.sqr()?.sum_all()?.to_scalar::<f32>()?)).collect::<Result<Vec<_>>>()
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
        let tree = self.module_tree()?;
        let names: Vec<&str> = tree.parameters().iter().map(|p| p.fqn()).collect();
        let idle = options.names.iter().filter(|pattern| {
            let one = ParameterFilter::matching([pattern.as_str()]);
            !names.iter().any(|name| one.keeps(name))
        });
        let idle: Vec<String> = idle.cloned().collect();
        if !idle.is_empty() {
            return Err(unknown(&idle, self)?);
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
        // No rank keeps a change that another did not come to.
        let failed = self.all_gather_object(&result.as_ref().err().map(ToString::to_string))?;
        let value = result?;
        if let Some((rank, message)) =
            failed.into_iter().enumerate().find_map(|(r, m)| Some((r, m?)))
        {
            return Err(Error::PeerFailed { rank, message });
        }
        let load = LoadOptions { filter, ..LoadOptions::default() };
        let source = TensorMap::from(params);
        if options.rank0_only {
            let world = &**self.world();
            RankZeroSource::new(world, || Ok(Box::new(source)))?.load_into(tree, load)?;
        } else {
            load_into(&source, tree, load)?;
        }
        self.runtime.finish_load()?;
        Ok(value)
    }

    /// Rank 0's tensors on every rank. Collective.
    fn on_all_ranks(&self, tensors: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>> {
        let source =
            RankZeroSource::new(&**self.world(), || Ok(Box::new(TensorMap::from(tensors))))?;
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
