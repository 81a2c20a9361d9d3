//! Filling models and optimizers from tensor sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use candle_core::Tensor;

use super::{TensorSource, optimizer_key};
use crate::module::ModuleTree;
use crate::optim::StateTensor;
use crate::shard::Region;
use crate::{Error, Result};

/// How what a source has and what a model wants differ.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// What the model has and the source does not, in the model's order; tied parameters by their
    /// first name.
    pub missing: Vec<String>,
    /// What the source has and the model does not, sorted.
    pub unexpected: Vec<String>,
    /// What both have, in different shapes.
    pub mismatched: Vec<Mismatch>,
}

/// A tensor of one shape in the model and another in the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Its name in the source.
    pub name: String,
    /// Its shape in the model.
    pub expected: Vec<usize>,
    /// Its shape in the source.
    pub found: Vec<usize>,
}

impl LoadReport {
    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// One error that lists everything; `Ok` if there is no difference. `whose` is `model` or
    /// `optimizer`.
    fn into_result(self, source: &dyn TensorSource, whose: &str) -> Result<Self> {
        if self.is_empty() {
            return Ok(self);
        }
        let mut message = format!("does not fit this {whose}:");
        let list = |message: &mut String, title: &str, lines: &[String]| {
            if !lines.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(message, "\n  {title} ({}):", lines.len());
                for line in lines {
                    let _ = write!(message, "\n    {line}");
                }
            }
        };
        let title = format!("missing, the {whose} has it and the checkpoint does not");
        list(&mut message, &title, &self.missing);
        let title = format!("unexpected, the checkpoint has it and the {whose} does not");
        list(&mut message, &title, &self.unexpected);
        let shapes: Vec<_> = self
            .mismatched
            .iter()
            .map(|m| {
                format!(
                    "{}: {:?} in the {whose}, {:?} in the checkpoint",
                    m.name, m.expected, m.found
                )
            })
            .collect();
        list(&mut message, "of another shape", &shapes);
        message.push_str("\nNothing was loaded. Use the configuration that it was saved with");
        Err(Error::checkpoint(source.location(), message))
    }
}

/// One thing to fill: the names it may have in a source, and where its values go.
struct Wanted {
    names: Vec<String>,
    shape: Vec<usize>,
    local: Option<(Tensor, Region)>,
}

/// How a source and a model differ. Reads no values, changes nothing, and works before the model is
/// set up. Not collective.
pub fn compare(source: &dyn TensorSource, tree: &ModuleTree) -> LoadReport {
    match_up(source, &parameters(tree)).0
}

/// Checks that a checkpoint is of this model, before anything is changed. Not collective.
///
/// # Errors
/// [`Error::Checkpoint`], listing everything that is missing, unexpected or of another shape.
pub fn check(source: &dyn TensorSource, tree: &ModuleTree) -> Result<()> {
    compare(source, tree).into_result(source, "model").map(drop)
}

/// Fills this rank's part of every parameter ([`Parameter::local`](crate::parameter::Parameter::local)),
/// converting dtypes. A tied parameter is found under any of its names.
///
/// With `strict`, a source that does not fit is refused before anything is changed; otherwise what
/// fits is loaded, the rest keeps its values, and the report says what that was. Every rank calls
/// it; it is not collective.
///
/// # Errors
/// As [`check`] if `strict`; if a parameter was not set up; if values cannot be read.
pub fn load_into(source: &dyn TensorSource, tree: &ModuleTree, strict: bool) -> Result<LoadReport> {
    let mut wanted = parameters(tree);
    for (wanted, parameter) in wanted.iter_mut().zip(tree.parameters()) {
        let local = parameter.local()?;
        wanted.local = Some((local.values, local.region));
    }
    fill(source, &wanted, strict, "model")
}

/// Fills this rank's part of an optimizer's state, from the tensors named by
/// [`optimizer_key`]; otherwise as [`load_into`]. `tree` tells the names of tied parameters.
///
/// # Errors
/// As [`load_into`].
pub fn load_optimizer(
    source: &dyn TensorSource,
    tree: &ModuleTree,
    states: &[StateTensor],
    strict: bool,
) -> Result<LoadReport> {
    let aliases = aliases(tree);
    let wanted: Vec<Wanted> = states
        .iter()
        .map(|state| {
            let others = aliases.get(state.fqn.as_str()).into_iter().flatten().copied();
            Wanted {
                names: [state.fqn.as_str()]
                    .into_iter()
                    .chain(others)
                    .map(|fqn| optimizer_key(fqn, state.name))
                    .collect(),
                shape: state.shape.clone(),
                local: Some((state.values.clone(), state.region.clone())),
            }
        })
        .collect();
    fill(source, &wanted, strict, "optimizer")
}

fn parameters(tree: &ModuleTree) -> Vec<Wanted> {
    let aliases = aliases(tree);
    tree.parameters()
        .iter()
        .map(|parameter| {
            let others = aliases.get(parameter.fqn()).into_iter().flatten().copied();
            Wanted {
                names: [parameter.fqn()].into_iter().chain(others).map(str::to_owned).collect(),
                shape: parameter.global_shape().to_vec(),
                local: None,
            }
        })
        .collect()
}

/// The other names of tied parameters, by their first.
fn aliases(tree: &ModuleTree) -> BTreeMap<&str, Vec<&str>> {
    let mut aliases = BTreeMap::<_, Vec<_>>::new();
    for (alias, fqn) in tree.aliases() {
        aliases.entry(fqn).or_default().push(alias);
    }
    aliases
}

/// The differences, and for each thing that can be filled, its place in `wanted` and its name.
fn match_up<'a>(
    source: &dyn TensorSource,
    wanted: &'a [Wanted],
) -> (LoadReport, Vec<(usize, &'a str)>) {
    let mut report = LoadReport::default();
    let mut matches = Vec::new();
    for (i, thing) in wanted.iter().enumerate() {
        let found = thing.names.iter().find_map(|name| source.info(name).map(|info| (name, info)));
        match found {
            None => report.missing.push(thing.names[0].clone()),
            Some((name, info)) if info.shape == thing.shape => matches.push((i, name.as_str())),
            Some((name, info)) => report.mismatched.push(Mismatch {
                name: name.clone(),
                expected: thing.shape.clone(),
                found: info.shape,
            }),
        }
    }
    let known: BTreeSet<&str> = wanted.iter().flat_map(|w| &w.names).map(String::as_str).collect();
    let names = source.names().into_iter();
    report.unexpected = names.filter(|name| !known.contains(name)).map(str::to_owned).collect();
    (report, matches)
}

fn fill(
    source: &dyn TensorSource,
    wanted: &[Wanted],
    strict: bool,
    whose: &str,
) -> Result<LoadReport> {
    let (report, matches) = match_up(source, wanted);
    let report = if strict { report.into_result(source, whose)? } else { report };
    for (i, name) in matches {
        if let Some((values, region)) = &wanted[i].local
            && !region.is_empty()
        {
            source.read_into(name, region, values)?;
        }
    }
    Ok(report)
}
