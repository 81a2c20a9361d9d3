//! ModernBERT.
//!
//! Norms before attention and MLP, without biases; gated MLPs with the exact GELU; two of three
//! layers have a window on both sides and another rotary embedding. The first layer lacks a
//! norm before attention, because a norm follows the embeddings. Its files hold queries, keys and
//! values as one projection (`Wqkv`), and gate and up as one (`Wi`).

use fulgurite_error::Result;

use super::Description;
use crate::config::{Reader, RopeDefaults};
use crate::encoder::{
    ClassifierConfig, EncoderConfig, EncoderLayerConfig, InputConfig, MaskedLmConfig, Pooling,
    TextConfig,
};
use crate::layers::{FeedForward, NormKind};
use crate::weights::WeightLayout;

pub(super) fn modernbert(reader: &Reader<'_>) -> Result<Description> {
    let hidden_size = reader.size_or("hidden_size", 768)?;
    let num_heads = reader.size_or("num_attention_heads", 12)?;
    let head_dim = reader.per_head("hidden_size", hidden_size, "num_attention_heads", num_heads)?;
    let num_layers = reader.size_or("num_hidden_layers", 22)?;
    let every = reader.size_or("global_attn_every_n_layers", 3)?;
    let windowed = reader.windowed_layers(num_layers, |i| i % every != 0)?;
    let local_attention = reader.size_or("local_attention", 128)?;
    reader.optional_size("sliding_window")?;
    let rope = |theta_key, theta, layer_type| {
        reader.rope(RopeDefaults {
            theta_key,
            layer_type: Some(layer_type),
            ..RopeDefaults::new(head_dim, theta)
        })
    };
    let ropes = vec![
        rope("global_rope_theta", 160_000.0, "full_attention")?,
        rope("local_rope_theta", 10_000.0, "sliding_attention")?,
    ];
    let layer = |i: usize| EncoderLayerConfig {
        rope: Some(usize::from(windowed[i])),
        window: windowed[i].then_some(local_attention / 2),
        attention_norm: i > 0,
    };
    reader.optional_size("max_position_embeddings")?;
    reader.attention_dropout("attention_dropout", 0.0);
    reader.fixed("mlp_dropout", 0.0)?;
    let bias = reader.flag_or("attention_bias", false)?;
    let head = ClassifierConfig {
        pooling: match reader.text("classifier_pooling")?.unwrap_or("cls") {
            "cls" => Pooling::First,
            "mean" => Pooling::Mean,
            other => {
                let message = format!("expected \"cls\" or \"mean\", found \"{other}\"");
                return Err(reader.wrong("classifier_pooling", message));
            }
        },
        dense: Some(reader.flag_or("classifier_bias", false)?),
        shares_dense: true,
        activation: Some(reader.activation("classifier_activation", "gelu")?),
        norm: true,
        input_dropout: 0.0,
        dropout: reader.probability("classifier_dropout", 0.0)?,
    };
    let config = EncoderConfig {
        input: InputConfig::Text(TextConfig {
            vocab_size: reader.size_or("vocab_size", 50_368)?,
            positions: None,
            first_position: 0,
            segments: 0,
        }),
        hidden_size,
        num_heads,
        qkv_bias: bias,
        output_bias: bias,
        feed_forward: FeedForward {
            intermediate_size: reader.size_or("intermediate_size", 1152)?,
            gated: true,
            activation: reader.activation("hidden_activation", "gelu")?,
            bias: reader.flag_or("mlp_bias", false)?,
        },
        norm: match reader.flag_or("norm_bias", false)? {
            true => NormKind::Layer,
            false => NormKind::LayerWithoutBias,
        },
        norm_eps: reader.eps("norm_eps", 1e-5)?,
        post_norm: false,
        embedding_norm: true,
        ropes,
        layers: (0..num_layers).map(layer).collect(),
        initializer_range: reader.initializer_range()?,
        embedding_dropout: reader.probability("embedding_dropout", 0.0)?,
        residual_dropout: 0.0,
        masked_lm: Some(MaskedLmConfig {
            dense_bias: head.dense == Some(true),
            activation: reader.activation("classifier_activation", "gelu")?,
            decoder_bias: reader.flag_or("decoder_bias", true)?,
            tied: reader.flag_or("tie_word_embeddings", true)?,
        }),
        classifier: head,
        token_classifier: head,
    };
    let weights = weights(&config);
    Ok(Description::encoder(config, weights))
}

fn weights(config: &EncoderConfig) -> WeightLayout {
    let (layers, width) = ("model.layers.*", config.hidden_size);
    let inside = |name: &str| format!("{layers}.{name}");
    let parts = ["q_proj", "k_proj", "v_proj"].map(|name| (name, width));
    let inner = config.feed_forward.intermediate_size;
    WeightLayout::new("model")
        .rename("model.embed_tokens.*", "model.embeddings.tok_embeddings.*")
        .rename("model.embed_norm.*", "model.embeddings.norm.*")
        .rename("model.norm.*", "model.final_norm.*")
        .split(&inside("self_attn"), &parts, &inside("attn.Wqkv"))
        .split(&inside("mlp"), &[("gate_proj", inner), ("up_proj", inner)], &inside("mlp.Wi"))
        .rename(&inside("self_attn.o_proj.*"), &inside("attn.Wo.*"))
        .rename(&inside("mlp.down_proj.*"), &inside("mlp.Wo.*"))
        .rename(&inside("input_layernorm.*"), &inside("attn_norm.*"))
        .rename(&inside("post_attention_layernorm.*"), &inside("mlp_norm.*"))
        .rename("lm_head.dense.*", "head.dense.*")
        .rename("lm_head.norm.*", "head.norm.*")
        .rename("lm_head.decoder.*", "decoder.*")
        .rename("classifier.out_proj.*", "classifier.*")
}
