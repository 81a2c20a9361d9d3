//! Mixtures of experts: the keys that several families share, and their files.

use fulgurite_error::Result;
use fulgurite_nn::{CorrectionBias, ExpertGroups, RouterConfig, RouterScore, SharedExpertConfig};

use super::Description;
use super::common::layout;
use crate::config::Reader;
use crate::decoder::{DecoderConfig, ExpertsConfig, LoadLog};
use crate::weights::WeightLayout;

/// The keys of the number of experts, of which most families of `transformers` take either.
pub(super) const NUMBER: [&str; 2] = ["num_local_experts", "num_experts"];

/// These keys in DeepSeek-V3 and the families that follow it.
const ROUTED: [&str; 2] = ["n_routed_experts", "num_local_experts"];

/// The names of experts in files.
pub(super) struct ExpertFiles {
    /// The block of a layer.
    pub(super) block: &'static str,
    /// The projections of the model, with their names in files.
    pub(super) projections: [(&'static str, &'static str); 3],
}

impl ExpertFiles {
    /// The model's own names.
    pub(super) const OWN: Self = Self {
        block: "mlp",
        projections: [
            ("gate_proj", "gate_proj"),
            ("up_proj", "up_proj"),
            ("down_proj", "down_proj"),
        ],
    };

    /// The layout of files with a tensor for each projection of each expert, as the hub has them,
    /// or with the stacks of `transformers` 5.
    pub(super) fn layout(&self, experts: &ExpertsConfig) -> WeightLayout {
        let (ours, theirs) = ("model.layers.*.mlp", format!("model.layers.*.{}", self.block));
        let mut weights = layout();
        if self.block != "mlp" {
            let gate = |block: &str| format!("{block}.gate.weight");
            weights = weights.rename(&gate(ours), &gate(&theirs));
        }
        for (own, file) in self.projections {
            let model = format!("{ours}.experts.{own}.weight");
            let file = format!("{theirs}.experts.#.{file}.weight");
            weights = weights.stack(&model, &file, experts.num_experts);
        }
        let (own, width) = (format!("{ours}.experts"), experts.intermediate_size);
        weights
            .split_stacked(
                &own,
                &[("gate_proj.weight", width), ("up_proj.weight", width)],
                &format!("{ours}.experts.gate_up_proj"),
            )
            .rename(&format!("{own}.down_proj.weight"), &format!("{ours}.experts.down_proj"))
    }
}

/// The number of experts, by either of two keys.
fn number_of_experts(
    reader: &Reader<'_>,
    keys: [&str; 2],
    default: usize,
) -> Result<(usize, String)> {
    let [first, second] = keys;
    let (number, other) = (reader.optional_size(first)?, reader.optional_size(second)?);
    if let (Some(number), Some(other)) = (number, other)
        && number != other
    {
        let message = format!("is {number}, and `{second}` is {other}; leave one of them out");
        return Err(reader.wrong(first, message));
    }
    let key = if number.is_some() { first } else { second };
    Ok((number.or(other).unwrap_or(default), key.to_owned()))
}

/// The number of experts, by either of two keys, and the number that a token uses.
pub(super) fn numbers(
    reader: &Reader<'_>,
    keys: [&str; 2],
    [number, per_token]: [usize; 2],
) -> Result<[usize; 2]> {
    let (num_experts, key) = number_of_experts(reader, keys, number)?;
    let per_token = reader.size_or("num_experts_per_tok", per_token)?;
    if per_token > num_experts {
        let message =
            format!("a token cannot be computed by {per_token} of {num_experts} experts (`{key}`)");
        return Err(reader.wrong("num_experts_per_tok", message));
    }
    Ok([num_experts, per_token])
}

/// Mixtures of these numbers and this width, with the default router.
pub(super) fn mixture(
    reader: &Reader<'_>,
    [num_experts, experts_per_token]: [usize; 2],
    intermediate_size: usize,
) -> Result<ExpertsConfig> {
    Ok(ExpertsConfig {
        num_experts,
        experts_per_token,
        intermediate_size,
        router: RouterConfig::default(),
        activation: None,
        bias: false,
        shared: None,
        capacity_factor: capacity_factor(reader)?,
        load_log: load_log(reader)?,
        balance: None,
    })
}

fn capacity_factor(reader: &Reader<'_>) -> Result<Option<f64>> {
    let key = "expert_capacity_factor";
    let factor = reader.optional_number(key)?;
    match factor.filter(|factor| !(*factor > 0.0 && factor.is_finite())) {
        None => Ok(factor),
        Some(factor) => {
            let message = format!(
                "must be above 0, found {factor:?}; 1.0 is an even share of a sequence's tokens, and without the key \
                 no token is dropped"
            );
            Err(reader.wrong(key, message))
        }
    }
}

