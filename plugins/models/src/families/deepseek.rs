//! DeepSeek-V3 and R1.
//!
//! Multi-head latent attention, and experts behind the first `first_k_dense_replace` layers: scores
//! by sigmoid, groups, a correction bias and a shared expert. Layers that predict several tokens
//! are not trained.

use fulgurite_error::Result;
use fulgurite_nn::RopeScaling;

use super::Description;
use super::common::gated;
use super::experts::{RoutedDefaults, routed};
use crate::config::{Reader, RopeDefaults};
use crate::decoder::{DecoderConfig, LatentConfig};

pub(super) fn deepseek_v3(reader: &Reader<'_>) -> Result<Description> {
    let heads = reader.size("num_attention_heads")?;
    // Each head has a key and a value of its own.
    reader.fixed("num_key_value_heads", heads)?;
    let latent = LatentConfig {
        q_lora_rank: reader.nullable_size("q_lora_rank", Some(1536))?,
        kv_lora_rank: reader.size_or("kv_lora_rank", 512)?,
        qk_nope_head_dim: reader.size_or("qk_nope_head_dim", 128)?,
        qk_rope_head_dim: reader.size_or("qk_rope_head_dim", 64)?,
        v_head_dim: reader.size_or("v_head_dim", 128)?,
        rope_interleave: reader.flag_or("rope_interleave", true)?,
    };
    // Files have it, and it is the width of the rotated part.
    reader.fixed("head_dim", latent.qk_rope_head_dim)?;
    if !latent.qk_rope_head_dim.is_multiple_of(2) {
        let message = format!("must be even, found {}", latent.qk_rope_head_dim);
        return Err(reader.wrong("qk_rope_head_dim", message));
    }
    let mut rope = reader.rope(RopeDefaults::new(latent.qk_rope_head_dim, 10_000.0))?;
    rope.head_dim = latent.head_dim();
    let width = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) as f64;
    let scale = score_factor(&rope.scaling).powi(2) / width.sqrt();
    reader.attention_dropout("attention_dropout", 0.0);
    let bias = reader.flag_or("attention_bias", false)?;
    let mut config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        latent: Some(latent),
        norm_eps: reader.eps("rms_norm_eps", 1e-6)?,
        max_positions: reader.size_or("max_position_embeddings", 4096)?,
        tied: reader.flag_or("tie_word_embeddings", false)?,
        initializer_range: reader.initializer_range()?,
        ..DecoderConfig::new(
            [reader.vocab_size()?, reader.size("hidden_size")?, reader.size("num_hidden_layers")?],
            [heads, heads, latent.head_dim()],
            gated(reader, ("hidden_act", "silu"))?,
            rope,
        )
    };
    config.layers.iter_mut().for_each(|layer| layer.scale = Some(scale));
    let defaults = RoutedDefaults {
        experts: [256, 8],
        intermediate_size: 2048,
        groups: [8, 4],
        scale: 2.5,
        dense_layers: 3,
    };
    routed(reader, config, &defaults)
}

/// The factor of queries and of keys in the scores of YaRN, with `mscale_all_dim`.
fn score_factor(scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(weight), .. } if *factor > 1.0 => {
            0.1 * weight * factor.ln() + 1.0
        }
        _ => 1.0,
    }
}
