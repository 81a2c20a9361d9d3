//! Plans in Hugging Face's format.

use std::fmt;

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{ModuleTree, glob_match};
use fulgurite_engine::parallel::{Layout, ParallelStyle, Plan, SequenceParallel};
use fulgurite_engine::strategy::{ParallelizeConfig, ParallelizeFn};
use fulgurite_error::Result;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::llama::{EXPERTS, LATENT, LlamaPlan, has_stacks};
use super::plan::{beside, inside, parallelize};

/// `parallelize = "hf"`: a plan in the format of Hugging Face's model configurations
/// (`base_model_tp_plan`): patterns and style names.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct HuggingFacePlan {
    /// Patterns and style names. By default the plan of Hugging Face's Llama and
    /// `lm_head = "colwise_rep"`. If the head shares the embedding's weight, also
    /// `embed_tokens = "rowwise"`. Mixtures of experts and latent attention stay whole on every
    /// rank. Encoder-decoders are cut as by the plan `llama`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<StyleNames>,
    /// The path of the base model, prepended to the patterns; `lm_head` is next to it. `""` if the
    /// base model is the root, or if the patterns are whole paths.
    #[default("model".to_owned())]
    pub prefix: String,
    /// Patterns of units that are gathered on their own; empty lets the strategy choose.
    pub units: Vec<String>,
}

/// `LlamaConfig.base_model_tp_plan`, and `LlamaForCausalLM._tp_plan`.
const LLAMA: [(&str, &str); 8] = [
    ("layers.*.self_attn.q_proj", "colwise"),
    ("layers.*.self_attn.k_proj", "colwise"),
    ("layers.*.self_attn.v_proj", "colwise"),
    ("layers.*.self_attn.o_proj", "rowwise"),
    ("layers.*.mlp.gate_proj", "colwise"),
    ("layers.*.mlp.up_proj", "colwise"),
    ("layers.*.mlp.down_proj", "rowwise"),
    ("lm_head", "colwise_rep"),
];

impl HuggingFacePlan {
    /// Builds the plan for a model.
    ///
    /// # Errors
    /// None for deserialised names and models of `fulgurite-models`.
    pub fn plan(&self, model: &ModuleTree) -> Result<Plan> {
        let path = |pattern: &str| match pattern.split('.').next() {
            Some("lm_head") => beside(&self.prefix, pattern),
            _ => inside(&self.prefix, pattern),
        };
        if let Some(StyleNames(names)) = &self.plan {
            return names.iter().map(|(p, name)| Ok((path(p), style(name)?))).collect();
        }
        if has_stacks(model, &self.prefix) {
            let plan = LlamaPlan { prefix: self.prefix.clone(), ..LlamaPlan::default() };
            return plan.plan(model);
        }
        let mut names = LLAMA.to_vec();
        let has = |pattern: &str| {
            let pattern = path(pattern);
            model.modules().keys().any(|path| glob_match(&pattern, path))
        };
        // Experts in place of all MLPs are computed whole on every rank.
        let may_lack = |pattern: &str| {
            let of_mlp = pattern.starts_with("layers.*.mlp.") && has(EXPERTS);
            of_mlp || pattern.ends_with("gate_proj") || pattern == "lm_head"
        };
        names.retain(|(pattern, _)| !may_lack(pattern) || has(pattern));
        if has(LATENT) {
            names.retain(|(pattern, _)| !pattern.contains(".self_attn."));
        }
        let embedding = path("embed_tokens.weight");
        let head = path("lm_head.weight");
        if model.aliases().any(|tied| tied == (&*head, &*embedding)) {
            names.push(("embed_tokens", "rowwise"));
        }
        names.into_iter().map(|(p, name)| Ok((path(p), style(name)?))).collect()
    }
}

/// Hugging Face's layers have whole activations as input and output, unless the name says
/// otherwise.
fn style(name: &str) -> Result<ParallelStyle> {
    match name {
        "sequence_parallel" => {
            Ok(SequenceParallel { input: Layout::Replicate, output: Layout::Replicate }.into())
        }
        name => name.parse(),
    }
}

/// A table of patterns and names of styles, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StyleNames(pub Vec<(String, String)>);

impl Serialize for StyleNames {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(pattern, name)| (pattern, name)))
    }
}

impl<'de> Deserialize<'de> for StyleNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = StyleNames;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of patterns and names of styles")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StyleNames, A::Error> {
                let mut names = Vec::new();
                while let Some((pattern, StyleName(name))) = map.next_entry::<String, _>()? {
                    names.push((pattern, name));
                }
                Ok(StyleNames(names))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

/// One of [`ParallelStyle::NAMES`].
struct StyleName(String);

impl<'de> Deserialize<'de> for StyleName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        match ParallelStyle::NAMES.contains(&name.as_str()) {
            true => Ok(Self(name)),
            false => Err(serde::de::Error::unknown_variant(&name, &ParallelStyle::NAMES)),
        }
    }
}

#[typetag::serde(name = "hf")]
impl ParallelizeConfig for HuggingFacePlan {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        // Configured names were checked when read; names from code are checked here.
        if let Some(StyleNames(names)) = &self.plan {
            names.iter().try_for_each(|(_, name)| style(name).map(drop))?;
        }
        let config = self.clone();
        Ok(Box::new(move |model: &mut ModuleTree, mesh: &DeviceMesh| {
            parallelize(model, mesh, |model| config.plan(model), &config.units)
        }))
    }
}

fulgurite_config::register_parallelize!(
    "hf",
    HuggingFacePlan,
    "tensor parallelism by a plan in Hugging Face's words, by default that of Llama",
    r#"{ type = "hf", plan = { "layers.*.mlp.up_proj" = "colwise", "layers.*.mlp.down_proj" = "rowwise" } }"#
);
