//! The edges between the decoder's modules, without its head.

use fulgurite_engine::module::ModuleBuilder;

use super::config::{DecoderConfig, NormPlacement};

/// Declares which outputs each module gets, so that a tensor-parallel plan that does not fit is
/// refused before ranks start.
pub(super) fn declare(config: &DecoderConfig, b: &ModuleBuilder) {
    let mut embeddings = vec!["model.embed_tokens"];
    if config.learned_positions {
        embeddings.push("model.embed_positions");
    }
    b.edge(&embeddings, "model.embed_dropout");
    // The modules whose outputs were last added to the residual stream.
    let mut stream = vec!["model.embed_dropout".to_owned()];
    for i in 0..config.layers.len() {
        let within = |name: &str| format!("model.layers.{i}.{name}");
        let path = |names: &[&str]| {
            for pair in names.windows(2) {
                b.edge(&[within(pair[0])], &within(pair[1]));
            }
        };
        let attention: &[&str] = match config.norms {
            NormPlacement::Before | NormPlacement::Parallel => {
                &["input_layernorm", "self_attn", "attn_dropout"]
            }
            NormPlacement::After => &["self_attn", "attn_dropout", "post_attention_layernorm"],
            NormPlacement::Around => {
                &["input_layernorm", "self_attn", "attn_dropout", "post_attention_layernorm"]
            }
        };
        let mlp: &[&str] = match config.norms {
            NormPlacement::Before | NormPlacement::Parallel => {
                &["post_attention_layernorm", "mlp", "mlp_dropout"]
            }
            NormPlacement::After => &["mlp", "mlp_dropout", "post_feedforward_layernorm"],
            NormPlacement::Around => {
                &["pre_feedforward_layernorm", "mlp", "mlp_dropout", "post_feedforward_layernorm"]
            }
        };
        path(attention);
        path(mlp);
        let last = |names: &[&str]| within(names[names.len() - 1]);
        b.edge(&stream, &within(attention[0]));
        if config.norms != NormPlacement::Parallel {
            stream.push(last(attention));
        }
        b.edge(&stream, &within(mlp[0]));
        stream = vec![last(attention), last(mlp)];
    }
    b.edge(&stream, "model.norm");
}
