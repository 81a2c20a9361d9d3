//! Llama 1 to 3 and Mistral.
//!
//! | | Llama | Mistral |
//! |---|---|---|
//! | key and value heads | `num_attention_heads` | 8 |
//! | biases | `attention_bias` (all four projections), `mlp_bias` | none |
//! | window | none | `sliding_window` in all layers, 4096 |

use fulgurite_error::Result;

use super::Description;
use super::common::{Defaults, decoder, described, set_windows};
use crate::config::Reader;

pub(super) fn llama(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &Defaults::LLAMA)?;
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    config.feed_forward.bias = reader.flag_or("mlp_bias", false)?;
    Ok(described(config))
}

pub(super) fn mistral(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults { max_positions: 4096 * 32, kv_heads: Some(8), ..Defaults::LLAMA };
    let mut config = decoder(reader, &defaults)?;
    let window = reader.nullable_size("sliding_window", Some(4096))?;
    set_windows(&mut config.layers, |_| true, window);
    Ok(described(config))
}
