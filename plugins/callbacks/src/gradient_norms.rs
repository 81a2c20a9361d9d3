//! Gradient norms of parts of a model.

use fulgurite_error::Result;
use fulgurite_trainer::trainer::{Callback, CallbackConfig, HookContext, Hooks, LogOptions};
use serde::{Deserialize, Serialize};

/// Logs the gradient norm of each group of parameters, before clipping, as `grad_norm/{group}`:
/// `{ type = "gradient_norms", depth = 3 }`. Like `grad_norm` in Lightning's utilities.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct GradientNormsConfig {
    /// Number of leading segments of a parameter's name that name its group: with 3,
    /// `model.layers.0.mlp.up_proj.weight` is in the group `model.layers.0`. Without it, each
    /// parameter is a group.
    #[default(Some(3))]
    pub depth: Option<usize>,
}

#[typetag::serde(name = "gradient_norms")]
impl CallbackConfig for GradientNormsConfig {
    fn build(&self) -> Result<Box<dyn Callback>> {
        Ok(Box::new(GradientNorms(self.depth.unwrap_or(usize::MAX))))
    }
}

fulgurite_config::register_callback!(
    "gradient_norms",
    GradientNormsConfig,
    "Logs the gradient norm of each part of the model",
    "{ type = \"gradient_norms\", depth = 3 }"
);

struct GradientNorms(usize);

impl Callback for GradientNorms {}

impl Hooks for GradientNorms {
    fn on_before_optimizer_step(&mut self, ctx: &mut HookContext) -> Result<()> {
        if !ctx.is_logged() {
            return Ok(());
        }
        let depth = self.0;
        let group = |name: &str| {
            let end = name.match_indices('.').nth(depth.saturating_sub(1)).map(|(at, _)| at);
            name[..end.unwrap_or(name.len())].to_owned()
        };
        let norms = ctx.fabric().gradients()?.norms(&group)?;
        for (group, norm) in norms {
            // The norm already covers all ranks.
            let own = LogOptions::default().sync(false);
            ctx.log_with(&format!("grad_norm/{group}"), norm, own);
        }
        Ok(())
    }
}
