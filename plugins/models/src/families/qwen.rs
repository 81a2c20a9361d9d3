//! Qwen 2, 2.5 and 3.
//!
//! | | Qwen 2 | Qwen 3 |
//! |---|---|---|
//! | biases | queries, keys and values | `attention_bias` |
//! | width of a head | `hidden_size / num_attention_heads` | `head_dim`, 128 |
//! | norms of queries and keys | none | one for each head |
//! | window | with `use_sliding_window`, from layer `max_window_layers` on | the same |

use fulgurite_error::Result;
use fulgurite_nn::{QkNorm, QkNormScope};

use super::Description;
use super::common::{Defaults, decoder, described, set_windows};
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
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    let (eps, scope) = (config.norm_eps, QkNormScope::Head);
    config.qk_norm = Some(QkNorm { eps, scope, unit_offset: false });
    Ok(described(with_window(reader, config)?))
}

fn with_window(reader: &Reader<'_>, mut config: DecoderConfig) -> Result<DecoderConfig> {
    let uses = reader.flag_or("use_sliding_window", false)?;
    let window = reader.nullable_size("sliding_window", Some(4096))?.filter(|_| uses);
    let first = reader.integer_or("max_window_layers", 28)?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| i >= first)?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    Ok(config)
}
