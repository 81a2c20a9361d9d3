//! Units and layers with their own compute dtype.

use std::collections::BTreeSet;

use candle_core::DType;

use super::keep_in_fp32::check_casts;
use super::pattern::pattern_names;
use super::tree::ModuleTree;
use super::unit::UnitHandle;
use crate::{Error, Result};

/// The compute dtype of some modules, where it differs from the model's
/// ([`ModuleInit::module_dtypes`](super::ModuleInit::module_dtypes)).
///
/// A unit computes in any dtype: it casts its input to its dtype, and its output to the model's.
/// Other layers, in or outside of a unit, may compute in f32 where the surrounding ones compute in
/// half precision. Only some kinds of layers cast.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleDtype {
    /// Pattern of units and layers, as in [`pattern_names`]. If several patterns name a module or
    /// modules around it, the innermost takes precedence, and of equals the last.
    pub modules: String,
    /// `None`: no dtype is set, but the pattern must match.
    pub compute_dtype: Option<DType>,
}

/// The index of the pattern in force for a path in the tree: of the patterns that name the path or
/// a module around it, the innermost, and of equals the last.
///
/// ```
/// use fulgurite_core::module::innermost_match;
///
/// let patterns = ["layers.*", "layers.*.norm", "layers.0.norm"];
/// assert_eq!(innermost_match(patterns, "layers.0.norm.weight"), Some(2));
/// assert_eq!(innermost_match(patterns, "layers.1.norm.weight"), Some(1));
/// assert_eq!(innermost_match(patterns, "layers.1.mlp"), Some(0));
/// assert_eq!(innermost_match(patterns, "norm"), None);
/// ```
pub fn innermost_match<'a>(
    patterns: impl IntoIterator<Item = &'a str, IntoIter: Clone>,
    path: &str,
) -> Option<usize> {
    let patterns = patterns.into_iter();
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    let ends: Vec<usize> = ends.collect();
    ends.into_iter().rev().find_map(|end| {
        let matches = patterns.clone().enumerate().filter(|(_, p)| pattern_names(p, &path[..end]));
        matches.last().map(|(i, _)| i)
    })
}

/// The dtype requested for the module at this path.
pub(super) fn of(dtypes: &[ModuleDtype], path: &str) -> Option<DType> {
    let asked = || dtypes.iter().filter(|of| of.compute_dtype.is_some());
    let found = innermost_match(asked().map(|of| of.modules.as_str()), path)?;
    asked().nth(found)?.compute_dtype
}

/// The dtype requested for the unit at this path, ignoring requests for modules around it.
pub(super) fn of_unit(dtypes: &[ModuleDtype], path: &str) -> Option<DType> {
    let of_unit = dtypes.iter().rev().filter(|of| pattern_names(&of.modules, path));
    of_unit.filter_map(|of| of.compute_dtype).next()
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Checks that each pattern names units or layers, and that they can compute in the requested
/// dtype. `in_fp32` has the paths of layers that cast.
pub(super) fn check(
    dtypes: &[ModuleDtype],
    model: DType,
    tree: &ModuleTree,
    in_fp32: &BTreeSet<String>,
) -> Result<()> {
    for ModuleDtype { modules, .. } in dtypes {
        let units = tree.units().iter().map(UnitHandle::path);
        let mut paths = units.chain(tree.modules().keys().map(String::as_str));
        if !paths.any(|path| pattern_names(modules, path)) {
            return Err(no_module(modules, tree));
        }
    }
    for (path, info) in tree.modules() {
        let unit = info.unit.map(|unit| tree.units()[unit].path());
        let around = unit.and_then(|unit| of_unit(dtypes, unit)).unwrap_or(model);
        let names_it = dtypes.iter().any(|of| pattern_names(&of.modules, path));
        let Some(asked) = of(dtypes, path).filter(|asked| names_it && *asked != around) else {
            continue;
        };
        if asked != DType::F32 || !is_half(around) {
            return Err(Error::module(
                path,
                format!(
                    "is to compute in {asked:?} (`mixed_precision.overrides`), and what is around it computes in \
                     {around:?}: a layer can compute in f32 among others in bf16 or f16, and everything else is for \
                     whole units (`ModuleBuilder::unit`)"
                ),
            ));
        }
        check_casts(path, info, tree, in_fp32, "`mixed_precision.overrides`")?;
    }
    Ok(())
}

/// The error about a pattern that names nothing. In its list of paths, numbers become `*`.
fn no_module(pattern: &str, tree: &ModuleTree) -> Error {
    let general = |path: &str| -> String {
        let number = |segment: &str| segment.bytes().all(|byte| byte.is_ascii_digit());
        let segment = |segment| if number(segment) { "*" } else { segment };
        path.split('.').map(segment).collect::<Vec<_>>().join(".")
    };
    let units: BTreeSet<String> = tree.units().iter().map(|unit| general(unit.path())).collect();
    let layers: BTreeSet<String> = tree.modules().keys().map(|path| general(path)).collect();
    let list = |paths: BTreeSet<String>| match paths.is_empty() {
        true => "none".to_owned(),
        false => paths.into_iter().collect::<Vec<_>>().join(", "),
    };
    Error::Config(format!(
        "`trainer.strategy.mixed_precision.overrides`: the pattern `{pattern}` names no unit or layer of the \
         model. There are the units {}, and the layers {}",
        list(units),
        list(layers)
    ))
}
