//! SmolLM3: Llama without a rotary embedding in every fourth layer.

use fulgurite_error::Result;

use super::Description;
use super::common::{Defaults, decoder, described, set_windows};
use crate::config::Reader;

pub(super) fn smollm3(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        max_positions: 32_768,
        theta: 2e6,
        tied: true,
        kv_heads: Some(4),
        ..Defaults::LLAMA
    };
    let mut config = decoder(reader, &defaults)?;
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    config.feed_forward.bias = reader.flag_or("mlp_bias", false)?;
    let layers = config.layers.len();
    let interval = reader.size_or("no_rope_layer_interval", 4)?;
    let has_rope: Vec<bool> = match reader.list("no_rope_layers")? {
        None => (0..layers).map(|i| (i + 1) % interval != 0).collect(),
        Some(list) => list.iter().map(|flag| flag.as_u64() != Some(0)).collect(),
    };
    if has_rope.len() != layers {
        let found = has_rope.len();
        let message = format!("expected a number for each of {layers} layers, found {found}");
        return Err(reader.wrong("no_rope_layers", message));
    }
    for (layer, has_rope) in config.layers.iter_mut().zip(&has_rope) {
        layer.rope = layer.rope.filter(|_| *has_rope);
    }
    let uses = reader.flag_or("use_sliding_window", false)?;
    let window = reader.nullable_size("sliding_window", None)?.filter(|_| uses);
    let windowed = reader.windowed_layers(layers, |i| window.is_some() && !has_rope[i])?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    // Released files contain this key of Qwen without a use for it.
    reader.integer_or("max_window_layers", 0)?;
    Ok(described(config))
}
