//! GPT-NeoX and Pythia.
//!
//! A quarter of each head is rotated, attention and MLP take the same input
//! (`use_parallel_residual`), layer norms, an MLP without a gate, biases everywhere but in the
//! head. Its files hold queries, keys and values of each head beside each other.

use fulgurite_error::Result;

use super::Description;
use crate::config::{Reader, RopeDefaults};
use crate::decoder::{DecoderConfig, NormPlacement};
use crate::layers::{FeedForward, NormKind};
use crate::weights::WeightLayout;

pub(super) fn gpt_neox(reader: &Reader<'_>) -> Result<Description> {
    let hidden_size = reader.size("hidden_size")?;
    let heads = reader.size("num_attention_heads")?;
    let head_dim = reader.per_head("hidden_size", hidden_size, "num_attention_heads", heads)?;
    let feed_forward = FeedForward {
        intermediate_size: reader.size("intermediate_size")?,
        gated: false,
        activation: reader.activation("hidden_act", "gelu")?,
        bias: true,
    };
    let theta = reader.optional_number("rotary_emb_base")?;
    let rope = RopeDefaults {
        partial: 0.25,
        partial_key: Some("rotary_pct"),
        ..RopeDefaults::new(head_dim, theta.unwrap_or(10_000.0))
    };
    reader.attention_dropout("attention_dropout", 0.0);
    let bias = reader.flag_or("attention_bias", true)?;
    let config = DecoderConfig {
        qkv_bias: bias,
        output_bias: bias,
        norm: NormKind::Layer,
        norm_eps: reader.eps("layer_norm_eps", 1e-5)?,
        norms: match reader.flag_or("use_parallel_residual", true)? {
            true => NormPlacement::Parallel,
            false => NormPlacement::Before,
        },
        max_positions: reader.size_or("max_position_embeddings", 2048)?,
        tied: reader.flag_or("tie_word_embeddings", false)?,
        initializer_range: reader.initializer_range()?,
        embedding_dropout: reader.probability("hidden_dropout", 0.0)?,
        residual_dropout: reader.probability("hidden_dropout", 0.0)?,
        ..DecoderConfig::new(
            [reader.vocab_size()?, hidden_size, reader.size("num_hidden_layers")?],
            [heads, heads, head_dim],
            feed_forward,
            reader.rope(rope)?,
        )
    };
    let description = Description::decoder(config, weights(heads, head_dim));
    Ok(Description { token_head: Some("score.*"), ..description })
}

fn weights(heads: usize, head_dim: usize) -> WeightLayout {
    let (ours, theirs) = ("model.layers.*", "gpt_neox.layers.*");
    let inside = |name: &str| format!("{ours}.{name}");
    let file = |name: &str| format!("{theirs}.{name}");
    WeightLayout::new("gpt_neox")
        .ignore("*.attention.bias")
        .ignore("*.attention.masked_bias")
        .ignore("*.rotary_emb.inv_freq")
        .split_heads(
            &inside("self_attn"),
            &["q_proj", "k_proj", "v_proj"],
            &file("attention.query_key_value"),
            [heads, head_dim],
        )
        .rename("model.embed_tokens.*", "gpt_neox.embed_in.*")
        .rename("model.norm.*", "gpt_neox.final_layer_norm.*")
        .rename("lm_head.*", "embed_out.*")
        .rename(&inside("self_attn.o_proj.*"), &file("attention.dense.*"))
        .rename(&inside("mlp.up_proj.*"), &file("mlp.dense_h_to_4h.*"))
        .rename(&inside("mlp.down_proj.*"), &file("mlp.dense_4h_to_h.*"))
        .rename(&inside("input_layernorm.*"), &file("input_layernorm.*"))
        .rename(&inside("post_attention_layernorm.*"), &file("post_attention_layernorm.*"))
}
