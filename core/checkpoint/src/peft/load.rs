//! Filling a model's adapters from the directory of an adapter.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::super::{LoadOptions, LoadReport, ParameterFilter, TensorSource, load_into};
use super::files::saved;
use super::{ADAPTER_CONFIG, AdapterSource};
use crate::{Error, Result};
use fulgurite_engine::module::{Adapters, ModuleTree};

/// Fills a model's adapters, and the modules trained with them, from a PEFT directory.
///
/// If the directory has base weights, they are filled as well: PEFT writes them for adapted
/// embeddings and heads. Every rank calls it and reads its own parts; not collective. Call the
/// strategy's [`finish_load`](fulgurite_engine::strategy::Strategy::finish_load) afterwards.
///
/// # Errors
/// If the directory is not an adapter. If its scale differs from the model's adapters, or only one
/// of the two is a DoRA. If a tensor is missing, unexpected or of another shape. If modules share a
/// weight in the model, and the directory has only one of them or different values. Nothing is
/// changed then.
pub fn load_adapter(dir: &Path, tree: &ModuleTree, adapters: &Adapters) -> Result<LoadReport> {
    let is_stack = |name: &str| tree.parameter(name).is_some_and(|p| p.global_shape().len() == 3);
    let source = AdapterSource::open_for(dir, tree)?.with_stacks(is_stack)?;
    let theirs = source.adapters()?;
    let same = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
    if theirs.rank != adapters.rank || !same(theirs.scale(), adapters.scale()) {
        return Err(Error::checkpoint(
            dir,
            format!(
                "is an adapter of rank {} whose output is scaled by {}, and the model has adapters of rank {} \
                 and scale {}; take its configuration with `trainer.adapters.from`",
                theirs.rank,
                theirs.scale(),
                adapters.rank,
                adapters.scale()
            ),
        ));
    }
    if theirs.dora != adapters.dora {
        let (with, without) = match theirs.dora {
            true => ("has magnitudes (DoRA)", "have none"),
            false => ("has no magnitudes (it is no DoRA)", "have some"),
        };
        return Err(Error::checkpoint(
            dir,
            format!(
                "{with}, and the model's adapters {without}; set `trainer.adapters.dora = {}`, or take its \
                 configuration with `trainer.adapters.from`",
                theirs.dora
            ),
        ));
    }
    let aliases: BTreeMap<&str, &str> = tree.aliases().collect();
    let own = |name: &str| aliases.get(name).copied().unwrap_or(name).to_owned();
    let mut wanted: BTreeSet<String> = saved(tree).map(|p| p.fqn().to_owned()).collect();
    for name in source.names() {
        let fqn = own(name);
        let of_base = source.is_of_base(name) && tree.parameter(&fqn).is_some();
        if !of_base && !wanted.contains(&fqn) {
            let message = format!(
                "has a tensor `{name}`, for which the model has no adapter; nothing was loaded"
            );
            return Err(Error::checkpoint(source.location(), message));
        }
        wanted.insert(fqn);
    }
    check_tied(&source, &aliases)?;
    let shared = aliases.iter().filter(|(_, fqn)| wanted.contains(**fqn));
    let shared: Vec<String> = shared.map(|(alias, _)| (*alias).to_owned()).collect();
    wanted.extend(shared);
    let filter = ParameterFilter::new("the adapters", move |name| wanted.contains(name));
    let advice = "Is it an adapter of this model, and was it saved whole? If the vocabulary was resized, resize \
                  the base's, too";
    let options =
        LoadOptions { filter: Some(filter), advice: Some(advice), ..LoadOptions::default() };
    load_into(&source, tree, options)
}

/// Checks that the adapter has all modules that share a weight in the model, or none of them.
///
/// If there is only one, PEFT trained it separately from the others.
fn check_tied(source: &AdapterSource, aliases: &BTreeMap<&str, &str>) -> Result<()> {
    if source.config().ensures_weight_tying() {
        return Ok(());
    }
    let trained: BTreeSet<&str> = source.others().filter(|name| !source.is_of_base(name)).collect();
    let half =
        aliases.iter().find(|(alias, fqn)| trained.contains(*alias) != trained.contains(*fqn));
    let Some((alias, fqn)) = half else { return Ok(()) };
    let (there, other) = if trained.contains(fqn) { (fqn, alias) } else { (alias, fqn) };
    Err(Error::checkpoint(source.location(), apart(there, other)))
}

/// Returns the message about a module that was trained without the module that it is tied to.
pub(super) fn apart(there: &str, other: &str) -> String {
    format!(
        "has `{there}` and no `{other}`, and the two are one weight in the base (`tie_word_embeddings`): PEFT trained \
         `modules_to_save` apart from the other, which one weight cannot be. Untie the base, or train the adapter \
         with `ensure_weight_tying=True`; if the two were trained as one, set `\"ensure_weight_tying\": true` in \
         {ADAPTER_CONFIG}"
    )
}
