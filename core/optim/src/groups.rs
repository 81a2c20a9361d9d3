//! Parameter groups, chosen by FQN pattern.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use fulgurite_module::module::{PATTERN_HELP, any_pattern_matches, idle_pattern};
use fulgurite_module::parameter::Parameter;

/// Maximum number of FQNs in an error about a pattern.
const SHOWN: usize = 6;

/// Options of the parameters that match any of the patterns. Unset options are the optimizer's. In
/// a configuration file:
///
/// ```toml
/// [optimizer]
/// type = "adamw"
/// no_decay = ["*norm*", "bias"]
/// groups = [{ patterns = ["model.embed_tokens.weight"], lr = 1e-4 }]
/// ```
///
/// A parameter is in the first group that matches it. Parameters that match `no_decay` are never
/// decayed, whatever their group.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParamGroupConfig {
    /// Patterns of parameters, as [`pattern_matches`](fulgurite_module::module::pattern_matches)
    /// reads them.
    pub patterns: Vec<String>,
    /// The group's learning rate, before the schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// The group's weight decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// Parameters of an optimizer and the options they are updated with, as an entry of torch's
/// `param_groups`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// The FQNs of the group's parameters, in declaration order.
    pub params: Vec<String>,
    /// The options by name: `lr` (before the schedule, torch's `initial_lr`), `weight_decay`, and
    /// the optimizer's own, such as `beta1`, `beta2` and `eps`. A flag is 0 or 1.
    pub options: BTreeMap<String, f64>,
}

/// The options of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Hyper {
    pub(super) lr: f64,
    pub(super) weight_decay: f64,
}

impl Hyper {
    /// Returns the options of a group. `common` holds the options that all groups of the optimizer
    /// share.
    fn options(self, common: &[(&str, f64)]) -> BTreeMap<String, f64> {
        let own = [("lr", self.lr), ("weight_decay", self.weight_decay)];
        own.iter().chain(common).map(|&(name, value)| (name.to_owned(), value)).collect()
    }

    /// Reads the options of saved group number `index`.
    ///
    /// # Errors
    /// If an option is missing or out of range.
    fn from_group(group: &ParamGroup, index: usize) -> Result<Self> {
        let option = |name: &str| {
            let value = option(group, index, name)?;
            at_least_zero(&format!("`{name}` of the parameter group {index}"), value)?;
            Ok::<_, Error>(value)
        };
        Ok(Self { lr: option("lr")?, weight_decay: option("weight_decay")? })
    }
}

/// Reads one option of saved group number `index`.
///
/// # Errors
/// If the option is missing.
pub(super) fn option(group: &ParamGroup, index: usize, name: &str) -> Result<f64> {
    group.options.get(name).copied().ok_or_else(|| {
        let has: Vec<&str> = group.options.keys().map(String::as_str).collect();
        Error::other(format!(
            "the parameter group {index} has no `{name}`, it has {}: it is of another kind of optimizer",
            if has.is_empty() { "no options".to_owned() } else { has.join(", ") }
        ))
    })
}

/// Groups the parameters by their options, `hypers`.
///
/// The first group has the optimizer's own options, `base`, and may be empty. The others follow in
/// order of appearance.
pub(super) fn param_groups(
    parameters: &[Parameter],
    hypers: &[Hyper],
    base: Hyper,
    common: &[(&str, f64)],
) -> Vec<ParamGroup> {
    let mut found = vec![(base, Vec::new())];
    for (parameter, hyper) in parameters.iter().zip(hypers) {
        let fqn = parameter.fqn().to_owned();
        match found.iter_mut().find(|(known, _)| known == hyper) {
            Some((_, params)) => params.push(fqn),
            None => found.push((*hyper, vec![fqn])),
        }
    }
    let group = |(hyper, params): (Hyper, _)| ParamGroup { params, options: hyper.options(common) };
    found.into_iter().map(group).collect()
}

