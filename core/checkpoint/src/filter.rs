//! The choice of parameters to save or load.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::{ShardTensor, parse_optimizer_key};
use fulgurite_engine::module::{ModuleTree, any_pattern_matches, idle_pattern};

/// Chooses the parameters of a partial save ([`SaveMeta::filter`](super::SaveMeta::filter)) or load
/// ([`LoadOptions::filter`](super::LoadOptions::filter)), with their optimizer state.
///
/// ```
/// use fulgurite_core::checkpoint::ParameterFilter;
///
/// let adapters = ParameterFilter::matching(["layers.*.lora_*", "head"]);
/// assert!(adapters.keeps("layers.3.lora_a") && adapters.keeps("head.bias"));
/// assert!(!adapters.keeps("layers.3.up.weight"));
/// ```
#[derive(Clone)]
pub struct ParameterFilter {
    what: String,
    keep: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The patterns of [`selecting`](Self::selecting) or [`matching`](Self::matching); else empty.
    patterns: Vec<String>,
}

impl ParameterFilter {
    /// Keeps the parameters whose FQN `keep` accepts.
    ///
    /// They must be the same on all ranks. `what` describes them in manifests and messages.
    pub fn new(
        what: impl Into<String>,
        keep: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { what: what.into(), keep: Arc::new(keep), patterns: Vec::new() }
    }

    /// Keeps the trainable parameters of `tree`.
    pub fn trainable(tree: &ModuleTree) -> Self {
        let names: BTreeSet<String> = tree.trainable().map(|p| p.fqn().to_owned()).collect();
        Self::new("trainable parameters", move |fqn| names.contains(fqn))
    }

    /// Keeps the parameters that match a pattern, as
    /// [`pattern_matches`](fulgurite_engine::module::pattern_matches) reads it.
    pub fn matching<P: Into<String>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        let kept = patterns.clone();
        let keep = move |fqn: &str| any_pattern_matches(&kept, fqn);
        Self { patterns: patterns.clone(), ..Self::new(patterns.join(", "), keep) }
    }

    /// Keeps parameters that match a pattern of `include` and none of `exclude`.
    ///
    /// An empty `include` matches every parameter. Patterns are as in [`matching`](Self::matching).
    ///
    /// ```
    /// use fulgurite_core::checkpoint::ParameterFilter;
    ///
    /// let backbone = ParameterFilter::selecting(&[], &["head".into(), "layers.*.bias".into()]);
    /// assert!(backbone.keeps("layers.0.weight") && !backbone.keeps("head.weight"));
    /// ```
    pub fn selecting(include: &[String], exclude: &[String]) -> Self {
        let what = match (include, exclude) {
            (_, []) => include.join(", "),
            ([], _) => format!("all but {}", exclude.join(", ")),
            _ => format!("{}, but not {}", include.join(", "), exclude.join(", ")),
        };
        let patterns = [include, exclude].concat();
        let (include, exclude) = (include.to_owned(), exclude.to_owned());
        let keep = move |fqn: &str| {
            (include.is_empty() || any_pattern_matches(&include, fqn))
                && !any_pattern_matches(&exclude, fqn)
        };
        Self { patterns, ..Self::new(what, keep) }
    }

    /// Returns the first pattern that matches none of these names.
    pub(super) fn idle_pattern(&self, names: &[&str]) -> Option<&str> {
        idle_pattern(&self.patterns, names.iter().copied())
    }

    /// Describes the kept parameters.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Whether the parameter of this name is kept.
    pub fn keeps(&self, fqn: &str) -> bool {
        (self.keep)(fqn)
    }

    /// Whether the optimizer state tensor of this [key](super::optimizer_key) is kept, which its
    /// parameter decides.
    pub(super) fn keeps_state(&self, key: &str) -> bool {
        self.keeps(parse_optimizer_key(key).map_or(key, |(fqn, _)| fqn))
    }

    /// Returns the tensors of a model and its optimizer that `filter` keeps.
    pub(super) fn apply<'a>(
        filter: Option<&Self>,
        model: &'a [ShardTensor],
        optimizer: &'a [ShardTensor],
    ) -> (Cow<'a, [ShardTensor]>, Cow<'a, [ShardTensor]>) {
        let Some(filter) = filter else {
            return (Cow::Borrowed(model), Cow::Borrowed(optimizer));
        };
        let model = model.iter().filter(|tensor| filter.keeps(&tensor.name)).cloned().collect();
        let state = optimizer.iter().filter(|tensor| filter.keeps_state(&tensor.name));
        (Cow::Owned(model), Cow::Owned(state.cloned().collect()))
    }
}

impl std::fmt::Debug for ParameterFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ParameterFilter").field(&self.what).finish()
    }
}
