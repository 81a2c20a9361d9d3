//! Loading models and optimizers from tensor sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Tensor};
use safetensors::Dtype;

use super::load_report::refuse_differences;
use super::manifest::Section;
use super::stored::loadable_dtype;
use super::{
    DistributedCheckpoint, DtypePolicy, LoadOptions, LoadReport, Mismatch, RenamedSource,
    TensorSource, open, optimizer_key,
};
use crate::{Error, Result};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::shard::Region;

/// A tensor to fill.
pub(super) struct LoadTarget {
    /// The names that it may have in a source.
    names: Vec<String>,
    shape: Vec<usize>,
    dtype: DType,
    /// Whether it is of an adapter.
    adapter: bool,
    /// Whether the filter keeps it.
    kept: bool,
    /// The memory of this rank's part, and its region; `None` for a comparison.
    local: Option<(Tensor, Region)>,
}

impl Section {
    /// Whether the filter of the options keeps the tensor of this name.
    fn keeps(self, options: &LoadOptions, name: &str) -> bool {
        options.filter.as_ref().is_none_or(|filter| match self {
            Self::Model => filter.keeps(name),
            Self::Optimizer => filter.keeps_state(name),
        })
    }

    /// The source under the model's names.
    pub(super) fn renamed<'s>(
        self,
        source: &'s dyn TensorSource,
        options: &LoadOptions,
    ) -> Result<Box<dyn TensorSource + 's>> {
        Ok(if options.names.is_empty() {
            Box::new(source)
        } else if self == Self::Model {
            Box::new(RenamedSource::new(source, &options.names)?)
        } else {
            Box::new(RenamedSource::optimizer(source, &options.names)?)
        })
    }
}

/// The differences between a source and a model. Reads no values, changes nothing, and works before
/// the model is set up. Not collective. See [`compare_with`] for filters and names.
pub fn compare(source: &dyn TensorSource, tree: &ModuleTree) -> LoadReport {
    let options = LoadOptions::default();
    match_up(source, &parameter_targets(tree, &options), &options, Section::Model).0
}

/// [`compare`] with options.
///
/// # Errors
/// If the name rules fail: see [`RenamedSource::new`].
pub fn compare_with(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    options: &LoadOptions,
) -> Result<LoadReport> {
    let source = Section::Model.renamed(source, options)?;
    Ok(match_up(&*source, &parameter_targets(tree, options), options, Section::Model).0)
}

/// The error that [`load_into`] would have for this model, which need not be set up: differences if strict,
/// patterns that match nothing. Reads no values, changes nothing. Not collective.
///
/// # Errors
/// As [`load_into`].
pub fn check_compatible_with(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    options: &LoadOptions,
) -> Result<()> {
    let targets = parameter_targets(tree, options);
    let renamed = Section::Model.renamed(source, options)?;
    check_patterns(source, &*renamed, &targets, options)?;
    LoadPlan::new(&*renamed, &targets, options, Section::Model).check(options)
}

/// Checks that a source has the tensors of this model. Changes nothing. Not collective.
///
/// # Errors
/// [`Error::Checkpoint`](crate::Error::Checkpoint), listing everything that is missing, unexpected
/// or of another shape.
pub fn check_compatible(source: &dyn TensorSource, tree: &ModuleTree) -> Result<()> {
    let report = compare(source, tree);
    refuse_differences(source.location(), &[(&report, "model")], source.filtered(), None)
}

/// Fills this rank's part of every parameter
/// ([`Parameter::local`](fulgurite_engine::parameter::Parameter::local)) and every persistent buffer, converting dtypes. A tied
/// parameter is found under any of its names. `options` may be a `bool`, for
/// [`strict`](LoadOptions::strict).
///
/// If strict, a source with differences is refused before anything is changed. Otherwise the
/// tensors that fit are loaded, the others keep their values, and the report lists them. Every rank
/// calls it; it is not collective.
///
/// # Errors
/// As [`check_compatible`] if strict; if the name rules fail; if a parameter was not set up; if
/// values cannot be read.
pub fn load_into(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    options: impl Into<LoadOptions>,
) -> Result<LoadReport> {
    let options = options.into();
    refuse_broadcast(&options)?;
    let targets = local_parameter_targets(tree, &options)?;
    let renamed = Section::Model.renamed(source, &options)?;
    check_patterns(source, &*renamed, &targets, &options)?;
    let plan = LoadPlan::new(&*renamed, &targets, &options, Section::Model);
    plan.check(&options)?;
    plan.fill(&options)
}

