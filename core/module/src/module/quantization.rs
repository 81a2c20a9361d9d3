//! Selection of a model's quantised weights.

use std::collections::BTreeSet;

use super::adapters::is_under;
use super::pattern::{
    PATTERN_HELP, any_pattern_matches, check_pattern, idle_pattern, pattern_matches, pattern_names,
};
use super::tree::ModuleTree;
use crate::quantization::WeightFormat;
use crate::{Error, Result};

/// Quantisation requested for frozen weights of a model's linear layers. With
/// [`Adapters`](super::Adapters), it makes the base of QLoRA.
///
/// Layers of `nn` check for it when they are built
/// ([`ModuleBuilder::quantization`](super::ModuleBuilder::quantization)). Trained weights are never
/// quantised. Patterns work as in adapters.
///
/// ```
/// use fulgurite_core::module::{Adapters, ModuleBuilder, ModuleInit, Quantization};
/// use fulgurite_core::nn::SwiGluMlp;
/// use fulgurite_core::quantization::WeightFormat;
///
/// let b = ModuleBuilder::new(ModuleInit {
///     adapters: Some(Adapters::new(["down_proj"])),
///     quantization: Some(Quantization::new(WeightFormat::Nf4 { block_size: 64 })),
///     ..ModuleInit::default()
/// });
/// SwiGluMlp::new(&b.pp("mlp"), 64, 128)?;
/// let tree = b.finish()?;
/// let codes = &tree.parameters()[0];
/// assert_eq!((codes.fqn(), codes.global_shape()), ("mlp.gate_proj.weight", &[128, 1, 33][..]));
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Quantization {
    /// The packed format.
    pub format: WeightFormat,
    /// Patterns of layers to quantise. Empty: all linear layers with frozen weights.
    pub targets: Vec<String>,
    /// Patterns of layers not to quantise, even if a target names them.
    pub exclude: Vec<String>,
}

impl Quantization {
    /// Quantises every frozen linear layer except the output head (`lm_head`), as Hugging Face
    /// does.
    pub fn new(format: WeightFormat) -> Self {
        Self { format, targets: Vec::new(), exclude: vec!["lm_head".to_owned()] }
    }

    /// Whether the layer at this path should have a quantised weight, if it is frozen.
    pub(crate) fn targets(&self, path: &str) -> bool {
        (self.targets.is_empty() || any_pattern_matches(&self.targets, path))
            && !any_pattern_matches(&self.exclude, path)
    }

    /// Checks numbers and patterns without a model.
    ///
    /// # Errors
    /// [`Error::Config`] that names the field.
    pub fn validate(&self) -> Result<()> {
        let wrong = |key: &str, message: String| {
            Err(Error::Config(format!("`trainer.quantization.{key}`: {message}")))
        };
        self.format.check_block_size().or_else(|message| wrong("block_size", message))?;
        for (key, patterns) in [("targets", &self.targets), ("exclude", &self.exclude)] {
            patterns.iter().try_for_each(|p| check_pattern(p).or_else(|why| wrong(key, why)))?;
        }
        Ok(())
    }

    /// Checks that the targets name layers of the model, and that every named layer is quantised.
    pub(super) fn check(&self, tree: &ModuleTree, quantized: &BTreeSet<String>) -> Result<()> {
        let config = |message: String| Err(Error::Config(message));
        let linear = |path: &str| tree.modules().get(path).is_some_and(|m| m.kind == "Linear");
        let paths = || tree.modules().keys();
        if let Some(pattern) = idle_pattern(&self.targets, paths().map(String::as_str)) {
            return config(format!(
                "`trainer.quantization.targets`: no layer of the model matches `{pattern}`. {PATTERN_HELP}"
            ));
        }
        // A pattern that names a module around quantised layers means those layers.
        let named = |path: &&String| {
            let own = |layer: &String| layer == *path || is_under(path, layer);
            self.targets.iter().any(|pattern| pattern_names(pattern, path))
                && self.targets(path)
                && !quantized.iter().any(own)
        };
        if let Some(path) = paths().find(named) {
            let why = match linear(path) {
                true => "its weight is trained, or shared with another layer",
                false => "it is no linear layer",
            };
            return Err(Error::module(
                path,
                format!(
                    "is named by `trainer.quantization.targets`, and {why}: only weights of its own that a linear \
                     layer does not train can be quantised; leave it out with `trainer.quantization.exclude`"
                ),
            ));
        }
        let idle = self.targets.iter().find(|pattern| {
            paths().any(|path| pattern_matches(pattern, path) && self.targets(path))
                && !quantized.iter().any(|path| pattern_matches(pattern, path))
        });
        if let Some(pattern) = idle {
            return config(format!(
                "`trainer.quantization.targets`: nothing under `{pattern}` can be quantised: only weights of \
                 their own that linear layers do not train can"
            ));
        }
        if quantized.is_empty() {
            return config(
                "`trainer.quantization`: the model has no linear layer with a frozen weight of its own, and others \
                 cannot be quantised; train adapters beside the model (`[trainer.adapters]`), or freeze layers \
                 (`trainer.freeze`)"
                    .to_owned(),
            );
        }
        Ok(())
    }
}
