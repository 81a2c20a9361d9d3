//! Adapters: small trainable parameters beside a layer's frozen ones.

use std::collections::BTreeSet;

use super::experts::expert_stack;
use super::foreign_names::ForeignNames;
use super::heads;
use super::pattern::{
    PATTERN_HELP, any_pattern_matches, check_pattern, pattern_matches, pattern_names,
};
use super::tree::ModuleTree;
use crate::{Error, Result};
use fulgurite_tensor::autograd::no_grad;
use fulgurite_tensor::execution;

/// The trained biases of a model with adapters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AdapterBias {
    /// No biases.
    #[default]
    None,
    /// All biases.
    All,
    /// Biases of layers with an adapter.
    AdapterOnly,
}

/// Low-rank adapters (LoRA) requested for a model. Layers named by a target compute
/// `y = W x + scale B A dropout(x)`, where `A` (`[rank, inputs]`) and `B` (`[outputs, rank]`) are
/// trained and everything else is frozen.
///
/// Layers of `nn` check for adapters when they are built
/// ([`ModuleBuilder::adapter`](super::ModuleBuilder::adapter)), so models made of them need no code
/// for it. [`pattern_matches`](super::pattern_matches) defines patterns: `q_proj` is every layer of
/// that name, `mlp` every layer in an `mlp` that takes an adapter, and `layers.3.self_attn.q_proj`
/// is one layer.
///
/// ```
/// use fulgurite_core::module::{Adapters, ModuleBuilder, ModuleInit};
/// use fulgurite_core::nn::SwiGluMlp;
///
/// let adapters = Adapters { rank: 4, ..Adapters::new(["up_proj", "mlp.down_proj"]) };
/// let b = ModuleBuilder::new(ModuleInit { adapters: Some(adapters), ..ModuleInit::default() });
/// SwiGluMlp::new(&b.pp("layers.0.mlp"), 16, 32)?;
/// let tree = b.finish()?;
/// let trained: Vec<&str> = tree.trainable().map(|p| p.fqn()).collect();
/// let up_proj = ["layers.0.mlp.up_proj.lora_A.weight", "layers.0.mlp.up_proj.lora_B.weight"];
/// assert_eq!(trained[..2], up_proj);
/// assert_eq!(trained.len(), 4);
/// # Ok::<(), fulgurite_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Adapters {
    /// The inner dimension of each adapter. PEFT's `r`.
    pub rank: usize,
    /// The factor of the adapters' output, times the rank. PEFT's `lora_alpha`.
    pub alpha: f64,
    /// Divides `alpha` by the root of the rank instead of the rank. PEFT's `use_rslora`.
    pub rslora: bool,
    /// The probability of zeroing an element of the adapters' input in training. Not for
    /// embeddings.
    pub dropout: f64,
    /// Trains the norms of the adapted weight's rows separately from their directions (DoRA, PEFT's
    /// `use_dora`). A layer computes `y = magnitude / norm(W + scale B A) * (W x + scale B A x)`,
    /// with each row's norm as a constant in backward. Only for linear layers.
    pub dora: bool,
    /// Patterns of layers to adapt.
    pub targets: Vec<String>,
    /// Adapts all linear layers but those of the head, which is called `lm_head`, `score` or
    /// `classifier`, and of `modules_to_save`. PEFT's `target_modules="all-linear"`. Then `targets`
    /// are empty.
    pub all_linear: bool,
    /// Patterns of layers not to adapt, even if a target names them.
    pub exclude: Vec<String>,
    /// Patterns of modules that are fully trained beside the adapters, such as a new head.
    pub modules_to_save: Vec<String>,
    /// The trained biases.
    pub bias: AdapterBias,
}

/// In force while adapters are off.
#[derive(Debug)]
struct AdaptersOff;

/// Calls `f` with all adapters off and without gradients: layers compute as the base model does.
/// PEFT's `disable_adapter`.
///
/// ```
/// use fulgurite_core::module::{adapters_are_off, without_adapters};
///
/// assert!(without_adapters(adapters_are_off));
/// assert!(!adapters_are_off());
/// ```
pub fn without_adapters<R>(f: impl FnOnce() -> R) -> R {
    let _guards = (no_grad(), execution::enter(AdaptersOff));
    f()
}

/// Whether adapters are [off](without_adapters) on this thread, for layers with adapters.
pub fn adapters_are_off() -> bool {
    execution::value::<AdaptersOff>().is_some()
}

