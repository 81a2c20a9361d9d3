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

use fulgurite_error::Result;
use fulgurite_nn::{QkNorm, QkNormScope};

use super::Description;
use super::common::{Defaults, ExpertFiles, Experts, decoder, described, experts, set_windows};
use crate::config::Reader;
use crate::decoder::DecoderConfig;

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
    let uses = reader.flag_or("use_sliding_window", false)?;
    let window = reader.nullable_size("sliding_window", Some(4096))?.filter(|_| uses);
    set_windows(&mut config.layers, |_| true, window);
    // `transformers` has the key in files, and no use for it.
    reader.integer_or("max_window_layers", 0)?;
    let step = reader.size_or("decoder_sparse_step", 1)?;
    let dense = layers_without_experts(reader)?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = (i + 1).is_multiple_of(step) && !dense.contains(&i);
    }
    let intermediate_size = reader.size_or("moe_intermediate_size", 768)?;
    let normalize = reader.flag_or("norm_topk_prob", false)?;
    let defaults = Experts { number: 128, per_token: 8, intermediate_size, normalize };
    let projections = ["gate_proj", "up_proj", "down_proj"].map(|name| (name, name));
    experts(reader, config, defaults, ExpertFiles { block: "mlp", projections })
}

/// The indices of layers that have an MLP instead of experts.
fn layers_without_experts(reader: &Reader<'_>) -> Result<Vec<usize>> {
    let key = "mlp_only_layers";
    let indices = reader.list(key)?.into_iter().flatten().map(|index| {
        let index = index.as_u64().and_then(|index| usize::try_from(index).ok());
        index.ok_or_else(|| reader.wrong(key, "expected the indices of layers, from 0 on"))
    });
    indices.collect()
}

/// Biases, and the norms of queries and keys.
fn set_attention(reader: &Reader<'_>, config: &mut DecoderConfig) -> Result<()> {
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    let (eps, scope) = (config.norm_eps, QkNormScope::Head);
    config.qk_norm = Some(QkNorm { eps, scope, unit_offset: false });
    Ok(())
}

fn with_window(reader: &Reader<'_>, mut config: DecoderConfig) -> Result<DecoderConfig> {
    let uses = reader.flag_or("use_sliding_window", false)?;
    let window = reader.nullable_size("sliding_window", Some(4096))?.filter(|_| uses);
    let first = reader.integer_or("max_window_layers", 28)?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| i >= first)?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    Ok(config)
}
