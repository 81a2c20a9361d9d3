//! Loading models and optimizers from tensor sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

use super::load_report::refuse_differences;
use super::manifest::Section;
use super::stored::loadable_dtype;
use super::tied::{differ, same_region};
use super::{
    DistributedCheckpoint, DtypePolicy, LoadOptions, LoadReport, Mismatch, RenamedSource,
    TensorInfo, TensorSource, UnpackedSource, open, optimizer_key, parse_optimizer_key,
};
use crate::{Error, Result};
use fulgurite_engine::autograd::storage;
use fulgurite_engine::module::{ModuleTree, any_pattern_matches};
use fulgurite_engine::optim::StateTensor;
use fulgurite_engine::quantization::Packed;
use fulgurite_engine::shard::Region;
use fulgurite_engine::strategy::STRATEGY_STATE;

/// A tensor to fill.
pub(super) struct LoadTarget {
    /// The names that it may have in a source.
    names: Vec<String>,
    /// The names that the filter keeps. If a source has several of them, their tensors must be
    /// equal.
    tied: Vec<String>,
    shape: Vec<usize>,
    dtype: DType,
    /// Whether it belongs to an adapter.
    adapter: bool,
    /// Whether the filter keeps it.
    kept: bool,
    /// For a part of a quantised weight: the whole weight, from which it can be filled too.
    packed: Option<Packed>,
    /// This rank's part in memory, and its region; `None` for a comparison.
    local: Option<(Tensor, Region)>,
}

impl LoadTarget {
    /// Returns the source's tensor that fills this target, either as it is or to be packed.
    fn find<'a>(&'a self, source: &dyn TensorSource) -> Option<(&'a str, TensorInfo)> {
        let whole = self.packed.as_ref().and_then(|packed| {
            let info = source.info(&packed.weight).filter(|info| info.shape == packed.shape)?;
            let is_float = loadable_dtype(info.dtype).is_some_and(|dtype| dtype.is_float());
            is_float.then_some((packed.weight.as_str(), info))
        });
        let named = |name: &'a String| source.info(name).map(|info| (name.as_str(), info));
        whole.or_else(|| self.names.iter().find_map(named))
    }

    /// Returns the packing that filling from a tensor of this shape and dtype needs, if any.
    fn is_packed_from(&self, shape: &[usize], dtype: Dtype) -> Option<&Packed> {
        let is_float = loadable_dtype(dtype).is_some_and(|dtype| dtype.is_float());
        self.packed.as_ref().filter(|packed| is_float && packed.shape == *shape)
    }
}

impl Section {
    /// Whether the filter of the options keeps the tensor of this name.
    fn keeps(self, options: &LoadOptions, name: &str) -> bool {
        options.filter.as_ref().is_none_or(|filter| match self {
            Self::Model => filter.keeps(name),
            Self::Optimizer => filter.keeps_state(name),
        })
    }

    /// Returns the source under the model's names.
    ///
    /// Quantised weights of the source are unpacked where the model does not hold them quantised.
    pub(super) fn renamed<'s>(
        self,
        source: &'s dyn TensorSource,
        targets: &[LoadTarget],
        options: &LoadOptions,
    ) -> Result<Box<dyn TensorSource + 's>> {
        Ok(match (self, options.names.is_empty()) {
            (Self::Model, true) => Box::new(unpacked(source, targets)),
            (Self::Model, false) => {
                Box::new(unpacked(RenamedSource::new(source, &options.names)?, targets))
            }
            (Self::Optimizer, true) => Box::new(source),
            (Self::Optimizer, false) => Box::new(RenamedSource::optimizer(source, &options.names)?),
        })
    }
}

/// Unpacks the source's quantised weights, except those that the model holds in the same format.
fn unpacked<S: TensorSource>(source: S, targets: &[LoadTarget]) -> UnpackedSource<S> {
    let packed = targets.iter().filter(|target| target.packed.is_some());
    let packed: BTreeMap<&str, &[usize]> =
        packed.map(|target| (target.names[0].as_str(), &target.shape[..])).collect();
    UnpackedSource::except(source, |name, shape| packed.get(name) == Some(&shape))
}

/// Returns the differences between a source and a model.
///
/// Reads no values, changes nothing, and works before the model is set up. Not collective. See
/// [`compare_with`] for filters and names.
pub fn compare(source: &dyn TensorSource, tree: &ModuleTree) -> LoadReport {
    let options = LoadOptions::default();
    let targets = parameter_targets(tree, &options);
    match_up(&unpacked(source, &targets), &targets, &options, Section::Model).report
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
    let targets = parameter_targets(tree, options);
    let source = Section::Model.renamed(source, &targets, options)?;
    Ok(match_up(&*source, &targets, options, Section::Model).report)
}