/// Fills this rank's part of an optimizer's state from the tensors named by [`optimizer_key`];
/// otherwise as [`load_into`]. `tree` has the names of tied parameters. Filter and name rules apply
/// to the parameters' names.
///
/// # Errors
/// As [`load_into`].
pub fn load_optimizer(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    states: &[StateTensor],
    options: impl Into<LoadOptions>,
) -> Result<LoadReport> {
    let options = options.into();
    refuse_broadcast(&options)?;
    let targets = state_targets(tree, states, &options);
    let source = Section::Optimizer.renamed(source, &options)?;
    let plan = LoadPlan::new(&*source, &targets, &options, Section::Optimizer);
    plan.check(&options)?;
    plan.fill(&options)
}

/// The differences between a [distributed checkpoint](DistributedCheckpoint) and the model and
/// optimizer that were filled from it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// The differences of the model.
    pub model: LoadReport,
    /// The differences of the optimizer; empty if it was not loaded.
    pub optimizer: LoadReport,
}

/// Fills a model, and an optimizer's state unless that is `None` or
/// [`weights_only`](LoadOptions::weights_only) is set, from one checkpoint. If strict, both are
/// compared first, and neither is changed if one does not fit. Every rank calls it; it is not
/// collective.
///
/// # Errors
/// As [`load_into`]; one error lists the differences of both.
pub fn restore(
    checkpoint: &DistributedCheckpoint,
    tree: &ModuleTree,
    optimizer: Option<&[StateTensor]>,
    options: impl Into<LoadOptions>,
) -> Result<RestoreReport> {
    let options = options.into();
    refuse_broadcast(&options)?;
    let parameters = local_parameter_targets(tree, &options)?;
    let model = Section::Model.renamed(checkpoint.model(), &options)?;
    check_patterns(checkpoint.model(), &*model, &parameters, &options)?;
    let model = LoadPlan::new(&*model, &parameters, &options, Section::Model);
    let Some(states) = optimizer.filter(|_| !options.weights_only) else {
        model.check(&options)?;
        return Ok(RestoreReport { model: model.fill(&options)?, ..RestoreReport::default() });
    };
    let states = state_targets(tree, states, &options);
    let optimizer = Section::Optimizer.renamed(checkpoint.optimizer(), &options)?;
    let optimizer = LoadPlan::new(&*optimizer, &states, &options, Section::Optimizer);
    if options.strict {
        let reports = [(&model.report, "model"), (&optimizer.report, "optimizer")];
        let filtered = checkpoint.manifest().filter.as_deref();
        refuse_differences(checkpoint.location(), &reports, filtered, options.advice)?;
    }
    model.check(&options)?;
    Ok(RestoreReport { optimizer: optimizer.fill(&options)?, model: model.fill(&options)? })
}

/// torchtune's name for [`load_into`]: fills this rank's parts of a model from any tensors, one at
/// a time, without ever having the whole model in memory.
///
/// Unlike torchtune's, it works on meshes of any number of dimensions, and reports unexpected keys
/// instead of failing on them.
///
/// # Errors
/// As [`load_into`].
pub fn load_from_full_model_state_dict(
    tree: &ModuleTree,
    source: &dyn TensorSource,
    options: impl Into<LoadOptions>,
) -> Result<LoadReport> {
    load_into(source, tree, options)
}

/// torchtune's name for [`load_optimizer`]. State is found by the parameter's name, never by its
/// position.
///
/// # Errors
/// As [`load_optimizer`].
pub fn load_from_full_optimizer_state_dict(
    tree: &ModuleTree,
    states: &[StateTensor],
    source: &dyn TensorSource,
    options: impl Into<LoadOptions>,
) -> Result<LoadReport> {
    load_optimizer(source, tree, states, options)
}

/// Lightning's `load_raw`: fills a model from the weights at `path`, in any format that [`open`]
/// takes.
///
/// Every rank calls it and reads its own parts; not collective. To be followed by the strategy's
/// [`finish_load`](fulgurite_engine::strategy::Strategy::finish_load).
///
/// # Errors
/// As [`open`] and [`load_into`].
pub fn load_raw(
    path: impl AsRef<Path>,
    tree: &ModuleTree,
    options: impl Into<LoadOptions>,
) -> Result<LoadReport> {
    load_into(&*open(path)?, tree, options)
}