fn load_log(reader: &Reader<'_>) -> Result<Option<LoadLog>> {
    let key = "log_expert_load";
    match reader.text(key)? {
        None => Ok(None),
        Some("none") => Ok(Some(LoadLog::None)),
        Some("summary") => Ok(Some(LoadLog::Summary)),
        Some("layers") => Ok(Some(LoadLog::Layers)),
        Some("experts") => Ok(Some(LoadLog::Experts)),
        Some(other) => {
            let expected = "expected \"none\", \"summary\", \"layers\" or \"experts\"";
            Err(reader.wrong(key, format!("{expected}, found \"{other}\"")))
        }
    }
}

/// The factor of the loss that balances experts, if the model has it.
pub(super) fn balance(reader: &Reader<'_>) -> Result<Option<f64>> {
    let factor = reader.number_or("router_aux_loss_coef", 0.001)?;
    if !(factor >= 0.0 && factor.is_finite()) {
        let message = format!("is {factor}; expected a number of at least 0");
        return Err(reader.wrong("router_aux_loss_coef", message));
    }
    let is_balanced = reader.flag_or("output_router_logits", false)?;
    Ok(is_balanced.then_some(factor))
}

/// The indices of layers that have an MLP instead of experts, for Qwen's families.
pub(super) fn sparse_layers(reader: &Reader<'_>, config: &mut DecoderConfig) -> Result<()> {
    let step = reader.size_or("decoder_sparse_step", 1)?;
    let key = "mlp_only_layers";
    let indices = reader.list(key)?.into_iter().flatten().map(|index| {
        let index = index.as_u64().and_then(|index| usize::try_from(index).ok());
        index.ok_or_else(|| reader.wrong(key, "expected the indices of layers, from 0 on"))
    });
    let dense = indices.collect::<Result<Vec<usize>>>()?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = (i + 1).is_multiple_of(step) && !dense.contains(&i);
    }
    Ok(())
}

/// The defaults of DeepSeek-V3's keys for experts.
pub(super) struct RoutedDefaults {
    pub(super) experts: [usize; 2],
    pub(super) intermediate_size: usize,
    /// Number of groups, and the groups of a token.
    pub(super) groups: [usize; 2],
    pub(super) scale: f64,
    /// Number of first layers without experts.
    pub(super) dense_layers: usize,
}

/// The mixtures of DeepSeek-V3 and the families that follow it: sigmoids with a correction bias,
/// groups, and a shared expert.
pub(super) fn routed(
    reader: &Reader<'_>,
    mut config: DecoderConfig,
    defaults: &RoutedDefaults,
) -> Result<Description> {
    let numbers = numbers(reader, ROUTED, defaults.experts)?;
    let width = reader.size_or("moe_intermediate_size", defaults.intermediate_size)?;
    let [count, per_row] = defaults.groups;
    let count = reader.size_or("n_group", count)?;
    let per_row = reader.size_or("topk_group", per_row)?;
    let groups = ExpertGroups { count, per_row };
    if let Some(problem) = groups.problem(numbers[0], numbers[1]) {
        return Err(reader.wrong("n_group", format!("{problem} (`topk_group` is {per_row})")));
    }
    let scale = reader.number_or("routed_scaling_factor", defaults.scale)?;
    if !(scale > 0.0 && scale.is_finite()) {
        let message = format!("must be above 0, found {scale:?}");
        return Err(reader.wrong("routed_scaling_factor", message));
    }
    let update_rate = reader.number_or("expert_bias_update_rate", 0.0)?;
    if !(update_rate >= 0.0 && update_rate.is_finite()) {
        let message = format!("must be at least 0, found {update_rate:?}");
        return Err(reader.wrong("expert_bias_update_rate", message));
    }
    let router = RouterConfig {
        score: RouterScore::Sigmoid,
        normalize: reader.flag_or("norm_topk_prob", true)?,
        scale,
        groups: (count > 1).then_some(groups),
        bias: false,
        correction: Some(CorrectionBias { update_rate }),
    };
    // In a file it does nothing, as in `transformers`, which has no loss for these logits.
    if reader.flag_or("output_router_logits", false)? && reader.is_set("output_router_logits") {
        let message =
            "this family has no loss that balances experts; set `expert_bias_update_rate` instead";
        return Err(reader.wrong("output_router_logits", message));
    }
    let shared = reader.size_or("n_shared_experts", 1)?;
    let Some(intermediate_size) = shared.checked_mul(width) else {
        return Err(reader.wrong("n_shared_experts", "has more elements than can be counted"));
    };
    let shared = Some(SharedExpertConfig { intermediate_size, gated: false });
    let experts = ExpertsConfig { router, shared, ..mixture(reader, numbers, width)? };
    let dense = reader.integer_or("first_k_dense_replace", defaults.dense_layers)?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = i >= dense;
    }
    let mut weights = ExpertFiles::OWN.layout(&experts);
    for name in ["gate_proj", "up_proj", "down_proj"] {
        let path = |block: &str| format!("model.layers.*.mlp.{block}.{name}.*");
        weights = weights.rename(&path("shared_expert"), &path("shared_experts"));
    }
    // The layers behind the last predict several tokens, which this model does not.
    weights = weights.ignore_below(&format!("model.layers.{}", config.layers.len()));
    config.experts = Some(experts);
    Ok(Description::decoder(config, weights))
}