/// Fails as [`load_into`] would for this model, which need not be set up.
///
/// It reports differences if strict, and patterns that match nothing. Reads no values, changes
/// nothing. Not collective.
///
/// # Errors
/// As [`load_into`].
pub fn check_compatible_with(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    options: &LoadOptions,
) -> Result<()> {
    let targets = parameter_targets(tree, options);
    let renamed = Section::Model.renamed(source, &targets, options)?;
    check_patterns(source, &*renamed, &targets, options)?;
    LoadPlan::new(&*renamed, &targets, options, Section::Model).check(options)
}

/// Checks that a source has the tensors of this model. Changes nothing. Not collective.
///
/// # Errors
/// [`Error::Checkpoint`](crate::Error::Checkpoint), listing all tensors that are missing,
/// unexpected or of another shape.
pub fn check_compatible(source: &dyn TensorSource, tree: &ModuleTree) -> Result<()> {
    let report = compare(source, tree);
    refuse_differences(source.location(), &[(&report, "model")], source.filtered(), None)
}

/// Fills this rank's part of every parameter and every persistent buffer, converting dtypes.
///
/// The part is [`Parameter::local`](fulgurite_engine::parameter::Parameter::local). A tied
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
    let renamed = Section::Model.renamed(source, &targets, &options)?;
    check_patterns(source, &*renamed, &targets, &options)?;
    let plan = LoadPlan::new(&*renamed, &targets, &options, Section::Model);
    plan.check(&options)?;
    plan.fill(&options)
}

/// Fills this rank's part of an optimizer's state from the tensors named by [`optimizer_key`].
///
/// Otherwise as [`load_into`]. `tree` has the names of tied parameters. Filter and name rules apply
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
    let source = Section::Optimizer.renamed(source, &targets, &options)?;
    let plan = LoadPlan::new(&*source, &targets, &options, Section::Optimizer);
    plan.check(&options)?;
    plan.fill(&options)
}

/// The differences between a [distributed checkpoint](DistributedCheckpoint) and the model and
/// optimizer filled from it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoreReport {
    /// The differences of the model.
    pub model: LoadReport,
    /// The differences of the optimizer; empty if it was not loaded.
    pub optimizer: LoadReport,
}

/// Fills a model and, if given, an optimizer's state from one checkpoint.
///
/// With [`weights_only`](LoadOptions::weights_only) the optimizer is left alone. If strict, both
/// are compared first, and neither is changed if one does not fit. Every rank calls it; it is not
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
    let model = Section::Model.renamed(checkpoint.model(), &parameters, &options)?;
    check_patterns(checkpoint.model(), &*model, &parameters, &options)?;
    let model = LoadPlan::new(&*model, &parameters, &options, Section::Model);
    let Some(states) = optimizer.filter(|_| !options.weights_only) else {
        model.check(&options)?;
        return Ok(RestoreReport { model: model.fill(&options)?, ..RestoreReport::default() });
    };
    let states = state_targets(tree, states, &options);
    let optimizer = Section::Optimizer.renamed(checkpoint.optimizer(), &states, &options)?;
    let optimizer = LoadPlan::new(&*optimizer, &states, &options, Section::Optimizer);
    if options.strict {
        let reports = [(&model.report, "model"), (&optimizer.report, "optimizer")];
        let filtered = checkpoint.manifest().filter.as_deref();
        refuse_differences(checkpoint.location(), &reports, filtered, options.advice)?;
    }
    model.check(&options)?;
    // The model first: an optimizer's state may replace the values of its parameters.
    let model = model.fill(&options)?;
    Ok(RestoreReport { model, optimizer: optimizer.fill(&options)? })
}

/// Fills this rank's parts of a model from any tensors, under torchtune's name for [`load_into`].
///
/// It fills one tensor at a time, without ever having the whole model in memory.
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

/// torchtune's name for [`load_optimizer`]. State is found by the parameter's name, never by
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

/// Fills a model from the weights at `path`, in any format that [`open`] takes, as Lightning's
/// `load_raw`.
///
/// Every rank calls it and reads its own parts; not collective. Call the strategy's
/// [`finish_load`](fulgurite_engine::strategy::Strategy::finish_load) afterwards.
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
             `Fabric::load_raw`, `FullState::load_model_state_dict` or a `RankZeroSource`",
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

