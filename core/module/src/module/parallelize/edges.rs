//! Checks plans along the edges that a model declares, before any rank starts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::wrong;
use crate::module::ModuleTree;
use crate::parallel::{LayerEdges, Layout, describe, mixed, same, sharded_loss};
use crate::parameter::Parameter;
use crate::{Error, Result};
use fulgurite_config::nearest;

/// An edge that a model declares: the input of a module is computed from one of these outputs, or
/// from their sum.
#[derive(Debug, Clone)]
pub(crate) struct Edge {
    pub(crate) from: Vec<String>,
    /// `None`: the loss.
    pub(crate) to: Option<String>,
}

/// The layout of a module's output, and its source.
type Given = (Layout, Arc<str>);

impl ModuleTree {
    /// Checks the applied plans as a whole, after the last one: that both ends of every
    /// [declared edge](crate::module::ModuleBuilder::edge) have one layout, and that some layer
    /// cuts the sequence if one takes a part of it. Strategies call it after the parallelize
    /// function, also in the process that starts the ranks. Not collective.
    ///
    /// # Errors
    /// If a layer, a sum or a loss would get another layout than it takes. The message names both
    /// ends.
    pub fn check_edges(&self) -> Result<()> {
        let applied = &self.parallel;
        if applied.edges.is_empty() {
            return Ok(());
        }
        let takes_part = applied.edges.iter().find(|(_, edges)| edges.takes == Layout::SEQUENCE);
        if let Some((path, _)) = takes_part
            && !applied.edges.values().any(|edges| edges.cuts_sequence)
        {
            return wrong(
                path,
                "takes a part of the sequence (shard(1)), and no layer of the plan cuts the sequence; \
                 cut it before this layer, as `output = \"shard(1)\"` on the embedding does, or let \
                 this layer take replicate"
                    .to_owned(),
            );
        }
        let mut into: BTreeMap<&str, Vec<&Edge>> = BTreeMap::new();
        for edge in &self.edges {
            into.entry(edge.to.as_deref().unwrap_or_default()).or_default().push(edge);
        }
        let trained = self.trainable().map(owner).collect();
        let edges = DeclaredEdges { tree: self, into, trained };
        self.edges.iter().try_for_each(|edge| edges.check(edge))
    }

    /// Checks that edges have modules at their ends.
    pub(in crate::module) fn check_ends(&self) -> Result<()> {
        if self.edges.is_empty() {
            return Ok(());
        }
        let modules = self.modules().keys().map(String::as_str);
        let known = modules.chain(self.parameters().iter().map(owner));
        let known: BTreeSet<String> = known.map(str::to_owned).collect();
        for end in self.edges.iter().flat_map(|edge| edge.from.iter().chain(&edge.to)) {
            if let Some((around, part)) = end.rsplit_once('.')
                && let Some(info) = self.modules().get(around)
                && info.parallel.parts().contains(&part)
            {
                let message =
                    format!("is the end of an edge, and is computed by `{around}`; name that");
                return wrong(end, message);
            }
            if !known.contains(end) {
                let known: Vec<String> = known.iter().cloned().collect();
                let hint = nearest(end, &known).map_or_else(
                    || "name a layer, or a module with parameters of its own".to_owned(),
                    |near| format!("did you mean `{near}`?"),
                );
                return wrong(
                    end,
                    format!("is the end of an edge, and there is no such module; {hint}"),
                );
            }
        }
        Ok(())
    }
}

/// The edges that a model declares, while they are checked.
struct DeclaredEdges<'a> {
    tree: &'a ModuleTree,
    /// The edges into each module.
    into: BTreeMap<&'a str, Vec<&'a Edge>>,
    /// The modules that declared trainable parameters.
    trained: BTreeSet<&'a str>,
}

impl<'a> DeclaredEdges<'a> {
    fn check(&self, edge: &'a Edge) -> Result<()> {
        let user = edge.to.as_ref().map_or("the loss".to_owned(), |to| format!("`{to}`"));
        let mut got: Option<Given> = None;
        for from in &edge.from {
            let Some(next) = self.given(from, &mut BTreeSet::new()) else { continue };
            if let Some(first) = &got
                && !same(first.0, next.0, None)
            {
                let described = [&next, first].map(|(layout, name)| describe(Some(*layout), name));
                let message = mixed(&user, &described[0], &described[1]);
                return match &edge.to {
                    Some(to) => wrong(to, message),
                    None => Err(Error::other(message)),
                };
            }
            got = Some(next);
        }
        let Some((layout, source)) = got else { return Ok(()) };
        match &edge.to {
            Some(to) => match self.edges_of(to) {
                None => Ok(()),
                Some(edges) => edges
                    .check(Some(layout), &source, None, self.tree.parallel.ranks)
                    .or_else(|message| wrong(to, message)),
            },
            None if layout == Layout::Replicate => Ok(()),
            None => Err(Error::other(sharded_loss(&describe(Some(layout), source)))),
        }
    }

    /// The layouts at the edges of a module. `None` if it keeps any layout: a layer that
    /// [returns its input](crate::parallel::ParallelLayer::returns_input), or a module without a
    /// layer whose parameters are frozen.
    fn edges_of(&self, path: &str) -> Option<LayerEdges> {
        if let Some(edges) = self.tree.parallel.edges.get(path) {
            return Some(edges.clone());
        }
        let takes_whole = match self.tree.modules().get(path) {
            Some(info) => !info.parallel.returns_input(),
            None => self.trained.contains(path),
        };
        takes_whole.then(|| LayerEdges::not_in_plan(path))
    }

    /// The layout of a module's output; `None` if the tree does not tell.
    fn given(&self, path: &'a str, passed: &mut BTreeSet<&'a str>) -> Option<Given> {
        let edges = self.edges_of(path);
        match &edges {
            Some(edges) if edges.loss_parallel => return None,
            Some(edges) if !edges.on_parts => return Some((edges.gives, edges.name.clone())),
            _ => {}
        }
        if !passed.insert(path) {
            return None;
        }
        let mut before = self.into.get(path)?.iter().flat_map(|edge| &edge.from);
        let (layout, source) = before.find_map(|from| self.given(from, passed))?;
        Some((layout, edges.map_or(source, |edges| edges.name)))
    }
}

/// The path of the module that declared the parameter. A parameter outside of modules has its name
/// as path.
fn owner(parameter: &Parameter) -> &str {
    parameter.fqn().rsplit_once('.').map_or(parameter.fqn(), |(path, _)| path)
}
