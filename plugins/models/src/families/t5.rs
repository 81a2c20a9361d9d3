//! T5, FLAN-T5 and mT5.
//!
//! An encoder, and a decoder that attends to it. RMS norms before each block, no biases, no
//! positions: scores have a learned term by the distance, in buckets, which all layers of a stack
//! share. Scores are not divided by the root of the heads' width.
//!
//! | | T5 | T5 1.1, FLAN-T5 | mT5 |
//! |---|---|---|---|
//! | MLP, `feed_forward_proj` | `relu` | `gated-gelu` | `gated-gelu` |
//! | head | the embedding, of outputs divided by the root of their width | its own | its own |

use fulgurite_error::Result;
use fulgurite_nn::Activation;

use super::{Architecture, Description};
use crate::config::Reader;
use crate::encoder_decoder::EncoderDecoderConfig;
use crate::layers::{FeedForward, activation};
use crate::weights::WeightLayout;

/// Defaults in which the families differ.
struct Defaults {
    vocab_size: usize,
    d_ff: usize,
    num_layers: usize,
    num_heads: usize,
    feed_forward: &'static str,
    /// Whether a configuration can have outputs scaled.
    scales: bool,
}

pub(super) fn t5(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        vocab_size: 32_128,
        d_ff: 2048,
        num_layers: 6,
        num_heads: 8,
        feed_forward: "relu",
        scales: true,
    };
    describe(reader, &defaults)
}

pub(super) fn mt5(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        vocab_size: 250_112,
        d_ff: 1024,
        num_layers: 8,
        num_heads: 6,
        feed_forward: "gated-gelu",
        scales: false,
    };
    describe(reader, &defaults)
}

fn describe(reader: &Reader<'_>, defaults: &Defaults) -> Result<Description> {
    reader.fixed("is_encoder_decoder", true)?;
    reader.fixed("is_decoder", false)?;
    // The longest text that the first models were trained with. Distances have no limit.
    reader.value("n_positions");
    let num_layers = reader.size_or("num_layers", defaults.num_layers)?;
    let tied = reader.flag_or("tie_word_embeddings", true)?;
    let padding = reader.integer_or("pad_token_id", 0)?;
    let dropout = reader.probability("dropout_rate", 0.1)?;
    reader.attention_dropout("dropout_rate", 0.1);
    // A file that says that its head is its own is of T5 1.1, which does not scale.
    let scales = reader.flag_of_file("tie_word_embeddings").unwrap_or(tied);
    let vocab_size = reader.size_or("vocab_size", defaults.vocab_size)?;
    let start_token = reader.integer_or("decoder_start_token_id", padding)?;
    if start_token >= vocab_size {
        let message = format!("must be below vocab_size = {vocab_size}, found {start_token}");
        return Err(reader.wrong("decoder_start_token_id", message));
    }
    let config = EncoderDecoderConfig {
        vocab_size,
        hidden_size: reader.size_or("d_model", 512)?,
        num_heads: reader.size_or("num_heads", defaults.num_heads)?,
        head_dim: reader.size_or("d_kv", 64)?,
        feed_forward: feed_forward(reader, defaults)?,
        encoder_layers: num_layers,
        decoder_layers: reader.size_or("num_decoder_layers", num_layers)?,
        num_buckets: reader.size_or("relative_attention_num_buckets", 32)?,
        max_distance: reader.size_or("relative_attention_max_distance", 128)?,
        norm_eps: reader.eps("layer_norm_epsilon", 1e-6)?,
        dropout,
        tied,
        scale_outputs: defaults.scales && reader.flag_or("scale_decoder_outputs", scales)?,
        start_token: start_token as u32,
        initializer_factor: reader.initializer_factor()?,
    };
    let weights = weights(config.feed_forward.gated);
    Ok(Description::new(Architecture::EncoderDecoder(Box::new(config)), weights))
}

/// The MLP: the name of an activation, with `gated-` in front for one with a gate.
fn feed_forward(reader: &Reader<'_>, defaults: &Defaults) -> Result<FeedForward> {
    let key = "feed_forward_proj";
    let name = reader.text(key)?.unwrap_or(defaults.feed_forward);
    let (gated, of) = match name.strip_prefix("gated-") {
        Some(of) => (true, of),
        None => (false, name),
    };
    // In `transformers`, this name alone means the approximation.
    let found = if name == "gated-gelu" { Some(Activation::GeluTanh) } else { activation(of) };
    let Some(activation) = found else {
        return Err(reader.wrong(
            key,
            format!(
                "the MLP \"{name}\" is not supported; supported are silu, gelu, gelu_new and relu, also with \"gated-\" \
                 in front"
            ),
        ));
    };
    let intermediate_size = reader.size_or("d_ff", defaults.d_ff)?;
    Ok(FeedForward { intermediate_size, gated, activation, bias: false })
}

fn weights(gated: bool) -> WeightLayout {
    let mut layout = WeightLayout::new("")
        .ignore("encoder.embed_tokens.weight")
        .ignore("decoder.embed_tokens.weight")
        // In files of the first models, without a use.
        .ignore("*.EncDecAttention.relative_attention_bias.weight")
        .rename("model.embed_tokens.weight", "shared.weight");
    for (stack, last) in [("encoder", "layer.1"), ("decoder", "layer.2")] {
        let (ours, theirs) = (format!("model.{stack}.layers.*"), format!("{stack}.block.*"));
        layout = layout
            .rename(&format!("model.{stack}.norm.*"), &format!("{stack}.final_layer_norm.*"))
            .rename(
                &format!("model.{stack}.position_bias.*"),
                &format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.*"),
            );
        let mut names = vec![
            ("input_layernorm".to_owned(), "layer.0.layer_norm".to_owned()),
            ("post_attention_layernorm".to_owned(), format!("{last}.layer_norm")),
            ("mlp.down_proj".to_owned(), format!("{last}.DenseReluDense.wo")),
        ];
        let inner: &[_] = match gated {
            true => &[("gate_proj", "wi_0"), ("up_proj", "wi_1")],
            false => &[("up_proj", "wi")],
        };
        for (name, file) in inner {
            names.push((format!("mlp.{name}"), format!("{last}.DenseReluDense.{file}")));
        }
        let mut attentions = vec![("self_attn", "layer.0.SelfAttention")];
        if stack == "decoder" {
            attentions.push(("cross_attn", "layer.1.EncDecAttention"));
            names.push(("cross_attention_layernorm".to_owned(), "layer.1.layer_norm".to_owned()));
        }
        for (attention, file) in attentions {
            for (projection, short) in
                [("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o")]
            {
                names.push((format!("{attention}.{projection}"), format!("{file}.{short}")));
            }
        }
        for (name, file) in names {
            layout = layout.rename(&format!("{ours}.{name}.*"), &format!("{theirs}.{file}.*"));
        }
    }
    layout
}