/// Returns the parameters, followed by the persistent buffers.
fn parameter_targets(tree: &ModuleTree, options: &LoadOptions) -> Vec<LoadTarget> {
    let aliases = aliases(tree);
    let buffers = tree.persistent_buffers().map(|buffer| LoadTarget {
        names: vec![buffer.fqn().to_owned()],
        tied: Vec::new(),
        shape: buffer.shape().to_vec(),
        dtype: buffer.dtype(),
        adapter: false,
        packed: None,
        kept: Section::Model.keeps(options, buffer.fqn()),
        local: None,
    });
    tree.parameters()
        .iter()
        .map(|parameter| {
            let others = aliases.get(parameter.fqn()).into_iter().flatten().copied();
            let names: Vec<String> =
                [parameter.fqn()].into_iter().chain(others).map(str::to_owned).collect();
            let kept = |name: &&String| Section::Model.keeps(options, name);
            LoadTarget {
                tied: names.iter().filter(kept).cloned().collect(),
                names,
                shape: parameter.global_shape().to_vec(),
                dtype: parameter.dtype(),
                adapter: parameter.is_adapter(),
                packed: parameter.packed().cloned(),
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
                tied: Vec::new(),
                shape: state.shape.clone(),
                dtype: state.values.dtype(),
                adapter: false,
                packed: None,
                kept: options.filter.as_ref().is_none_or(|filter| filter.keeps(&state.fqn)),
                local: Some((state.values.clone(), state.region.clone())),
            }
        })
        .collect()
}

/// Returns the other names of tied parameters, by their first name.
fn aliases(tree: &ModuleTree) -> BTreeMap<&str, Vec<&str>> {
    let mut aliases = BTreeMap::<_, Vec<_>>::new();
    for (alias, fqn) in tree.aliases() {
        aliases.entry(fqn).or_default().push(alias);
    }
    aliases
}

/// Checks that each pattern of the options matches something.
///
/// Patterns of the filter must match a parameter or a renamed tensor; patterns of the renaming must
/// match a tensor of the source.
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

/// Whether a state tensor's key belongs to a strategy's own state ([`STRATEGY_STATE`]), which other
/// strategies neither have nor need.
fn is_of_strategy(key: &str) -> bool {
    parse_optimizer_key(key).is_some_and(|(_, name)| name.starts_with(STRATEGY_STATE))
}

/// The result of [`match_up`].
#[derive(Default)]
struct Matches<'a> {
    report: LoadReport,
    /// For each target that can be filled, its index and the tensor's name in the source.
    filled: Vec<(usize, &'a str)>,
    /// The first wanted tensor that cannot be read, and the reason.
    unreadable: Option<(String, String)>,
}

