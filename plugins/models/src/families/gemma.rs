//! Gemma 1, 2 and the text models of Gemma 3.
//!
//! All multiply embeddings by the root of the width, have norms whose weight is `1 + w`, and share
//! the weight of embedding and head.
//!
//! | | Gemma | Gemma 2 | Gemma 3 |
//! |---|---|---|---|
//! | norms of a layer | before | before and after | before and after |
//! | norms of queries and keys | none | none | one for each head |
//! | scores | by the heads' width | by `query_pre_attn_scalar`, soft limit 50 | by `query_pre_attn_scalar` |
//! | soft limit of logits | none | 30 | none |
//! | window | none | every second layer | five of six layers, with another rotary embedding |

use fulgurite_error::Result;
use fulgurite_nn::{Activation, QkNorm, QkNormScope};

use super::Description;
use super::common::{Defaults, decoder, described, set_windows};
use crate::config::{Reader, RopeDefaults};
use crate::decoder::{DecoderConfig, NormPlacement};
use crate::layers::NormKind;

const DEFAULTS: Defaults = Defaults {
    max_positions: 8192,
    tied: true,
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    head_dim: Some(256),
    kv_heads: Some(4),
    ..Defaults::LLAMA
};

fn common(reader: &Reader<'_>, defaults: &Defaults) -> Result<DecoderConfig> {
    let mut config = decoder(reader, defaults)?;
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    reader.fixed("use_bidirectional_attention", false)?;
    config.norm = NormKind::RmsUnitOffset;
    config.embedding_scale = Some((config.hidden_size as f64).sqrt());
    Ok(config)
}

pub(super) fn gemma(reader: &Reader<'_>) -> Result<Description> {
    let activation = ("hidden_act", "gelu_pytorch_tanh");
    let mut config = common(reader, &Defaults { activation, kv_heads: Some(16), ..DEFAULTS })?;
    reader.value("hidden_activation");
    // Released files say "gelu" and mean this.
    if config.feed_forward.activation == Activation::Gelu {
        config.feed_forward.activation = Activation::GeluTanh;
    }
    Ok(described(config))
}

pub(super) fn gemma2(reader: &Reader<'_>) -> Result<Description> {
    let mut config = common(reader, &DEFAULTS)?;
    reader.value("hidden_act");
    config.norms = NormPlacement::Around;
    config.attention_softcap = reader.nullable_number("attn_logit_softcapping", Some(50.0))?;
    config.logit_softcap = reader.nullable_number("final_logit_softcapping", Some(30.0))?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| i % 2 == 0)?;
    windows_and_scale(reader, &mut config, &windowed)?;
    Ok(described(config))
}

pub(super) fn gemma3(reader: &Reader<'_>) -> Result<Description> {
    let layer_type = Some("full_attention");
    let defaults = Defaults { max_positions: 131_072, theta: 1e6, layer_type, ..DEFAULTS };
    let mut config = common(reader, &defaults)?;
    reader.value("hidden_act");
    config.norms = NormPlacement::Around;
    let (eps, scope) = (config.norm_eps, QkNormScope::Head);
    config.qk_norm = Some(QkNorm { eps, scope, unit_offset: true });
    config.attention_softcap = reader.nullable_number("attn_logit_softcapping", None)?;
    config.logit_softcap = reader.nullable_number("final_logit_softcapping", None)?;
    let pattern = reader.size_or("sliding_window_pattern", 6)?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| (i + 1) % pattern != 0)?;
    windows_and_scale(reader, &mut config, &windowed)?;
    // Layers with a window have a rotary embedding of their own.
    config.ropes.push(reader.rope(RopeDefaults {
        theta_key: "rope_local_base_freq",
        layer_type: Some("sliding_attention"),
        takes_scaling: false,
        ..RopeDefaults::new(config.head_dim, 10_000.0)
    })?);
    for (layer, _) in config.layers.iter_mut().zip(&windowed).filter(|(_, windowed)| **windowed) {
        layer.rope = Some(1);
    }
    Ok(described(config))
}

/// Sets the windows of layers, and the factor of the scores in all of them.
fn windows_and_scale(
    reader: &Reader<'_>,
    config: &mut DecoderConfig,
    windowed: &[bool],
) -> Result<()> {
    let key = "query_pre_attn_scalar";
    let scalar = reader.number_or(key, 256.0)?;
    if scalar <= 0.0 {
        return Err(reader.wrong(key, format!("must be above 0, found {scalar:?}")));
    }
    let window = reader.nullable_size("sliding_window", Some(4096))?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    for layer in &mut config.layers {
        layer.scale = Some(scalar.powf(-0.5));
    }
    Ok(())
}
