//! Which layers compute in f32 where the others compute in half precision.

use std::collections::BTreeSet;

use super::adapters::{matches_any, suffix_match};
use super::tree::{ModuleInfo, ModuleTree};
use crate::{Error, Result};

/// Whether one of the patterns names the layer at this path, or one that it is a part of.
pub(super) fn keeps(patterns: &[String], path: &str) -> bool {
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    !patterns.is_empty() && ends.into_iter().any(|end| matches_any(patterns, &path[..end]))
}

/// Checks that each pattern names layers, and that these can cast: `in_fp32` has the paths of those that do.
pub(super) fn check(
    patterns: &[String],
    tree: &ModuleTree,
    in_fp32: &BTreeSet<String>,
) -> Result<()> {
    for pattern in patterns {
        let mut named =
            tree.modules().iter().filter(|(path, _)| suffix_match(pattern, path)).peekable();
        if named.peek().is_none() {
            return Err(Error::Config(format!(
                "`trainer.keep_in_fp32`: no layer of the model matches `{pattern}`. A pattern is the end of a layer's \
                 path, with `*` for a segment or a part of one, such as `norm`"
            )));
        }
        for (path, info) in named {
            check_casts(path, info, tree, in_fp32, "`trainer.keep_in_fp32`")?;
        }
    }
    Ok(())
}

/// Checks that a layer that `key` names can cast what it gets.
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
    if whole.is_some_and(|whole| whole.parallel.parts().contains(&name)) {
        return wrong(format!("it is computed as a part of `{parent}`; name that instead"));
    }
    if !in_fp32.contains(path) {
        return wrong(format!(
            "it cannot cast what it gets: it is of the kind {}. Norms, linear layers with a weight of their \
             own, attention and feed-forward blocks of `nn` can",
            info.kind
        ));
    }
    Ok(())
}
