//! NeMo's default plan for Llama.

use std::collections::BTreeSet;

use fulgurite_engine::mesh::DeviceMesh;
use fulgurite_engine::module::{ModuleTree, glob_match};
use fulgurite_engine::parallel::{
    Colwise, Layout, ParallelStyle, Plan, PrepareModuleInput, Rowwise, SequenceParallel,
};
use fulgurite_engine::strategy::{ParallelizeConfig, ParallelizeFn};
use fulgurite_error::{Error, Result};
use serde::{Deserialize, Serialize};

use super::plan::{beside, inside, parallelize};

/// `parallelize = "llama"`: for models with the module names of Hugging Face's Llama, such as all
/// of `fulgurite-models`.
///
/// Cuts the vocabulary of embedding and head, the attention heads and the inside of the MLPs.
/// Mixtures of experts stay whole on every rank. The head, `lm_head` or `lm_head.decoder`, may
/// share the embedding's weight. Other heads stay whole. The stacks of an encoder-decoder are cut
/// alike, with attention to the encoder and the learned terms of scores, `position_bias`.
#[derive(
    Debug, Clone, PartialEq, Eq, Serialize, Deserialize, fulgurite_config_derive::Documented,
)]
#[serde(deny_unknown_fields, default)]
pub struct LlamaPlan {
    /// Whether each rank holds a part of the sequence between attention and MLP blocks, and
    /// computes norms and dropout on that part. Takes less memory for activations and as much
    /// communication. Only for decoders with `lm_head`.
    pub sequence_parallel: bool,
    /// Whether the logits stay cut over the ranks, with the loss computed on the parts.
    pub loss_parallel: bool,
    /// The path of the decoder; `lm_head` is next to it. `""` if the decoder is the root.
    #[default("model".to_owned())]
    pub prefix: String,
    /// Patterns of units that are gathered on their own; empty lets the strategy choose.
    pub units: Vec<String>,
}

/// The norms of decoders. A decoder has some of them.
const NORMS: [&str; 5] = [
    "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm",
    "layers.*.pre_feedforward_layernorm",
    "layers.*.post_feedforward_layernorm",
    "norm",
];

/// The paths of the stacks of layers below the model; a model has the first, or the others.
const STACKS: [&str; 3] = ["", "encoder.", "decoder."];

/// Whether the layers of a model stand in stacks.
pub(super) fn has_stacks(model: &ModuleTree, prefix: &str) -> bool {
    STACKS[1..].iter().any(|stack| {
        let pattern = inside(prefix, &format!("{stack}layers.*.mlp.up_proj"));
        model.modules().keys().any(|path| glob_match(&pattern, path))
    })
}

/// A projection of experts.
pub(super) const EXPERTS: &str = "layers.*.mlp.experts.up_proj";

/// A projection of latent attention, which no plan cuts.
pub(super) const LATENT: &str = "layers.*.self_attn.kv_b_proj";

