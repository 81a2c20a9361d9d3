//! Units and layers that compute in another dtype than the model.

use std::collections::BTreeSet;

use candle_core::DType;

use super::keep_in_fp32::check_casts;
use super::pattern::pattern_names;
use super::tree::ModuleTree;
use super::unit::UnitHandle;
use crate::{Error, Result};

/// What some modules compute in, where it is not the dtype of the others
/// ([`ModuleInit::module_dtypes`](super::ModuleInit::module_dtypes)).
///
/// A unit computes in any dtype: it casts its input to that, and its output to the model's. A layer within a unit, or
/// outside of all, computes in f32 where those around it compute in half precision, if it is of a kind that casts.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleDtype {
    /// Pattern of units and layers, as [`pattern_names`] reads it. Of several that name a module,
    /// or modules around it, the one for the innermost counts, and of those the last.
    pub modules: String,
    /// `None`: as without, but the pattern must match.
    pub compute_dtype: Option<DType>,
}

/// Which of the patterns counts for what is at this path in the tree: of those that name the path
/// or something around it, the last of those that name the innermost.
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

/// The dtype that is asked for what is at this path.
pub(super) fn of(dtypes: &[ModuleDtype], path: &str) -> Option<DType> {
    let asked = || dtypes.iter().filter(|of| of.compute_dtype.is_some());
    let found = innermost_match(asked().map(|of| of.modules.as_str()), path)?;
    asked().nth(found)?.compute_dtype
}

/// The dtype that is asked for a unit at this path, whatever is asked for what is around it.
pub(super) fn of_unit(dtypes: &[ModuleDtype], path: &str) -> Option<DType> {
    let of_unit = dtypes.iter().rev().filter(|of| pattern_names(&of.modules, path));
    of_unit.filter_map(|of| of.compute_dtype).next()
}

pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Checks that each pattern names units or layers, and that these can compute in what is asked for: `in_fp32` has the
/// paths of layers that cast.
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

/// The error about a pattern that names nothing; numbers in paths are `*` in the list of what there is.
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
