//! Keys that several families share.

use fulgurite_error::Result;
use fulgurite_nn::{Activation, RopeScaling};

use super::Description;
use crate::config::{Reader, RopeDefaults};
use crate::decoder::{DecoderConfig, ExpertsConfig, LayerConfig};
use crate::encoder::{ClassifierConfig, Pooling};
use crate::layers::{FeedForward, activation};
use crate::weights::WeightLayout;

/// Defaults in which families with Llama's keys differ.
pub(super) struct Defaults {
    pub(super) max_positions: usize,
    pub(super) eps: f64,
    pub(super) theta: f64,
    pub(super) tied: bool,
    /// The key of the activation, and its default.
    pub(super) activation: (&'static str, &'static str),
    /// The width of a head without a key for it; `None` for `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// The number of key and value heads without a key for it; `None` for as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// The type of layer whose rotary embedding is the first of the decoder's.
    pub(super) layer_type: Option<&'static str>,
    /// The key of the rotated part of a head, for families that rotate a part.
    pub(super) partial_key: Option<&'static str>,
    /// The longest sequence before the rotary embedding was scaled, without a key for it, where a
    /// table's own does not count.
    pub(super) original_max_positions: Option<usize>,
}

impl Defaults {
    pub(super) const LLAMA: Self = Self {
        max_positions: 2048,
        eps: 1e-6,
        theta: 10_000.0,
        tied: false,
        activation: ("hidden_act", "silu"),
        head_dim: None,
        kv_heads: None,
        layer_type: None,
        partial_key: None,
        original_max_positions: None,
    };
}

/// Width of one head and numbers of heads: `[num_heads, num_kv_heads, head_dim]`.
fn heads(reader: &Reader<'_>, hidden_size: usize, defaults: &Defaults) -> Result<[usize; 3]> {
    let heads = reader.size("num_attention_heads")?;
    let kv_heads = match (reader.is_null("num_key_value_heads"), defaults.kv_heads) {
        (false, Some(default)) => reader.size_or("num_key_value_heads", default)?,
        _ => reader.size_or("num_key_value_heads", heads)?,
    };
    let head_dim = match reader.optional_size("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => reader.per_head("hidden_size", hidden_size, "num_attention_heads", heads)?,
    };
    if !heads.is_multiple_of(kv_heads) {
        let key = "num_key_value_heads";
        let found = match reader.value(key) {
            Some(_) => format!("found {kv_heads}"),
            None => format!("which the default of {kv_heads} does not; set it"),
        };
        let message = format!("must divide num_attention_heads = {heads}, {found}");
        return Err(reader.wrong(key, message));
    }
    Ok([heads, kv_heads, head_dim])
}

/// A decoder with Llama's keys.
pub(super) fn decoder(reader: &Reader<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let hidden_size = reader.size("hidden_size")?;
    let num_layers = reader.size("num_hidden_layers")?;
    let heads = heads(reader, hidden_size, defaults)?;
    let (key, default) = defaults.activation;
    let feed_forward = FeedForward {
        intermediate_size: reader.size("intermediate_size")?,
        gated: true,
        activation: reader.activation(key, default)?,
        bias: false,
    };
    let Defaults { layer_type, partial_key, original_max_positions, .. } = *defaults;
    let rope = RopeDefaults {
        partial_key,
        layer_type,
        original_max_positions,
        ..RopeDefaults::new(heads[2], defaults.theta)
    };
    reader.attention_dropout("attention_dropout", 0.0);
    let rope = reader.rope(rope)?;
    let positions = reader.size_or("max_position_embeddings", defaults.max_positions)?;
    let max_positions = match rope.scaling {
        // This scaling is for sequences that are longer than the configuration says.
        RopeScaling::Dynamic { factor, .. } => (positions as f64 * factor) as usize,
        _ => positions,
    };
    Ok(DecoderConfig {
        norm_eps: reader.eps("rms_norm_eps", defaults.eps)?,
        max_positions,
        tied: reader.flag_or("tie_word_embeddings", defaults.tied)?,
        initializer_range: reader.initializer_range()?,
        ..DecoderConfig::new(
            [reader.vocab_size()?, hidden_size, num_layers],
            heads,
            feed_forward,
            rope,
        )
    })
}

