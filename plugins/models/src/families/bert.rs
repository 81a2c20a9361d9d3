//! BERT and RoBERTa.
//!
//! Norms after attention and MLP, learned positions, biases everywhere.
//!
//! | | BERT | RoBERTa |
//! |---|---|---|
//! | position of the first token | 0 | `pad_token_id` + 1, padding is not counted |
//! | segments | `type_vocab_size`, 2 | 1 |
//! | a classification's `dense` | the pooler, which is pretrained | part of the head |

use fulgurite_error::Result;

use super::Description;
use super::common::classifier;
use crate::config::Reader;
use crate::encoder::{
    ClassifierConfig, EncoderConfig, EncoderLayerConfig, InputConfig, MaskedLmConfig, Pooling,
    TextConfig,
};
use crate::layers::{FeedForward, NormKind};
use crate::weights::WeightLayout;

/// What RoBERTa has differently.
struct Kind {
    prefix: &'static str,
    roberta: bool,
}

pub(super) fn bert(reader: &Reader<'_>) -> Result<Description> {
    describe(reader, &Kind { prefix: "bert", roberta: false })
}

pub(super) fn roberta(reader: &Reader<'_>) -> Result<Description> {
    describe(reader, &Kind { prefix: "roberta", roberta: true })
}

fn describe(reader: &Reader<'_>, kind: &Kind) -> Result<Description> {
    let hidden_size = reader.size_or("hidden_size", 768)?;
    let num_heads = reader.size_or("num_attention_heads", 12)?;
    reader.per_head("hidden_size", hidden_size, "num_attention_heads", num_heads)?;
    reader.fixed("position_embedding_type", "absolute")?;
    reader.fixed("add_cross_attention", false)?;
    // Such a model looks at no later token.
    reader.fixed("is_decoder", false)?;
    reader.attention_dropout("attention_probs_dropout_prob", 0.1);
    let padding = reader.integer_or("pad_token_id", usize::from(kind.roberta))?;
    let activation = reader.activation("hidden_act", "gelu")?;
    let dropout = reader.probability("hidden_dropout_prob", 0.1)?;
    let head_dropout = reader.nullable_number("classifier_dropout", None)?.unwrap_or(dropout);
    let layer = EncoderLayerConfig { rope: None, window: None, attention_norm: false };
    let mut head = classifier(Pooling::First, head_dropout);
    if kind.roberta {
        head.input_dropout = head_dropout;
    }
    let config = EncoderConfig {
        input: InputConfig::Text(TextConfig {
            vocab_size: reader.size_or("vocab_size", if kind.roberta { 50_265 } else { 30_522 })?,
            positions: Some(reader.size_or("max_position_embeddings", 512)?),
            first_position: if kind.roberta { padding + 1 } else { 0 },
            segments: reader.size_or("type_vocab_size", 2)?,
        }),
        hidden_size,
        num_heads,
        qkv_bias: true,
        output_bias: true,
        feed_forward: FeedForward {
            intermediate_size: reader.size_or("intermediate_size", 3072)?,
            gated: false,
            activation,
            bias: true,
        },
        norm: NormKind::Layer,
        norm_eps: reader.eps("layer_norm_eps", 1e-12)?,
        post_norm: true,
        embedding_norm: true,
        ropes: Vec::new(),
        layers: vec![layer; reader.size_or("num_hidden_layers", 12)?],
        initializer_range: reader.initializer_range()?,
        embedding_dropout: dropout,
        residual_dropout: dropout,
        masked_lm: Some(MaskedLmConfig {
            dense_bias: true,
            activation: if kind.roberta { fulgurite_nn::Activation::Gelu } else { activation },
            decoder_bias: true,
            tied: reader.flag_or("tie_word_embeddings", true)?,
        }),
        classifier: head,
        token_classifier: ClassifierConfig { dense: None, input_dropout: 0.0, ..head },
    };
    Ok(Description {
        token_head: kind.roberta.then_some("classifier.out_proj.*"),
        ..Description::encoder(config, weights(kind))
    })
}

fn weights(kind: &Kind) -> WeightLayout {
    let prefix = kind.prefix;
    let (ours, theirs) = ("model.layers.*", format!("{prefix}.encoder.layer.*"));
    let mut layout = WeightLayout::new(prefix)
        .ignore("*.position_ids")
        .ignore("cls.seq_relationship.weight")
        .ignore("cls.seq_relationship.bias");
    for (name, file) in [
        ("embed_tokens", "word_embeddings"),
        ("embed_positions", "position_embeddings"),
        ("embed_segments", "token_type_embeddings"),
        ("embed_norm", "LayerNorm"),
    ] {
        layout =
            layout.rename(&format!("model.{name}.*"), &format!("{prefix}.embeddings.{file}.*"));
    }
    for (name, file) in [
        ("self_attn.q_proj", "attention.self.query"),
        ("self_attn.k_proj", "attention.self.key"),
        ("self_attn.v_proj", "attention.self.value"),
        ("self_attn.o_proj", "attention.output.dense"),
        ("post_attention_layernorm", "attention.output.LayerNorm"),
        ("mlp.up_proj", "intermediate.dense"),
        ("mlp.down_proj", "output.dense"),
        ("post_feedforward_layernorm", "output.LayerNorm"),
    ] {
        layout = layout.rename(&format!("{ours}.{name}.*"), &format!("{theirs}.{file}.*"));
    }
    match kind.roberta {
        true => layout
            .rename("lm_head.norm.*", "lm_head.layer_norm.*")
            .rename("lm_head.decoder.bias", "lm_head.bias")
            .ignore("roberta.pooler.dense.weight")
            .ignore("roberta.pooler.dense.bias"),
        false => layout
            .rename("lm_head.dense.*", "cls.predictions.transform.dense.*")
            .rename("lm_head.norm.*", "cls.predictions.transform.LayerNorm.*")
            .rename("lm_head.decoder.bias", "cls.predictions.bias")
            .rename("lm_head.decoder.weight", "cls.predictions.decoder.weight")
            .ignore("cls.predictions.decoder.bias")
            .rename("classifier.dense.*", "bert.pooler.dense.*")
            .rename("classifier.out_proj.*", "classifier.*"),
    }
}