/// Returns the optimizer's options and the options of each parameter, from saved groups.
///
/// A parameter that no group names keeps its options. `common` names the options that all groups
/// share.
///
/// # Errors
/// If the list of groups is empty, or an option is missing, out of range, or unknown.
pub(super) fn load_param_groups(
    groups: &[ParamGroup],
    parameters: &[Parameter],
    hypers: &[Hyper],
    common: &[&str],
) -> Result<(Hyper, Vec<Hyper>)> {
    let mut by_name = BTreeMap::new();
    let mut base = None;
    for (i, group) in groups.iter().enumerate() {
        let known = |name: &str| ["lr", "weight_decay"].contains(&name) || common.contains(&name);
        if let Some(other) = group.options.keys().find(|name| !known(name)) {
            return Err(Error::other(format!(
                "the parameter group {i} has an option `{other}`, which this optimizer has not; it has lr, \
                 weight_decay, {}",
                common.join(", ")
            )));
        }
        let hyper = Hyper::from_group(group, i)?;
        base.get_or_insert(hyper);
        by_name.extend(group.params.iter().map(|fqn| (fqn.as_str(), hyper)));
    }
    let base = base.ok_or_else(|| {
        Error::other("there are no parameter groups: what is loaded has no state of this optimizer")
    })?;
    let of = |(parameter, own): (&Parameter, &Hyper)| {
        by_name.get(parameter.fqn()).copied().unwrap_or(*own)
    };
    Ok((base, parameters.iter().zip(hypers).map(of).collect()))
}

/// Returns the trainable parameters and the options of each, in order. Patterns may name frozen
/// parameters too.
///
/// # Errors
/// If an option is out of range, or a pattern matches no parameter.
pub(super) fn resolve(
    parameters: &[Parameter],
    base: Hyper,
    groups: &[ParamGroupConfig],
    no_decay: &[String],
) -> Result<(Vec<Parameter>, Vec<Hyper>)> {
    at_least_zero("optimizer.lr", base.lr)?;
    at_least_zero("optimizer.weight_decay", base.weight_decay)?;
    check_patterns("optimizer.no_decay", no_decay, parameters)?;
    for (i, group) in groups.iter().enumerate() {
        let key = |name| format!("optimizer.groups[{i}].{name}");
        if group.patterns.is_empty() {
            return Err(Error::Config(format!(
                "{} is empty; give the FQN patterns of the group's parameters",
                key("patterns")
            )));
        }
        check_patterns(&key("patterns"), &group.patterns, parameters)?;
        at_least_zero(&key("lr"), group.lr.unwrap_or(0.0))?;
        at_least_zero(&key("weight_decay"), group.weight_decay.unwrap_or(0.0))?;
    }
    let any = |patterns: &[String], fqn: &str| any_pattern_matches(patterns, fqn);
    let hyper = |parameter: &Parameter| {
        let fqn = parameter.fqn();
        let group = groups.iter().find(|group| any(&group.patterns, fqn));
        let decay = group.and_then(|g| g.weight_decay).unwrap_or(base.weight_decay);
        Hyper {
            lr: group.and_then(|g| g.lr).unwrap_or(base.lr),
            weight_decay: if any(no_decay, fqn) { 0.0 } else { decay },
        }
    };
    let trainable: Vec<_> = parameters.iter().filter(|p| p.requires_grad()).cloned().collect();
    let hypers = trainable.iter().map(hyper).collect();
    Ok((trainable, hypers))
}

pub(super) fn check_patterns(
    key: &str,
    patterns: &[String],
    parameters: &[Parameter],
) -> Result<()> {
    let Some(pattern) = idle_pattern(patterns, parameters.iter().map(Parameter::fqn)) else {
        return Ok(());
    };
    let mut names: Vec<_> = parameters.iter().take(SHOWN).map(Parameter::fqn).collect();
    if parameters.len() > SHOWN {
        names.push("…");
    }
    Err(Error::Config(format!(
        "{key}: the pattern {pattern:?} matches no parameter; the model has {}. {PATTERN_HELP}",
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    )))
}

/// # Errors
/// If the option is negative, NaN or too large for f32, the dtype of most updates.
pub(super) fn at_least_zero(key: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value <= f64::from(f32::MAX) {
        return Ok(());
    }
    let limit = match value.is_finite() && value > 0.0 {
        true => format!(" and at most {:e}, the largest of f32", f32::MAX),
        false => String::new(),
    };
    Err(Error::Config(format!("{key} must be a number of zero or more{limit}, got {value:?}")))
}

/// # Errors
/// If the option is not in `[0, 1)`.
pub(super) fn unit_interval(key: &str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        Ok(())
    } else {
        Err(Error::Config(format!("{key} must be at least 0 and less than 1, got {value:?}")))
    }
}

/// # Errors
/// If the option is not in `[0, 1]`.
pub(super) fn at_most_one(key: &str, value: f64) -> Result<()> {
    if (0.0..=1.0).contains(&value) {
        Ok(())
    } else {
        Err(Error::Config(format!("{key} must be from 0 to 1, got {value:?}")))
    }
}