impl Reader<'_> {
    /// The number of tokens.
    pub(super) fn vocab_size(&self) -> Result<usize> {
        self.size("vocab_size")
    }

    /// The width of a head, where heads share a width evenly.
    pub(super) fn per_head(
        &self,
        key: &str,
        width: usize,
        heads_key: &str,
        heads: usize,
    ) -> Result<usize> {
        match width.is_multiple_of(heads) {
            true => Ok(width / heads),
            false => {
                let message = format!("{width} is not divisible by {heads_key} = {heads}");
                Err(self.wrong(key, message))
            }
        }
    }

    pub(super) fn activation(&self, key: &str, default: &'static str) -> Result<Activation> {
        let name = self.text(key)?.unwrap_or(default);
        activation(name).ok_or_else(|| {
            self.wrong(key, format!("the activation \"{name}\" is not supported; supported are silu, gelu, gelu_new, gelu_pytorch_tanh and relu"))
        })
    }

    /// Whether each layer has a window: by `layer_types`, and without that key by the function.
    pub(super) fn windowed_layers(
        &self,
        num_layers: usize,
        without_key: impl Fn(usize) -> bool,
    ) -> Result<Vec<bool>> {
        let key = "layer_types";
        let Some(list) = self.list(key)? else {
            return Ok((0..num_layers).map(without_key).collect());
        };
        let windowed = list.iter().map(|kind| match kind.as_str() {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            _ => {
                let expected = "expected \"full_attention\" or \"sliding_attention\"";
                Err(self.wrong(key, format!("{expected}, found {kind}")))
            }
        });
        let windowed = windowed.collect::<Result<Vec<_>>>()?;
        match windowed.len() == num_layers {
            true => Ok(windowed),
            false => {
                let found = windowed.len();
                Err(self.wrong(
                    key,
                    format!("expected one type for each of {num_layers} layers, found {found}"),
                ))
            }
        }
    }
}

/// Gives the layers of these indices the window.
pub(super) fn set_windows(
    layers: &mut [LayerConfig],
    windowed: impl Fn(usize) -> bool,
    window: Option<usize>,
) {
    for (_, layer) in layers.iter_mut().enumerate().filter(|(i, _)| windowed(*i)) {
        layer.window = window;
    }
}

/// The head that classifies whole inputs, by what most encoders have: `dense`, tanh, `out_proj`.
pub(super) fn classifier(pooling: Pooling, dropout: f64) -> ClassifierConfig {
    ClassifierConfig {
        pooling,
        dense: Some(true),
        shares_dense: false,
        activation: None,
        norm: false,
        input_dropout: 0.0,
        dropout,
    }
}

/// A decoder whose files have its own names.
pub(super) fn described(config: DecoderConfig) -> Description {
    Description::decoder(config, layout())
}

/// The layout of files with the names of decoders.
fn layout() -> WeightLayout {
    WeightLayout::new("model").ignore("*.rotary_emb.inv_freq")
}

/// The mixtures of experts of a family, with its defaults for the numbers that keys set.
pub(super) struct Experts {
    /// Number of experts.
    pub(super) number: usize,
    pub(super) per_token: usize,
    pub(super) intermediate_size: usize,
    pub(super) normalize: bool,
}

/// The names of experts in files.
pub(super) struct ExpertFiles {
    /// The block of a layer.
    pub(super) block: &'static str,
    /// The projections of the model, with their names in files.
    pub(super) projections: [(&'static str, &'static str); 3],
}

/// A decoder with mixtures of experts.
pub(super) fn experts(
    reader: &Reader<'_>,
    mut config: DecoderConfig,
    defaults: Experts,
    files: ExpertFiles,
) -> Result<Description> {
    // `transformers` takes either name.
    let (key, number) = match reader.optional_size("num_local_experts")? {
        Some(number) => ("num_local_experts", Some(number)),
        None => ("num_experts", None),
    };
    let other = reader.optional_size("num_experts")?;
    if let (Some(number), Some(other)) = (number, other)
        && number != other
    {
        let message = format!("is {number}, and `num_experts` is {other}; leave one of them out");
        return Err(reader.wrong(key, message));
    }
    let num_experts = number.or(other).unwrap_or(defaults.number);
    let experts_per_token = reader.size_or("num_experts_per_tok", defaults.per_token)?;
    if experts_per_token > num_experts {
        let message = format!(
            "a token cannot be computed by {experts_per_token} of {num_experts} experts (`{key}`)"
        );
        return Err(reader.wrong("num_experts_per_tok", message));
    }
    let factor = reader.number_or("router_aux_loss_coef", 0.001)?;
    if !(factor >= 0.0 && factor.is_finite()) {
        let message = format!("is {factor}; expected a number of at least 0");
        return Err(reader.wrong("router_aux_loss_coef", message));
    }
    let is_balanced = reader.flag_or("output_router_logits", false)?;
    config.experts = Some(ExpertsConfig {
        num_experts,
        experts_per_token,
        intermediate_size: defaults.intermediate_size,
        normalize: defaults.normalize,
        balance: is_balanced.then_some(factor),
    });
    let (ours, theirs) = ("model.layers.*.mlp", format!("model.layers.*.{}", files.block));
    let mut weights = layout();
    if files.block != "mlp" {
        weights = weights.rename(&format!("{ours}.gate.weight"), &format!("{theirs}.gate.weight"));
    }
    for (own, file) in files.projections {
        let (model, file) =
            (format!("{ours}.experts.{own}.weight"), format!("{theirs}.experts.#.{file}.weight"));
        weights = weights.stack(&model, &file, num_experts);
    }
    Ok(Description::decoder(config, weights))
}