impl LlamaPlan {
    /// Builds the plan for a model. It names embeddings, norms, dropouts, `gate_proj` and
    /// heads only if the model has them.
    ///
    /// # Errors
    /// With sequence parallelism, if the model has no `lm_head`: another head would take a part of
    /// the sequence for the whole. Also if a layer of the decoder has parameters that the plan does
    /// not cover: their gradients would come from a part of the sequence only.
    pub fn plan(&self, model: &ModuleTree) -> Result<Plan> {
        let within = |name: &str| inside(&self.prefix, name);
        // The layout between blocks.
        let edge = match self.sequence_parallel {
            true => Layout::SEQUENCE,
            false => Layout::Replicate,
        };
        let colwise = Colwise { input: edge, ..Colwise::default() };
        let rowwise = Rowwise { output: edge, ..Rowwise::default() };
        let loss_parallel = self.loss_parallel;
        let head = Colwise { output: Layout::Replicate, loss_parallel, ..colwise };
        let has = |name: &str| {
            let pattern = within(name);
            model.modules().keys().any(|path| glob_match(&pattern, path))
        };
        let head_path = beside(&self.prefix, "lm_head");
        let linear = |path: &str| {
            model.parameters().iter().any(|p| p.fqn() == format!("{path}.weight"))
                || model.aliases().any(|(alias, _)| alias == format!("{path}.weight"))
        };
        let head_path = [head_path.clone(), format!("{head_path}.decoder")]
            .into_iter()
            .find(|path| linear(path));
        if self.sequence_parallel
            && !head_path.as_ref().is_some_and(|path| path.ends_with("lm_head"))
        {
            return Err(Error::Config(
                "`trainer.strategy.parallelize.sequence_parallel` is for decoders with `lm_head`, which this model does \
                 not have; leave it out, or write the plan out (`type = \"plan\"`)"
                    .to_owned(),
            ));
        }
        let is_whole = !has_stacks(model, &self.prefix);
        if self.sequence_parallel && !is_whole {
            return Err(Error::Config(
                "`trainer.strategy.parallelize.sequence_parallel` is for decoders, and this model has an encoder and a \
                 decoder; leave it out, or write the plan out (`type = \"plan\"`)"
                    .to_owned(),
            ));
        }
        let mut plan = Plan::new();
        if has("embed_tokens") {
            plan = plan.with(within("embed_tokens"), rowwise);
        }
        if has("embed_positions") && self.sequence_parallel {
            plan = plan.with(within("embed_positions"), rowwise);
        }
        let stacks = STACKS.map(|stack| format!("{stack}layers.*"));
        for (stack, layers) in STACKS.into_iter().zip(&stacks) {
            // A model of one stack has what the plan names, or it is an error.
            let needs = stack.is_empty() && is_whole;
            let has_in = |name: &str| has(&format!("{layers}.{name}"));
            let in_layers = |name: &str| within(&format!("{layers}.{name}"));
            let mut cut = |name: &str, style: ParallelStyle| {
                plan = std::mem::take(&mut plan).with(in_layers(name), style);
            };
            if has_in("mlp.gate_proj") {
                cut("mlp.gate_proj", colwise.into());
            }
            for attention in ["self_attn", "cross_attn"] {
                let is_there = has_in(&format!("{attention}.q_proj"));
                if has(LATENT) || !(is_there || (needs && attention == "self_attn")) {
                    continue;
                }
                for name in ["q_proj", "k_proj", "v_proj"] {
                    cut(&format!("{attention}.{name}"), colwise.into());
                }
                cut(&format!("{attention}.o_proj"), rowwise.into());
            }
            // Experts in place of all MLPs are computed whole on every rank.
            if has_in("mlp.up_proj") || (needs && !has(EXPERTS)) {
                cut("mlp.up_proj", colwise.into());
                cut("mlp.down_proj", rowwise.into());
            }
            // Between the projections of an MLP, which are layers of their own there.
            if !stack.is_empty() && has_in("mlp.dropout") {
                let inside = PrepareModuleInput { input: Layout::LAST, desired: Layout::LAST };
                cut("mlp.dropout", inside.into());
            }
            if has(&format!("{stack}position_bias")) {
                plan = plan.with(within(&format!("{stack}position_bias")), Colwise::default());
            }
        }
        if let Some(path) = head_path {
            plan = plan.with(path, head);
        }
        if !self.sequence_parallel {
            return Ok(plan);
        }
        for name in NORMS.into_iter().filter(|name| has(name)) {
            plan = plan.with(within(name), SequenceParallel::default());
        }
        let is_ours = |path: &str| self.prefix.is_empty() || path.starts_with(&within(""));
        // Dropout: layers without parameters that compute on a part of the sequence.
        let owners: BTreeSet<&str> =
            model.parameters().iter().filter_map(|p| Some(p.fqn().rsplit_once('.')?.0)).collect();
        for path in model.modules().keys().filter(|path| is_ours(path)) {
            if !owners.contains(path.as_str())
                && model.takes_style(path, SequenceParallel::default())
            {
                plan = plan.with(path, SequenceParallel::default());
            }
        }
        for parameter in model.parameters() {
            // A layer's adapter computes from the layer's input and for its output.
            let end = if parameter.is_adapter() { ".lora_" } else { "." };
            let (path, _) = parameter.fqn().rsplit_once(end).unwrap_or(("", parameter.fqn()));
            // Attention sums the gradients of its own norms, and cuts its sinks by heads.
            let known = path.ends_with(".self_attn")
                || path.ends_with(".self_attn.q_norm")
                || path.ends_with(".self_attn.k_norm")
                || plan.entries().iter().any(|entry| glob_match(&entry.pattern, path));
            let kind = model.modules().get(path).map(|module| module.kind);
            if is_ours(parameter.fqn()) && matches!(kind, Some("Router" | "Experts")) {
                return Err(Error::parameter(
                    parameter.fqn(),
                    "experts need the whole sequence, so `sequence_parallel` cannot be true in the plan `llama` of a \
                     model with mixtures of experts; leave it out",
                ));
            }
            if is_ours(parameter.fqn()) && !known {
                return Err(Error::parameter(
                    parameter.fqn(),
                    "is none of the parameters that the plan `llama` knows: with \
                     `sequence_parallel = true` its gradient would be that of a part of the \
                     sequence. Write the plan out (`type = \"plan\"`) with a style for its layer, \
                     \"replicated_with_grad_allreduce\" if it computes position by position",
                ));
            }
        }
        Ok(plan)
    }
}

#[typetag::serde(name = "llama")]
impl ParallelizeConfig for LlamaPlan {
    fn build(&self) -> Result<Box<dyn ParallelizeFn>> {
        let config = self.clone();
        Ok(Box::new(move |model: &mut ModuleTree, mesh: &DeviceMesh| {
            parallelize(model, mesh, |model| config.plan(model), &config.units)
        }))
    }
}

fulgurite_config::register_parallelize!(
    "llama",
    LlamaPlan,
    "tensor (and sequence) parallelism for models with the names of Hugging Face's Llama",
    r#"{ type = "llama", sequence_parallel = true }"#
);
