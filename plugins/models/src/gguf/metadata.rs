//! The metadata of a model: sizes and rotary embedding.

use fulgurite_nn::RopeScaling;

use super::architecture::{Architecture, Rotation, Windows};
use super::file::{Metadata, Value};
use crate::decoder::{DecoderConfig, NormPlacement};
use crate::layers::NormKind;

/// Adds the keys of the architecture, for sequences of at most `context` tokens.
pub(super) fn describe(
    metadata: &mut Metadata,
    architecture: &Architecture,
    config: &DecoderConfig,
    context: usize,
) {
    let mut set = |key: &str, value: Value| metadata.set(architecture.key(key), value);
    set("vocab_size", Value::size(config.vocab_size));
    set("block_count", Value::size(config.layers.len()));
    set("context_length", Value::size(context));
    set("embedding_length", Value::size(config.hidden_size));
    set("feed_forward_length", Value::size(config.feed_forward.intermediate_size));
    set("attention.head_count", Value::size(config.num_heads));
    set("attention.head_count_kv", Value::size(config.num_kv_heads));
    let eps = match config.norm {
        NormKind::Rms | NormKind::RmsUnitOffset => "attention.layer_norm_rms_epsilon",
        NormKind::Layer | NormKind::LayerWithoutBias => "attention.layer_norm_epsilon",
    };
    set(eps, Value::float(config.norm_eps));
    if architecture.wide_heads {
        set("attention.key_length", Value::size(config.head_dim));
        set("attention.value_length", Value::size(config.head_dim));
    }
    if let Some(limit) = config.attention_softcap {
        set("attn_logit_softcapping", Value::float(limit));
    }
    if let Some(limit) = config.logit_softcap {
        set("final_logit_softcapping", Value::float(limit));
    }
    if architecture.name == "gptneox" {
        let parallel = config.norms == NormPlacement::Parallel;
        set("use_parallel_residual", Value::Bool(parallel));
    }
    windows(&mut set, architecture, config);
    if architecture.rotation != Rotation::None {
        rope(&mut set, architecture, config);
    }
}

fn windows(set: &mut impl FnMut(&str, Value), architecture: &Architecture, config: &DecoderConfig) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    match (architecture.windows, window) {
        (Windows::AllBut(every), window) => {
            if let Some(window) = window {
                set("attention.sliding_window", Value::size(window));
            }
            let has: Vec<bool> = config.layers.iter().map(|layer| layer.window.is_some()).collect();
            let is_default = |(i, has): (usize, &bool)| *has == (i % every < every - 1);
            if !has.iter().enumerate().all(is_default) {
                set("attention.sliding_window_pattern", Value::Bools(has));
            }
        }
        // Readers tell Phi-4 from older models by a window of 0.
        (Windows::None, window) if architecture.name == "phi3" => {
            set("attention.sliding_window", Value::size(window.unwrap_or(0)));
        }
        (Windows::None, _) => {}
    }
}

fn rope(set: &mut impl FnMut(&str, Value), architecture: &Architecture, config: &DecoderConfig) {
    let rope = &config.ropes[0];
    set("rope.dimension_count", Value::size(rope.rotary_dim));
    set("rope.freq_base", Value::float(rope.theta));
    if let Some(second) = config.ropes.get(1) {
        set("rope.freq_base_swa", Value::float(second.theta));
    }
    match &rope.scaling {
        RopeScaling::Linear { factor } => {
            set("rope.scaling.type", "linear".into());
            set("rope.scaling.factor", Value::float(*factor));
        }
        RopeScaling::Yarn { factor, original_max_positions, .. } => {
            set("rope.scaling.type", "yarn".into());
            set("rope.scaling.factor", Value::float(*factor));
            set("rope.scaling.original_context_length", Value::size(*original_max_positions));
            // llama.cpp multiplies by the usual factor itself.
            let usual = 0.1 * factor.ln() + 1.0;
            let own = rope.scaling.attention_factor();
            if (own - usual).abs() > 1e-9 {
                set("rope.scaling.attn_factor", Value::float(own / usual));
            }
        }
        RopeScaling::LongRope { original_max_positions, .. } => {
            // "phi3" takes the tensors of factors without the type.
            if architecture.name != "phi3" {
                set("rope.scaling.type", "longrope".into());
            }
            set("rope.scaling.original_context_length", Value::size(*original_max_positions));
            set("rope.scaling.attn_factor", Value::float(rope.scaling.attention_factor()));
        }
        // The factors of "llama3" are a tensor. The context ends where "dynamic" begins.
        RopeScaling::None | RopeScaling::Llama3 { .. } | RopeScaling::Dynamic { .. } => {}
    }
}