fn refuse_broadcast(options: &LoadOptions) -> Result<()> {
    match options.broadcast_from_rank0 {
        false => Ok(()),
        true => Err(Error::other(
            "`broadcast_from_rank0` is collective, and this function reads on each rank by itself; load with \
             `Fabric::load_raw`, `Fabric::load_model_state_dict` or a `RankZeroSource`",
        )),
    }
}

pub(super) fn local_parameter_targets(
    tree: &ModuleTree,
    options: &LoadOptions,
) -> Result<Vec<LoadTarget>> {
    let mut targets = parameter_targets(tree, options);
    let (parameters, buffers) = targets.split_at_mut(tree.parameters().len());
    for (target, parameter) in parameters.iter_mut().zip(tree.parameters()) {
        let local = parameter.local()?;
        target.local = Some((local.values, local.region));
    }
    for (target, buffer) in buffers.iter_mut().zip(tree.persistent_buffers()) {
        target.local = Some((buffer.value()?.flatten_all()?, Region::full(buffer.shape())));
    }
    Ok(targets)
}

/// The parameters, and after them the persistent buffers.
fn parameter_targets(tree: &ModuleTree, options: &LoadOptions) -> Vec<LoadTarget> {
    let aliases = aliases(tree);
    let buffers = tree.persistent_buffers().map(|buffer| LoadTarget {
        names: vec![buffer.fqn().to_owned()],
        shape: buffer.shape().to_vec(),
        dtype: buffer.dtype(),
        adapter: false,
        kept: Section::Model.keeps(options, buffer.fqn()),
        local: None,
    });
    tree.parameters()
        .iter()
        .map(|parameter| {
            let others = aliases.get(parameter.fqn()).into_iter().flatten().copied();
            LoadTarget {
                names: [parameter.fqn()].into_iter().chain(others).map(str::to_owned).collect(),
                shape: parameter.global_shape().to_vec(),
                dtype: parameter.dtype(),
                adapter: parameter.is_adapter(),
                kept: Section::Model.keeps(options, parameter.fqn()),
                local: None,
            }
        })
        .chain(buffers)
        .collect()
}

pub(super) fn state_targets(
    tree: &ModuleTree,
    states: &[StateTensor],
    options: &LoadOptions,
) -> Vec<LoadTarget> {
    let aliases = aliases(tree);
    states
        .iter()
        .map(|state| {
            let others = aliases.get(state.fqn.as_str()).into_iter().flatten().copied();
            LoadTarget {
                names: [state.fqn.as_str()]
                    .into_iter()
                    .chain(others)
                    .map(|fqn| optimizer_key(fqn, state.name))
                    .collect(),
                shape: state.shape.clone(),
                dtype: state.values.dtype(),
                adapter: false,
                kept: options.filter.as_ref().is_none_or(|filter| filter.keeps(&state.fqn)),
                local: Some((state.values.clone(), state.region.clone())),
            }
        })
        .collect()
}

/// The other names of tied parameters, by their first name.
fn aliases(tree: &ModuleTree) -> BTreeMap<&str, Vec<&str>> {
    let mut aliases = BTreeMap::<_, Vec<_>>::new();
    for (alias, fqn) in tree.aliases() {
        aliases.entry(fqn).or_default().push(alias);
    }
    aliases
}

/// Checks that each pattern of the options matches something: those of the filter a parameter or a renamed
/// tensor, those that rename a tensor of the source.
pub(super) fn check_patterns(
    source: &dyn TensorSource,
    renamed: &dyn TensorSource,
    targets: &[LoadTarget],
    options: &LoadOptions,
) -> Result<()> {
    let idle = |pattern: &str, of: &str, names: &[&str]| {
        let few: Vec<String> = names.iter().take(5).map(|name| format!("`{name}`")).collect();
        let more = if names.len() > few.len() { ", …" } else { "" };
        let message = format!(
            "the pattern `{pattern}` matches no {of}: {}{more}. A pattern is the path of a module or \
             parameter from its beginning, with `*` for a segment or a part of one",
            few.join(", ")
        );
        Err(Error::checkpoint(source.location(), message))
    };
    let theirs = source.names();
    if let Some(from) = options.names.idle_pattern(&theirs) {
        return idle(from, "tensor of the checkpoint", &theirs);
    }
    let ours = targets.iter().flat_map(|target| &target.names).map(String::as_str);
    let names: Vec<&str> = ours.chain(renamed.names()).collect();
    match options.filter.as_ref().and_then(|filter| filter.idle_pattern(&names)) {
        Some(pattern) => {
            idle(pattern, "parameter of the model and no tensor of the checkpoint", &names)
        }
        None => Ok(()),
    }
}

