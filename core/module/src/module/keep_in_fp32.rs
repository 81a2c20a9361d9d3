//! Layers that compute in f32 in a half-precision model.

use std::collections::BTreeSet;

use super::adapters::is_under;
use super::pattern::{PATTERN_HELP, any_pattern_matches, pattern_matches, pattern_names};
use super::tree::{ModuleInfo, ModuleTree};
use crate::{Error, Result};

/// Whether one of the patterns matches the layer at this path.
pub(super) fn keeps(patterns: &[String], path: &str) -> bool {
    any_pattern_matches(patterns, path)
}

/// Checks that each pattern matches layers that can cast. `in_fp32` has their paths. A layer named
/// directly by a pattern must be one of them.
pub(super) fn check(
    patterns: &[String],
    tree: &ModuleTree,
    in_fp32: &BTreeSet<String>,
) -> Result<()> {
    for pattern in patterns {
        let wrong = |what: &str| {
            Err(Error::Config(format!(
                "`trainer.keep_in_fp32`: no layer of the model {what} `{pattern}`. {PATTERN_HELP}"
            )))
        };
        if !tree.modules().keys().any(|path| pattern_matches(pattern, path)) {
            return wrong("matches");
        }
        // A pattern that names a module around such layers means the layers; the module casts
        // nothing.
        let named = tree.modules().iter().filter(|(path, _)| {
            pattern_names(pattern, path) && !in_fp32.iter().any(|layer| is_under(path, layer))
        });
        for (path, info) in named {
            check_casts(path, info, tree, in_fp32, "`trainer.keep_in_fp32`")?;
        }
        if !in_fp32.iter().any(|path| pattern_matches(pattern, path)) {
            return wrong("can cast what it gets under");
        }
    }
    Ok(())
}

/// Checks that a layer named by `key` can cast its inputs.
pub(super) fn check_casts(
    path: &str,
    info: &ModuleInfo,
    tree: &ModuleTree,
    in_fp32: &BTreeSet<String>,
    key: &str,
) -> Result<()> {
    let wrong =
        |message: String| Err(Error::module(path, format!("is named by {key}, and {message}")));
    let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
    let whole = tree.modules().get(parent);
    // A norm inside a block sums in f32 anyway, and its weight is then in f32, too.
    let is_norm = info.kind.ends_with("Norm") && in_fp32.contains(path);
    if !is_norm && whole.is_some_and(|whole| whole.parallel.parts().contains(&name)) {
        return wrong(format!("it is computed as a part of `{parent}`; name that instead"));
    }
    if !in_fp32.contains(path) {
        return wrong(format!(
            "it cannot cast what it gets: it is of the kind {}. Norms, convolutions, linear layers with a \
             weight of their own, attention and feed-forward blocks of `nn` can",
            info.kind
        ));
    }
    Ok(())
}
