//! Phi-3, 3.5 and 4.
//!
//! Llama with `longrope`, a part of each head that is rotated (Phi-4-mini), dropout, and a window.
//! Its files hold queries, keys and values as one projection (`qkv_proj`), and gate and up as one
//! (`gate_up_proj`).

use fulgurite_error::Result;
use fulgurite_nn::RopeScaling;

use super::Description;
use super::common::{Defaults, decoder, set_windows};
use crate::config::Reader;
use crate::weights::WeightLayout;

pub(super) fn phi3(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        max_positions: 4096,
        eps: 1e-5,
        partial_key: Some("partial_rotary_factor"),
        original_max_positions: Some(4096),
        ..Defaults::LLAMA
    };
    let mut config = decoder(reader, &defaults)?;
    if !matches!(config.ropes[0].scaling, RopeScaling::None | RopeScaling::LongRope { .. }) {
        let message = "the only scaling of models of type \"phi3\" is \"longrope\"";
        return Err(reader.wrong("rope_scaling", message));
    }
    config.residual_dropout = reader.probability("resid_pdrop", 0.0)?;
    // `transformers` has the key, and no layer for it.
    reader.probability("embd_pdrop", 0.0)?;
    // Read by the rotary embedding only if that is scaled.
    reader.optional_size("original_max_position_embeddings")?;
    let window = reader.nullable_size("sliding_window", None)?;
    set_windows(&mut config.layers, |_| true, window);
    let [q, kv] = [config.num_heads, config.num_kv_heads].map(|heads| heads * config.head_dim);
    let width = config.feed_forward.intermediate_size;
    let weights = WeightLayout::new("model")
        .ignore("*.rotary_emb.inv_freq")
        .split(
            "model.layers.*.self_attn",
            &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)],
            "model.layers.*.self_attn.qkv_proj",
        )
        .split(
            "model.layers.*.mlp",
            &[("gate_proj", width), ("up_proj", width)],
            "model.layers.*.mlp.gate_up_proj",
        );
    Ok(Description::decoder(config, weights))
}
