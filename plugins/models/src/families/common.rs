//! Keys that several families share.

use fulgurite_error::Result;
use fulgurite_nn::{Activation, RopeScaling};

use super::Description;
use crate::config::{Reader, RopeDefaults};
use crate::decoder::{DecoderConfig, LayerConfig};
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
    /// The rotated part of a head, without a key for it.
    pub(super) partial: f64,
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
        partial: 1.0,
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

/// Llama's feed-forward block. `activation`: its key, and its default.
pub(super) fn gated(
    reader: &Reader<'_>,
    (key, default): (&str, &'static str),
) -> Result<FeedForward> {
    Ok(FeedForward {
        intermediate_size: reader.size("intermediate_size")?,
        gated: true,
        activation: reader.activation(key, default)?,
        bias: false,
    })
}

/// A decoder with Llama's keys.
pub(super) fn decoder(reader: &Reader<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let hidden_size = reader.size("hidden_size")?;
    let num_layers = reader.size("num_hidden_layers")?;
    let heads = heads(reader, hidden_size, defaults)?;
    let feed_forward = gated(reader, defaults.activation)?;
    let Defaults { layer_type, partial, partial_key, original_max_positions, .. } = *defaults;
    let rope = RopeDefaults {
        partial,
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
pub(super) fn layout() -> WeightLayout {
    WeightLayout::new("model").ignore("*.rotary_emb.inv_freq")
}
