//! GPT-2.
//!
//! Learned positions, layer norms, an MLP without a gate, all layers with biases, the head shares
//! the embedding's weight. Its files hold the weights of linear layers transposed, and the
//! projections of queries, keys and values as one (`c_attn`).

use fulgurite_error::Result;
use fulgurite_nn::{RopeConfig, RopeScaling};

use super::Description;
use crate::config::Reader;
use crate::decoder::DecoderConfig;
use crate::layers::{FeedForward, NormKind};
use crate::weights::WeightLayout;

pub(super) fn gpt2(reader: &Reader<'_>) -> Result<Description> {
    let hidden_size = reader.size_or("n_embd", 768)?;
    let heads = reader.size_or("n_head", 12)?;
    let head_dim = reader.per_head("n_embd", hidden_size, "n_head", heads)?;
    let feed_forward = FeedForward {
        intermediate_size: reader.size_or("n_inner", 4 * hidden_size)?,
        gated: false,
        activation: reader.activation("activation_function", "gelu_new")?,
        bias: true,
    };
    reader.fixed("add_cross_attention", false)?;
    reader.attention_dropout("attn_pdrop", 0.1);
    // No layer uses it.
    let rope =
        RopeConfig { head_dim, theta: 10_000.0, rotary_dim: head_dim, scaling: RopeScaling::None };
    let vocab_size = reader.size_or("vocab_size", 50_257)?;
    let num_layers = reader.size_or("n_layer", 12)?;
    let mut config = DecoderConfig {
        ropes: Vec::new(),
        qkv_bias: true,
        output_bias: true,
        norm: NormKind::Layer,
        norm_eps: reader.eps("layer_norm_epsilon", 1e-5)?,
        max_positions: reader.size_or("n_positions", 1024)?,
        learned_positions: true,
        tied: reader.flag_or("tie_word_embeddings", true)?,
        initializer_range: reader.initializer_range()?,
        embedding_dropout: reader.probability("embd_pdrop", 0.1)?,
        residual_dropout: reader.probability("resid_pdrop", 0.1)?,
        ..DecoderConfig::new(
            [vocab_size, hidden_size, num_layers],
            [heads, heads, head_dim],
            feed_forward,
            rope,
        )
    };
    let scaled = reader.flag_or("scale_attn_weights", true)?;
    let by_layer = reader.flag_or("scale_attn_by_inverse_layer_idx", false)?;
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.rope = None;
        let scale = if scaled { (head_dim as f64).powf(-0.5) } else { 1.0 };
        layer.scale = Some(if by_layer { scale / (i + 1) as f64 } else { scale });
    }
    let description = Description::decoder(config, weights(hidden_size));
    Ok(Description { token_head: Some("score.*"), ..description })
}

fn weights(hidden_size: usize) -> WeightLayout {
    let (ours, theirs) = ("model.layers.*", "transformer.h.*");
    let mut layout = WeightLayout::new("transformer")
        .ignore("*.attn.bias")
        .ignore("*.attn.masked_bias")
        .rename("model.embed_tokens.weight", "transformer.wte.weight")
        .rename("model.embed_positions.weight", "transformer.wpe.weight")
        .rename("model.norm.*", "transformer.ln_f.*")
        .rename(&format!("{ours}.input_layernorm.*"), &format!("{theirs}.ln_1.*"))
        .rename(&format!("{ours}.post_attention_layernorm.*"), &format!("{theirs}.ln_2.*"));
    for (name, file) in [
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
    ] {
        layout = layout
            .transpose(&format!("{ours}.{name}.weight"), &format!("{theirs}.{file}.weight"))
            .rename(&format!("{ours}.{name}.bias"), &format!("{theirs}.{file}.bias"));
    }
    let parts = ["q_proj", "k_proj", "v_proj"].map(|name| (name, hidden_size));
    layout.split_transposed(&format!("{ours}.self_attn"), &parts, &format!("{theirs}.attn.c_attn"))
}