impl Adapters {
    /// PEFT's defaults, rank 8 and alpha 8, for these layers.
    pub fn new<S: Into<String>>(targets: impl IntoIterator<Item = S>) -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            rslora: false,
            dropout: 0.0,
            dora: false,
            targets: targets.into_iter().map(Into::into).collect(),
            all_linear: false,
            exclude: Vec::new(),
            modules_to_save: Vec::new(),
            bias: AdapterBias::None,
        }
    }

    /// The factor of the adapters' output.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// These adapters, with patterns of the model's names for a file's.
    pub(super) fn translated(&self, names: &dyn ForeignNames) -> Self {
        let own = |patterns: &[String]| -> Vec<String> {
            patterns.iter().flat_map(|pattern| translations(pattern, Some(names))).collect()
        };
        Self {
            targets: own(&self.targets),
            exclude: own(&self.exclude),
            modules_to_save: own(&self.modules_to_save),
            ..self.clone()
        }
    }

    /// Whether the layer at this path should have an adapter.
    pub(crate) fn targets(&self, path: &str) -> bool {
        // The layers of experts are named together, too.
        let stack = expert_stack(path);
        let any = |patterns: &[String]| {
            any_pattern_matches(patterns, path)
                || stack.as_ref().is_some_and(|(stack, _)| any_pattern_matches(patterns, stack))
        };
        any(&self.targets) && !any(&self.exclude)
    }

    /// Whether the linear layer at this path should have an adapter.
    pub(crate) fn targets_linear(&self, path: &str) -> bool {
        let is_apart = heads::is_named_as_head(path)
            || any_pattern_matches(&self.modules_to_save, path)
            || any_pattern_matches(&self.exclude, path);
        (self.all_linear && !is_apart) || self.targets(path)
    }

    /// Whether a parameter of the base model is trained.
    pub(super) fn trains(&self, fqn: &str) -> bool {
        let (path, name) = fqn.rsplit_once('.').unwrap_or(("", fqn));
        let bias = match self.bias {
            AdapterBias::None => false,
            AdapterBias::All => true,
            AdapterBias::AdapterOnly => self.targets(path),
        };
        (bias && name == "bias") || any_pattern_matches(&self.modules_to_save, path)
    }

    /// Checks numbers and patterns without a model.
    ///
    /// # Errors
    /// [`Error::Config`] that names the field.
    pub fn validate(&self) -> Result<()> {
        let wrong = |key: &str, message: String| {
            Err(Error::Config(format!("`trainer.adapters.{key}`: {message}")))
        };
        if self.rank == 0 {
            return wrong("rank", "must be at least 1, found 0".to_owned());
        }
        if !self.alpha.is_finite() || self.alpha == 0.0 {
            return wrong("alpha", format!("must be a number other than 0, found {}", self.alpha));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return wrong("dropout", format!("must be in [0, 1), found {}", self.dropout));
        }
        if self.targets.is_empty() && !self.all_linear {
            let message = "names no layer; write those that are to have an adapter, such as \
                           [\"q_proj\", \"v_proj\"], or \"all-linear\"";
            return wrong("targets", message.to_owned());
        }
        if self.all_linear && self.bias == AdapterBias::AdapterOnly {
            let message = "biases of adapted layers need a list of layers in `targets`, in place of \"all-linear\"";
            return wrong("bias", message.to_owned());
        }
        let all = [
            ("targets", &self.targets),
            ("exclude", &self.exclude),
            ("modules_to_save", &self.modules_to_save),
        ];
        for (key, patterns) in all {
            patterns.iter().try_for_each(|p| check_pattern(p).or_else(|why| wrong(key, why)))?;
        }
        Ok(())
    }

    /// Checks that the patterns name layers of the model, and that every named layer has its
    /// adapter. `given` are these adapters before their [translation](Self::translated).
    pub(super) fn check(
        &self,
        given: &Self,
        tree: &ModuleTree,
        adapted: &BTreeSet<String>,
    ) -> Result<()> {
        let kinds = || {
            let mut names: Vec<&str> = tree
                .modules()
                .iter()
                .filter(|(_, info)| ["Linear", "Embedding", "Experts"].contains(&info.kind))
                .map(|(path, _)| path.rsplit_once('.').map_or(path.as_str(), |(_, name)| name))
                .collect();
            names.sort_unstable();
            names.dedup();
            match names.is_empty() {
                true => "it has none, for it is not made of layers of `nn`".to_owned(),
                false => format!("they are called {}", names.join(", ")),
            }
        };
        if self.all_linear && adapted.is_empty() {
            return Err(Error::Config(format!(
                "`trainer.adapters.targets`: the model has no linear layer besides its head and the excluded ones; \
                 of the layers that take an adapter {}",
                kinds()
            )));
        }
        let paths = tree.modules().keys().map(String::as_str);
        let stacks: BTreeSet<String> =
            paths.clone().filter_map(expert_stack).map(|(stack, _)| stack).collect();
        let named = paths.clone().chain(stacks.iter().map(String::as_str));
        let is_idle = |pattern: &&String| {
            let own = translations(pattern, tree.foreign_names());
            !named.clone().any(|path| any_pattern_matches(&own, path))
        };
        for (key, patterns) in [("targets", &given.targets), ("exclude", &given.exclude)] {
            if let Some(pattern) = patterns.iter().find(is_idle) {
                return Err(Error::Config(format!(
                    "`trainer.adapters.{key}`: no layer of the model matches `{pattern}`. {PATTERN_HELP}. Of the \
                     layers that take an adapter {}",
                    kinds()
                )));
            }
        }
        // A pattern that names a module around adapted layers means those layers. The module itself
        // takes no adapter.
        let is_without = |path: &str, pattern: &str| {
            let own = |layer: &String| layer == path || is_under(path, layer);
            pattern_names(pattern, path) && self.targets(path) && !adapted.iter().any(own)
        };
        let without = tree
            .modules()
            .iter()
            .find(|(path, _)| self.targets.iter().any(|pattern| is_without(path, pattern)));
        if let Some((path, info)) = without {
            return Err(Error::module(
                path,
                format!(
                    "is named by `trainer.adapters.targets` and takes no adapter: it is of the kind {}; name \
                     layers of the kinds Linear (with a weight of its own), Embedding and Experts, of which {}, or \
                     leave it out with `trainer.adapters.exclude`",
                    info.kind,
                    kinds()
                ),
            ));
        }
        // A list of modules has a path but is not itself a module.
        let idle = self.targets.iter().find(|pattern| {
            paths.clone().any(|path| pattern_matches(pattern, path) && self.targets(path))
                && !adapted.iter().any(|path| pattern_matches(pattern, path))
        });
        if let Some(pattern) = idle {
            return Err(Error::Config(format!(
                "`trainer.adapters.targets`: nothing under `{pattern}` takes an adapter; of the layers that do {}",
                kinds()
            )));
        }
        let saves = |pattern: &str, fqn: &str| {
            pattern_matches(pattern, fqn.rsplit_once('.').map_or("", |(path, _)| path))
        };
        for pattern in &given.modules_to_save {
            let own = translations(pattern, tree.foreign_names());
            let is_own = |fqn: &str| own.iter().any(|own| saves(own, fqn));
            if tree.parameters().iter().any(|p| is_own(p.fqn())) {
                continue;
            }
            let wrong = match tree.aliases().find(|(alias, _)| saves(pattern, alias)) {
                // Trained under the name of the module that owns the weight.
                Some((_, fqn)) if self.modules_to_save.iter().any(|other| saves(other, fqn)) => {
                    continue;
                }
                Some((alias, fqn)) => format!(
                    "`{alias}`, which `{pattern}` names, is the weight `{fqn}` of another module; name both \
                     modules, which are then trained as one"
                ),
                None => format!("no module with parameters matches `{pattern}`. {PATTERN_HELP}"),
            };
            return Err(Error::Config(format!("`trainer.adapters.modules_to_save`: {wrong}")));
        }
        Ok(())
    }
}

/// The patterns of the model's names that a pattern stands for. The end of a path also stands for
/// itself. A whole path (with a dot in front) does so only if files have no such path.
fn translations(pattern: &str, names: Option<&dyn ForeignNames>) -> Vec<String> {
    let mut own = names.map(|names| names.modules(pattern)).unwrap_or_default();
    if own.is_empty() || !pattern.starts_with('.') {
        own.push(pattern.to_owned());
    }
    own
}

/// Whether `path` is under `module`.
pub(super) fn is_under(module: &str, path: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}
