//! What an architecture of llama.cpp cannot express.

use fulgurite_error::{Error, Result};
use fulgurite_nn::RopeScaling;

use super::architecture::{Architecture, Head, Presence, Rotation, Scaling, Scores, Windows};
use crate::decoder::DecoderConfig;

/// The longest sequence for which llama.cpp computes as the model, and the reason if that is
/// shorter than the model's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) length: usize,
    pub(super) reason: Option<String>,
}

/// Checks that llama.cpp's architecture computes this model.
///
/// # Errors
/// If the model needs something that the architecture lacks, naming the key of `config.json`.
pub(super) fn check(architecture: &Architecture, config: &DecoderConfig) -> Result<Context> {
    check_layers(architecture, config)?;
    check_attention(architecture, config)?;
    check_rope(architecture, config)?;
    Ok(context(architecture, config))
}

fn wrong<T>(architecture: &Architecture, key: &str, message: &str) -> Result<T> {
    Err(Error::Config(format!(
        "`{key}`: {message}; llama.cpp's architecture \"{}\" computes nothing else, so the model cannot be written as \
         GGUF",
        architecture.name
    )))
}

fn check_layers(architecture: &Architecture, config: &DecoderConfig) -> Result<()> {
    let wrong = |key: &str, message: &str| wrong(architecture, key, message);
    let biases = [
        ("attention_bias", architecture.qkv_bias, config.qkv_bias),
        ("attention_bias", architecture.output_bias, config.output_bias),
        ("mlp_bias", architecture.mlp_bias, config.feed_forward.bias),
    ];
    for (key, presence, has) in biases {
        match (presence, has) {
            (Presence::Never, true) => return wrong(key, "expected layers without these biases"),
            (Presence::Always, false) => return wrong(key, "expected layers with these biases"),
            _ => {}
        }
    }
    if !architecture.activations.contains(&config.feed_forward.activation) {
        let expected = format!(
            "expected the activation {:?}, found {:?}",
            architecture.activations[0], config.feed_forward.activation
        );
        return wrong("hidden_act", &expected);
    }
    if architecture.head == Head::Tied && !config.tied {
        return wrong("tie_word_embeddings", "expected true");
    }
    let softcaps = [
        ("attn_logit_softcapping", config.attention_softcap),
        ("final_logit_softcapping", config.logit_softcap),
    ];
    for ((key, value), presence) in softcaps.into_iter().zip(architecture.softcaps) {
        match (presence, value) {
            (Presence::Never, Some(_)) => return wrong(key, "expected none"),
            (Presence::Always, None) => return wrong(key, "expected a number"),
            _ => {}
        }
    }
    Ok(())
}

fn check_attention(architecture: &Architecture, config: &DecoderConfig) -> Result<()> {
    let wrong = |key: &str, message: &str| wrong(architecture, key, message);
    let DecoderConfig { hidden_size, num_heads, head_dim, .. } = *config;
    if !architecture.wide_heads && num_heads * head_dim != hidden_size {
        let expected = format!("expected hidden_size / num_attention_heads, found {head_dim}");
        return wrong("head_dim", &expected);
    }
    let plain = (head_dim as f64).powf(-0.5);
    let expected = match architecture.scores {
        Scores::HeadDimExcept(layers) if layers == config.layers.len() => {
            ((hidden_size / num_heads) as f64).powf(-0.5)
        }
        _ => plain,
    };
    for (i, layer) in config.layers.iter().enumerate() {
        let found = layer.scale.unwrap_or(plain);
        if (found - expected).abs() > 1e-6 * expected {
            let message = format!(
                "attention scores of layer {i} are multiplied by {found:.7}, expected {expected:.7}"
            );
            let key = match architecture.name {
                "gpt2" => "scale_attn_by_inverse_layer_idx",
                _ => "query_pre_attn_scalar",
            };
            return wrong(key, &message);
        }
    }
    Ok(())
}

fn check_rope(architecture: &Architecture, config: &DecoderConfig) -> Result<()> {
    let wrong = |key: &str, message: &str| wrong(architecture, key, message);
    if architecture.rotation == Rotation::None {
        return Ok(());
    }
    for (i, layer) in config.layers.iter().enumerate() {
        let expected = match (architecture.no_rope_every, config.ropes.len()) {
            (Some(every), _) if (i + 1) % every == 0 => None,
            (_, 2) => Some(usize::from(layer.window.is_some())),
            _ => Some(0),
        };
        if layer.rope != expected {
            return match config.ropes.len() {
                2 => wrong("sliding_window", "expected windows in all layers of that type"),
                _ => wrong("no_rope_layers", "expected 0 for every fourth layer, and 1 for others"),
            };
        }
    }
    if let Some(second) = config.ropes.get(1)
        && second.scaling != RopeScaling::None
    {
        return wrong("rope_parameters", "expected no scaling in layers with a window");
    }
    let rope = &config.ropes[0];
    if !architecture.partial_rotary && rope.rotary_dim != config.head_dim {
        return wrong("partial_rotary_factor", "expected 1");
    }
    let key = "rope_parameters";
    let scaling = match &rope.scaling {
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } => None,
        RopeScaling::Yarn { beta_fast, beta_slow, truncate, .. } => {
            if (*beta_fast, *beta_slow, *truncate) != (32.0, 1.0, true) {
                return wrong(key, "expected beta_fast = 32, beta_slow = 1 and truncate = true");
            }
            Some(Scaling::Yarn)
        }
        RopeScaling::Llama3 { .. } => Some(Scaling::Llama3),
        RopeScaling::LongRope { .. } => Some(Scaling::LongRope),
    };
    match scaling {
        Some(scaling) if !architecture.scalings.contains(&scaling) => {
            let name = format!("{scaling:?}").to_lowercase();
            wrong(key, &format!("found the scaling \"{name}\", which it lacks"))
        }
        _ => Ok(()),
    }
}

fn context(architecture: &Architecture, config: &DecoderConfig) -> Context {
    let own = config.max_positions;
    let window = config.layers.iter().filter_map(|layer| layer.window).min();
    let limits = [
        window.filter(|_| architecture.windows == Windows::None).map(|window| {
            (window, format!("its attention looks back {window} tokens (`sliding_window`)"))
        }),
        match config.ropes.first().map(|rope| &rope.scaling) {
            Some(RopeScaling::Dynamic { max_positions, .. }) => Some((
                *max_positions,
                format!(
                    "its rotary embedding changes with the length beyond {max_positions} tokens (\"dynamic\")"
                ),
            )),
            _ => None,
        },
    ];
    let shortest = limits.into_iter().flatten().filter(|(length, _)| *length < own);
    match shortest.min_by_key(|(length, _)| *length) {
        None => Context { length: own, reason: None },
        Some((length, why)) => Context {
            length,
            reason: Some(format!(
                "the file's context is limited to {length} of {own} tokens: {why}, and llama.cpp's architecture \
                 \"{}\" does not; both agree up to that length",
                architecture.name
            )),
        },
    }
}