/// The differences and, for each target that can be filled, its index and its name in the source.
fn match_up<'a>(
    source: &dyn TensorSource,
    targets: &'a [LoadTarget],
    options: &LoadOptions,
    section: Section,
) -> (LoadReport, Vec<(usize, &'a str)>) {
    let mut report = LoadReport::default();
    let mut matches = Vec::new();
    // A base has no adapters: they keep their initial values.
    let has = |target: &LoadTarget| target.names.iter().any(|name| source.info(name).is_some());
    let only_base = !targets.iter().any(|target| target.adapter && has(target))
        && targets.iter().any(|target| !target.adapter && has(target));
    for (i, target) in targets.iter().enumerate().filter(|(_, target)| target.kept) {
        let found = target.names.iter().find_map(|name| source.info(name).map(|info| (name, info)));
        let Some((name, info)) = found else {
            if !(target.adapter && only_base) {
                report.missing.push(target.names[0].clone());
            }
            continue;
        };
        let dtypes = (info.shape == target.shape).then(|| (Dtype::from(target.dtype), info.dtype));
        let other_dtype = options.dtypes == DtypePolicy::Exact
            && dtypes.is_some_and(|(expected, found)| {
                expected != found && loadable_dtype(found) != Some(target.dtype)
            });
        if dtypes.is_some() && !other_dtype {
            matches.push((i, name.as_str()));
            report.loaded.push(target.names[0].clone());
        } else {
            report.mismatched.push(Mismatch {
                name: name.clone(),
                expected: target.shape.clone(),
                found: info.shape,
                dtypes,
            });
        }
    }
    let known: BTreeSet<&str> = targets.iter().flat_map(|t| &t.names).map(String::as_str).collect();
    report.unexpected = source
        .names()
        .into_iter()
        .filter(|name| !known.contains(name) && section.keeps(options, name))
        .map(str::to_owned)
        .collect();
    (report, matches)
}

/// The targets, and the tensors of a source that they are filled from.
pub(super) struct LoadPlan<'a> {
    source: &'a dyn TensorSource,
    section: Section,
    targets: &'a [LoadTarget],
    matches: Vec<(usize, &'a str)>,
    report: LoadReport,
}

impl<'a> LoadPlan<'a> {
    pub(super) fn new(
        source: &'a dyn TensorSource,
        targets: &'a [LoadTarget],
        options: &LoadOptions,
        section: Section,
    ) -> Self {
        let (report, matches) = match_up(source, targets, options, section);
        Self { source, section, targets, matches, report }
    }

    /// Fails for differences, if strict.
    pub(super) fn check(&self, options: &LoadOptions) -> Result<()> {
        if options.strict {
            let reports = [(&self.report, self.section.name())];
            let filtered = self.source.filtered();
            return refuse_differences(self.source.location(), &reports, filtered, options.advice);
        }
        let none_fits = self.section == Section::Model && self.matches.is_empty();
        if none_fits && self.targets.iter().any(|target| target.kept) {
            let mut described = self.report.describe(self.section.name());
            described.push_str(
                "\nNothing of it fits, so there is nothing to load. If only names differ, rename them",
            );
            return Err(Error::checkpoint(self.source.location(), described));
        }
        Ok(())
    }

    /// The names in the source of the tensors to load, each with the memory of this rank's part and its
    /// region, which may be empty.
    pub(super) fn fills(&self) -> impl Iterator<Item = (&'a str, Option<&'a (Tensor, Region)>)> {
        self.matches.iter().map(|&(i, name)| (name, self.targets[i].local.as_ref()))
    }

    pub(super) fn into_report(self) -> LoadReport {
        self.report
    }

    fn fill(self, options: &LoadOptions) -> Result<LoadReport> {
        for (i, name) in self.matches {
            let Some((values, region)) = &self.targets[i].local else { continue };
            if region.is_empty() {
                continue;
            }
            if options.verify {
                self.source.read_into(name, region, values)?;
            } else {
                self.source.read_into_unverified(name, region, values)?;
            }
        }
        Ok(self.report)
    }
}
