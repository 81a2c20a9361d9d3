//! Plans written out in the configuration.

use fulgurite_engine::mesh::{DeviceMesh, TENSOR_PARALLEL};
use fulgurite_engine::module::ModuleTree;
use fulgurite_engine::parallel::Plan;
use fulgurite_engine::strategy::{ParallelizeConfig, ParallelizeFn};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// `parallelize = { type = "plan", plan = { … } }`.
///
/// ```
/// use fulgurite_core::config;
/// use fulgurite_strategies::InlinePlan;
///
/// let table = toml::toml! {
///     [plan]
///     "layers.*.mlp.up_proj" = "colwise"
///     "layers.*.mlp.down_proj" = { type = "rowwise", output = "shard(1)" }
/// };
/// let config: InlinePlan = config::parse(table)?;
/// assert_eq!(config.plan.entries().len(), 2);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(
    Debug,
    Clone,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct InlinePlan {
    /// Patterns of layers (`*` is one segment) and their styles: names, or tables with a `type`.
    pub plan: Plan,
    /// Patterns of units that are gathered on their own; empty lets the strategy choose.
    pub units: Vec<String>,
}

#[typetag::serde(name = "plan")]
impl ParallelizeConfig for InlinePlan {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        if self.plan.entries().is_empty() && self.units.is_empty() {
            return Err(Error::Config(
                "`parallelize` of type \"plan\" has neither `plan` nor `units`; give it a table of \
                 patterns and styles, such as plan = { \"layers.*.mlp.up_proj\" = \"colwise\", … }, \
                 or choose \"none\""
                    .to_owned(),
            ));
        }
        let Self { plan, units } = self.clone();
        Ok(Box::new(move |model: &mut ModuleTree, mesh: &DeviceMesh| {
            parallelize(model, mesh, |_| Ok(plan.clone()), &units)
        }))
    }
}

/// Applies a plan along `tensor_parallel` and chooses the units in `units`, if any. With one
/// tensor-parallel rank no layer is cut and the plan is not built: the model may have other names.
pub(super) fn parallelize(
    model: &mut ModuleTree,
    mesh: &DeviceMesh,
    plan: impl FnOnce(&ModuleTree) -> Result<Plan>,
    units: &[String],
) -> Result<()> {
    if mesh.size(TENSOR_PARALLEL)? > 1 {
        let plan = plan(model)?;
        if !plan.entries().is_empty() {
            model.parallelize_module(&mesh.get(TENSOR_PARALLEL)?, &plan)?;
        }
    }
    units.iter().try_for_each(|pattern| model.fully_shard_matching(pattern))
}

/// `name` inside the module `prefix`, which may be the root.
pub(super) fn inside(prefix: &str, name: &str) -> String {
    match prefix {
        "" => name.to_owned(),
        prefix => format!("{prefix}.{name}"),
    }
}

/// `name` next to the module `prefix`.
pub(super) fn beside(prefix: &str, name: &str) -> String {
    inside(prefix.rsplit_once('.').map_or("", |(parent, _)| parent), name)
}

fulgurite_config::register_parallelize!(
    "plan",
    InlinePlan,
    "layers are cut as a table of patterns and styles says",
    r#"{ type = "plan", plan = { "layers.*.mlp.up_proj" = "colwise", "layers.*.mlp.down_proj" = "rowwise" } }"#
);
