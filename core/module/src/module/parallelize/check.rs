//! Checks a plan before any parameter is cut, also on a single rank.

use super::{PlanApplication, Shardings, wrong};
use crate::parallel::{ALL, LayerSharding, LayerStyles, ParallelStyle, ParameterSharding};
use crate::parameter::Parameter;
use crate::{Error, Result};

impl PlanApplication<'_> {
    /// Checks the whole plan, and returns how it shards each layer.
    pub(super) fn check(&self) -> Result<Shardings> {
        for (path, style) in &self.styles {
            if !self.tree.modules().contains_key(path) {
                self.check_foreign(path, style)?;
            }
        }
        let mut shardings = Shardings::new();
        for (path, info) in self.tree.modules() {
            let layer = &*info.parallel;
            let has_part_style = || {
                layer.parts().iter().any(|name| self.styles.contains_key(&format!("{path}.{name}")))
            };
            let in_plan = self.styles.contains_key(path) && !self.is_part(path);
            if in_plan || has_part_style() {
                let styles = LayerStyles::new(path, &self.styles, self.group.size());
                let sharding = layer.shard(&styles)?;
                sharding.redistributions(path)?;
                shardings.insert(path.clone(), sharding);
            }
        }
        self.check_tied(&shardings)?;
        Ok(shardings)
    }

    /// Whether the surrounding layer computes this one.
    fn is_part(&self, path: &str) -> bool {
        path.rsplit_once('.').is_some_and(|(around, name)| {
            let info = self.tree.modules().get(around);
            info.is_some_and(|info| info.parallel.parts().contains(&name))
        })
    }

    /// Checks the style of a module without a declared layer: a module with its own parameters, or
    /// a candle_nn layer.
    fn check_foreign(&self, path: &str, style: &ParallelStyle) -> Result<()> {
        if *style == ParallelStyle::ReplicatedWithGradAllreduce {
            return Ok(());
        }
        let style = style.name();
        if self.parameters_of(path).any(Parameter::is_external) {
            return wrong(
                path,
                format!(
                    "is a candle_nn layer, which cannot be {style}: tensor parallelism needs the \
                     layers of `fulgurite::nn`. Leave it out of the plan, where it is replicated, or \
                     build it from `nn`"
                ),
            );
        }
        wrong(
            path,
            format!(
                "has parameters of its own and is no layer of `fulgurite::nn`, so it cannot be \
                 {style}; it takes replicated_with_grad_allreduce"
            ),
        )
    }

    /// Layers that share a weight must cut it alike, because each computes with the local part.
    fn check_tied(&self, shardings: &Shardings) -> Result<()> {
        for (alias, first) in self.tree.aliases() {
            let (Some((a, a_name)), Some((b, b_name))) =
                (first.rsplit_once('.'), alias.rsplit_once('.'))
            else {
                continue;
            };
            let uses = [(a, a_name), (b, b_name)]
                .map(|(path, name)| self.sharding_of(shardings, path, name));
            if uses[0] == uses[1] {
                continue;
            }
            let said = [a, b].map(|path| match self.styles.get(path) {
                Some(style) => format!("`{path}` is {}", style.name()),
                None => format!("`{path}` has no style"),
            });
            return Err(Error::parameter(
                first,
                format!(
                    "is shared by two layers that the plan does not cut alike: {}; make the \
                     embedding rowwise and the head colwise, which both cut the vocabulary, or leave \
                     both out of the plan",
                    said.join(", ")
                ),
            ));
        }
        Ok(())
    }

    /// The plan's sharding of parameter `name` of layer `path`; `None` if it has none.
    fn sharding_of(
        &self,
        shardings: &Shardings,
        path: &str,
        name: &str,
    ) -> Option<ParameterSharding> {
        if !self.tree.modules().contains_key(path) {
            let partial = self.styles.contains_key(path);
            return partial.then_some(ParameterSharding::Replicated { partial_grad: true });
        }
        let of_part = || {
            let (around, part) = path.rsplit_once('.')?;
            let parts = &shardings.get(around)?.parts;
            parts.iter().find(|(name, _)| *name == part).map(|(_, sharding)| sharding)
        };
        let sharding: &LayerSharding = shardings.get(path).or_else(of_part)?;
        let of = |wanted: &str| sharding.parameters.iter().find(|(name, _)| name == wanted);
        of(name).or_else(|| of(ALL)).map(|(_, sharding)| *sharding)
    }
}
