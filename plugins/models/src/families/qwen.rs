//! Qwen 2, 2.5 and 3.
//!
//! | | Qwen 2 | Qwen 3 |
//! |---|---|---|
//! | biases | queries, keys and values | `attention_bias` |
//! | width of a head | `hidden_size / num_attention_heads` | `head_dim`, 128 |
//! | norms of queries and keys | none | one for each head |
//! | window | with `use_sliding_window`, from layer `max_window_layers` on | the same |
//!
//! Qwen3-MoE is Qwen 3 with a mixture of experts in place of the MLPs of most layers, heads of
//! `hidden_size / num_attention_heads` without a key for their width, and the window in all layers.
//! Qwen2-MoE has a shared expert with a gate beside the experts of a token, and the window in every
//! other of the first `max_window_layers` layers.

use fulgurite_error::Result;
use fulgurite_nn::{QkNorm, QkNormScope, RouterConfig, SharedExpertConfig};

use super::Description;
use super::common::{Defaults, decoder, described, set_windows};
use super::experts::{ExpertFiles, NUMBER, balance, mixture, numbers, sparse_layers};
use crate::config::Reader;
use crate::decoder::{DecoderConfig, ExpertsConfig};

const DEFAULTS: Defaults =
    Defaults { max_positions: 32_768, kv_heads: Some(32), ..Defaults::LLAMA };

pub(super) fn qwen2(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &DEFAULTS)?;
    config.qkv_bias = true;
    Ok(described(with_window(reader, config)?))
}

pub(super) fn qwen3(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &Defaults { head_dim: Some(128), ..DEFAULTS })?;
    set_attention(reader, &mut config)?;
    Ok(described(with_window(reader, config)?))
}

pub(super) fn qwen3_moe(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &Defaults { kv_heads: Some(4), ..DEFAULTS })?;
    set_attention(reader, &mut config)?;
    let window = window(reader)?;
    set_windows(&mut config.layers, |_| true, window);
    // `transformers` has the key in files, and no use for it.
    reader.integer_or("max_window_layers", 0)?;
    sparse_layers(reader, &mut config)?;
    let experts = experts(reader, NUMBER, [128, 8], 768)?;
    Ok(with_experts(config, experts))
}

/// The mixtures of experts, with defaults for the numbers of experts and their width.
fn experts(
    reader: &Reader<'_>,
    keys: [&str; 2],
    defaults: [usize; 2],
    width: usize,
) -> Result<ExpertsConfig> {
    let width = reader.size_or("moe_intermediate_size", width)?;
    let normalize = reader.flag_or("norm_topk_prob", false)?;
    Ok(ExpertsConfig {
        router: RouterConfig { normalize, ..RouterConfig::default() },
        balance: balance(reader)?,
        ..mixture(reader, numbers(reader, keys, defaults)?, width)?
    })
}

fn with_experts(config: DecoderConfig, experts: ExpertsConfig) -> Description {
    let weights = ExpertFiles::OWN.layout(&experts);
    Description::decoder(DecoderConfig { experts: Some(experts), ..config }, weights)
}

pub(super) fn qwen2_moe(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &Defaults { kv_heads: Some(16), ..DEFAULTS })?;
    config.qkv_bias = reader.flag_or("qkv_bias", true)?;
    let window = window(reader)?;
    let last = reader.integer_or("max_window_layers", 28)?;
    // Every other layer, as in `transformers`.
    let windowed =
        reader.windowed_layers(config.layers.len(), |i| i.is_multiple_of(2) && i < last)?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    sparse_layers(reader, &mut config)?;
    let intermediate_size = reader.size_or("shared_expert_intermediate_size", 5632)?;
    let shared = Some(SharedExpertConfig { intermediate_size, gated: true });
    let experts = ExpertsConfig { shared, ..experts(reader, ["num_experts"; 2], [60, 4], 1408)? };
    Ok(with_experts(config, experts))
}

/// Biases, and the norms of queries and keys.
fn set_attention(reader: &Reader<'_>, config: &mut DecoderConfig) -> Result<()> {
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    let (eps, scope) = (config.norm_eps, QkNormScope::Head);
    config.qk_norm = Some(QkNorm { eps, scope, unit_offset: false });
    Ok(())
}

/// The window of layers that have one.
fn window(reader: &Reader<'_>) -> Result<Option<usize>> {
    if reader.flag_or("use_sliding_window", false)? {
        return reader.nullable_size("sliding_window", Some(4096));
    }
    // Without the window, `transformers` writes 0.
    reader.value("sliding_window");
    Ok(None)
}

fn with_window(reader: &Reader<'_>, mut config: DecoderConfig) -> Result<DecoderConfig> {
    let window = window(reader)?;
    let first = reader.integer_or("max_window_layers", 28)?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| i >= first)?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    Ok(config)
}
