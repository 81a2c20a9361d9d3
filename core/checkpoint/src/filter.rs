//! Which parameters are saved or loaded.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::{ShardTensor, parse_optimizer_key};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::module::prefix_match;

/// A choice of parameters, for saving ([`SaveMeta::filter`](super::SaveMeta::filter)) and loading
/// ([`LoadOptions::filter`](super::LoadOptions::filter)) a part of a model. A parameter's optimizer
/// state goes with it.
///
/// ```
/// use fulgurite_core::checkpoint::Filter;
///
/// let adapters = Filter::matching(["layers.*.lora_*", "head"]);
/// assert!(adapters.keeps("layers.3.lora_a") && adapters.keeps("head.bias"));
/// assert!(!adapters.keeps("layers.3.up.weight"));
/// ```
#[derive(Clone)]
pub struct Filter {
    what: String,
    keep: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

impl Filter {
    /// Those whose FQN `keep` accepts; `what` says in words which these are, for manifests and
    /// messages. `keep` must answer alike on all ranks.
    pub fn new(
        what: impl Into<String>,
        keep: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { what: what.into(), keep: Arc::new(keep) }
    }

    /// The parameters of `tree` that are trained.
    pub fn trainable(tree: &ModuleTree) -> Self {
        let names: BTreeSet<String> = tree.trainable().map(|p| p.fqn().to_owned()).collect();
        Self::new("trainable parameters", move |fqn| names.contains(fqn))
    }

    /// Parameters, and modules with all that is in them, by patterns in which `*` stands for a
    /// segment or a part of one.
    pub fn matching<P: Into<String>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns: Vec<String> = patterns.into_iter().map(Into::into).collect();
        Self::new(patterns.join(", "), move |fqn| {
            patterns.iter().any(|pattern| prefix_match(pattern, fqn).is_some())
        })
    }

    /// What it keeps, in words.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Whether the parameter of this name is kept.
    pub fn keeps(&self, fqn: &str) -> bool {
        (self.keep)(fqn)
    }

    /// Whether the optimizer's tensor of this [key](super::optimizer_key) is kept: whether its
    /// parameter is.
    pub fn keeps_state(&self, key: &str) -> bool {
        self.keeps(parse_optimizer_key(key).map_or(key, |(fqn, _)| fqn))
    }

    /// What is to be saved of a model and its optimizer.
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

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Filter").field(&self.what).finish()
    }
}
