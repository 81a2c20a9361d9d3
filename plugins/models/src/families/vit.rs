//! ViT.
//!
//! Patches of a picture behind a class token, learned positions, norms before attention and MLP.
//! The classification looks at the class token.

use fulgurite_error::Result;

use super::Description;
use crate::config::Reader;
use crate::encoder::{
    ClassifierConfig, EncoderConfig, EncoderLayerConfig, InputConfig, PatchConfig, Pooling,
};
use crate::layers::{FeedForward, NormKind};
use crate::weights::WeightLayout;

pub(super) fn vit(reader: &Reader<'_>) -> Result<Description> {
    let hidden_size = reader.size_or("hidden_size", 768)?;
    let num_heads = reader.size_or("num_attention_heads", 12)?;
    reader.per_head("hidden_size", hidden_size, "num_attention_heads", num_heads)?;
    let patches = PatchConfig {
        image_size: reader.size_or("image_size", 224)?,
        patch_size: reader.size_or("patch_size", 16)?,
        channels: reader.size_or("num_channels", 3)?,
    };
    if !patches.image_size.is_multiple_of(patches.patch_size) {
        let message = format!(
            "must be divisible by patch_size = {}, found {}",
            patches.patch_size, patches.image_size
        );
        return Err(reader.wrong("image_size", message));
    }
    let dropout = reader.probability("hidden_dropout_prob", 0.0)?;
    reader.attention_dropout("attention_probs_dropout_prob", 0.0);
    let layer = EncoderLayerConfig { rope: None, window: None, attention_norm: true };
    let head = ClassifierConfig {
        pooling: Pooling::First,
        dense: None,
        shares_dense: false,
        activation: None,
        norm: false,
        input_dropout: 0.0,
        dropout: 0.0,
    };
    let config = EncoderConfig {
        input: InputConfig::Patches(patches),
        hidden_size,
        num_heads,
        qkv_bias: reader.flag_or("qkv_bias", true)?,
        output_bias: true,
        feed_forward: FeedForward {
            intermediate_size: reader.size_or("intermediate_size", 3072)?,
            gated: false,
            activation: reader.activation("hidden_act", "gelu")?,
            bias: true,
        },
        norm: NormKind::Layer,
        norm_eps: reader.eps("layer_norm_eps", 1e-12)?,
        post_norm: false,
        embedding_norm: false,
        ropes: Vec::new(),
        layers: vec![layer; reader.size_or("num_hidden_layers", 12)?],
        initializer_range: reader.initializer_range()?,
        embedding_dropout: dropout,
        residual_dropout: dropout,
        masked_lm: None,
        classifier: head,
        token_classifier: head,
    };
    Ok(Description::encoder(config, weights()))
}

fn weights() -> WeightLayout {
    let (ours, theirs) = ("model.layers.*", "vit.encoder.layer.*");
    let mut layout = WeightLayout::new("vit")
        .ignore("vit.pooler.dense.weight")
        .ignore("vit.pooler.dense.bias")
        .rename("model.class_token", "vit.embeddings.cls_token")
        .rename("model.position_embeddings", "vit.embeddings.position_embeddings")
        .rename("model.embed_patches.*", "vit.embeddings.patch_embeddings.projection.*")
        .rename("model.norm.*", "vit.layernorm.*")
        .rename("classifier.out_proj.*", "classifier.*");
    for (name, file) in [
        ("self_attn.q_proj", "attention.attention.query"),
        ("self_attn.k_proj", "attention.attention.key"),
        ("self_attn.v_proj", "attention.attention.value"),
        ("self_attn.o_proj", "attention.output.dense"),
        ("input_layernorm", "layernorm_before"),
        ("post_attention_layernorm", "layernorm_after"),
        ("mlp.up_proj", "intermediate.dense"),
        ("mlp.down_proj", "output.dense"),
    ] {
        layout = layout.rename(&format!("{ours}.{name}.*"), &format!("{theirs}.{file}.*"));
    }
    // The names of modules in transformers 5, whose weights keep the names above.
    for (name, file) in [
        ("self_attn.q_proj", "attention.q_proj"),
        ("self_attn.k_proj", "attention.k_proj"),
        ("self_attn.v_proj", "attention.v_proj"),
        ("self_attn.o_proj", "attention.o_proj"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
    ] {
        layout = layout.rename(&format!("{ours}.{name}.*"), &format!("vit.layers.*.{file}.*"));
    }
    layout
}