/// Compares names, shapes and dtypes.
fn match_up<'a>(
    source: &dyn TensorSource,
    targets: &'a [LoadTarget],
    options: &LoadOptions,
    section: Section,
) -> Matches<'a> {
    let Matches { mut report, filled: mut matches, mut unreadable } = Matches::default();
    // Base weights have no adapters, so the adapters keep their initial values.
    let has = |target: &LoadTarget| target.find(source).is_some();
    let only_base = !targets.iter().any(|target| target.adapter && has(target))
        && targets.iter().any(|target| !target.adapter && has(target));
    for (i, target) in targets.iter().enumerate().filter(|(_, target)| target.kept) {
        let Some((name, info)) = target.find(source) else {
            let reason = |name: &String| Some((name.clone(), source.unreadable(name)?.to_owned()));
            unreadable = unreadable.or_else(|| target.names.iter().find_map(reason));
            let of_strategy = section == Section::Optimizer && is_of_strategy(&target.names[0]);
            if any_pattern_matches(&options.optional, &target.names[0]) {
                report.new.push(target.names[0].clone());
            } else if !(target.adapter && only_base || of_strategy) {
                report.missing.push(target.names[0].clone());
            }
            continue;
        };
        if target.is_packed_from(&info.shape, info.dtype).is_some() {
            matches.push((i, name));
            report.loaded.push(target.names[0].clone());
            continue;
        }
        let dtypes = (info.shape == target.shape).then(|| (Dtype::from(target.dtype), info.dtype));
        let other_dtype = options.dtypes == DtypePolicy::Exact
            && dtypes.is_some_and(|(expected, found)| {
                expected != found && loadable_dtype(found) != Some(target.dtype)
            });
        if dtypes.is_some() && !other_dtype {
            matches.push((i, name));
            report.loaded.push(target.names[0].clone());
        } else {
            report.mismatched.push(Mismatch {
                name: name.to_owned(),
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
        .filter(|name| section == Section::Model || !is_of_strategy(name))
        .map(str::to_owned)
        .collect();
    Matches { report, filled: matches, unreadable }
}

/// Targets, and the tensors of a source to fill them from.
pub(super) struct LoadPlan<'a> {
    source: &'a dyn TensorSource,
    section: Section,
    targets: &'a [LoadTarget],
    matches: Vec<(usize, &'a str)>,
    report: LoadReport,
    unreadable: Option<(String, String)>,
}

impl<'a> LoadPlan<'a> {
    pub(super) fn new(
        source: &'a dyn TensorSource,
        targets: &'a [LoadTarget],
        options: &LoadOptions,
        section: Section,
    ) -> Self {
        let Matches { report, filled, unreadable } = match_up(source, targets, options, section);
        Self { source, section, targets, matches: filled, report, unreadable }
    }

    /// Fails for a tensor that cannot be read and, if strict, for differences.
    pub(super) fn check(&self, options: &LoadOptions) -> Result<()> {
        if let Some((name, reason)) = &self.unreadable {
            return Err(Error::checkpoint(
                self.source.location(),
                format!("tensor `{name}` {reason}, or leave it out with `checkpoint.load.exclude`"),
            ));
        }
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

    /// Returns targets for which the source has several tensors.
    ///
    /// Each item is the target's index, the name that is read, and another name.
    pub(super) fn shared(&self) -> impl Iterator<Item = (usize, &'a str, &'a str)> {
        // A quantised weight's part that is packed from the whole weight does not have this name.
        let has_name =
            |&&(i, name): &&(usize, &str)| self.targets[i].names.iter().any(|n| n == name);
        self.matches.iter().filter(has_name).flat_map(move |&(i, name)| {
            let tied = self.targets[i].tied.iter().map(String::as_str);
            let is_other = move |other: &&str| *other != name && self.source.info(other).is_some();
            tied.filter(is_other).map(move |other| (i, name, other))
        })
    }

    /// Checks that this rank's parts of tensors that are tied in the model are equal in the source.
    fn check_tied(&self) -> Result<()> {
        for (i, name, other) in self.shared() {
            let local = self.targets[i].local.as_ref().filter(|(_, region)| !region.is_empty());
            let Some((_, region)) = local else { continue };
            if !same_region(self.source, name, other, region)? {
                return Err(differ(self.source, name, other));
            }
        }
        Ok(())
    }

    /// The reads, in the order of the model's parameters.
    pub(super) fn fills(&self) -> impl Iterator<Item = Result<Fill<'a>>> {
        self.matches.iter().map(|&(i, name)| Fill::new(self.source, name, &self.targets[i]))
    }

    pub(super) fn into_report(self) -> LoadReport {
        self.report
    }

    fn fill(self, options: &LoadOptions) -> Result<LoadReport> {
        self.check_tied()?;
        for fill in self.fills() {
            let fill = fill?;
            let Some((values, region)) = &fill.into else { continue };
            if options.verify {
                self.source.read_into(fill.name, region, values)?;
            } else {
                self.source.read_into_unverified(fill.name, region, values)?;
            }
            fill.finish()?;
        }
        Ok(self.report)
    }
}

/// A tensor to read.
pub(super) struct Fill<'a> {
    /// Its name in the source.
    pub(super) name: &'a str,
    /// The memory to read into, and the region of the source's tensor for this rank; `None` if this
    /// rank needs nothing of the tensor.
    pub(super) into: Option<(Tensor, Region)>,
    /// The part of a quantised weight to pack from the read values.
    packed: Option<(&'a Packed, &'a (Tensor, Region))>,
}

impl<'a> Fill<'a> {
    fn new(source: &dyn TensorSource, name: &'a str, target: &'a LoadTarget) -> Result<Self> {
        let Some(local) = target.local.as_ref().filter(|(_, region)| !region.is_empty()) else {
            return Ok(Self { name, into: None, packed: None });
        };
        let info = source.info(name);
        let Some(packed) = info.and_then(|info| target.is_packed_from(&info.shape, info.dtype))
        else {
            return Ok(Self { name, into: Some(local.clone()), packed: None });
        };
        let rows = packed.rows(&local.1);
        let values = Tensor::zeros(rows.elem_count(), DType::F32, &Device::Cpu)?;
        Ok(Self { name, into: Some((values, rows)), packed: Some((packed, local)) })
    }

    /// Completes the fill after the memory was read into: packs the values if needed.
    pub(super) fn finish(self) -> Result<()> {
        match (self.packed, self.into) {
            (Some((packed, (target, region))), Some((rows, _))) => {
                storage::copy_from(target, &packed.pack(region, &rows)?.to_device(target.device())?)
            }
            _ => Ok(()),
        }
    }
}
