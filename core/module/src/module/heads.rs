//! The layers at a model's ends: embeddings and heads.

use super::tree::ModuleTree;

/// The names of layers that compute a model's outputs.
const HEADS: [&str; 3] = ["lm_head", "score", "classifier"];

/// Whether a layer's or a parameter's path has the name of a head.
pub(super) fn is_named_as_head(path: &str) -> bool {
    path.split('.').any(|name| HEADS.contains(&name))
}

impl ModuleTree {
    /// Marks the parameters of embeddings and heads.
    pub(super) fn mark_embeddings_and_heads(&self) {
        let embeddings = self.modules().iter().filter(|(_, info)| info.parallel.is_embedding());
        let to_loss =
            self.edges.iter().filter(|edge| edge.to.is_none()).flat_map(|edge| &edge.from);
        let ends: Vec<&String> = embeddings.map(|(path, _)| path).chain(to_loss).collect();
        for parameter in self.parameters() {
            let fqn = parameter.fqn();
            let is_in = |path: &&String| {
                fqn.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.'))
            };
            if is_named_as_head(fqn) || ends.iter().any(is_in) {
                parameter.mark_embedding_or_head();
            }
        }
    }
}
