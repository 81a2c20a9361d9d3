//! gpt-oss.
//!
//! Attention with biases and a sink for each head, with a window in every other layer, YaRN, and a
//! mixture of experts in each layer whose router and experts have biases. The softmax of the router
//! is over a token's experts, and the experts have a clamped SwiGLU. Files hold gates and ups of
//! all experts as one stack of transposed matrices with columns in turn. Published ones are in
//! MXFP4.

use fulgurite_error::Result;
use fulgurite_nn::{ClampedSwiGlu, ExpertActivation, RopeScaling, RouterConfig};

use super::Description;
use super::common::{Defaults, decoder, layout, set_windows};
use super::experts::{NUMBER, balance, mixture, numbers};
use crate::config::Reader;
use crate::decoder::ExpertsConfig;

pub(super) fn gpt_oss(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        max_positions: 131_072,
        eps: 1e-5,
        theta: 150_000.0,
        head_dim: Some(64),
        kv_heads: Some(8),
        ..Defaults::LLAMA
    };
    let mut config = decoder(reader, &defaults)?;
    if reader.value("rope_parameters").is_none() && reader.value("rope_scaling").is_none() {
        config.ropes[0].scaling = RopeScaling::Yarn {
            factor: 32.0,
            original_max_positions: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: false,
        };
    }
    let bias = reader.flag_or("attention_bias", true)?;
    (config.qkv_bias, config.output_bias, config.sinks) = (bias, bias, true);
    let window = reader.nullable_size("sliding_window", Some(128))?;
    let windowed = reader.windowed_layers(config.layers.len(), |i| i.is_multiple_of(2))?;
    set_windows(&mut config.layers, |i| windowed[i], window);
    config.layers.iter_mut().for_each(|layer| layer.has_experts = true);
    let number = |key: &str, default| -> Result<f64> {
        let number = reader.number_or(key, default)?;
        match number > 0.0 && number <= f64::from(f32::MAX) {
            true => Ok(number),
            false => Err(reader.wrong(key, format!("must be above 0, found {number:?}"))),
        }
    };
    let clamped = ClampedSwiGlu {
        alpha: number("swiglu_alpha", 1.702)?,
        limit: number("swiglu_limit", 7.0)?,
    };
    let width = config.feed_forward.intermediate_size;
    config.experts = Some(ExpertsConfig {
        router: RouterConfig { bias: true, ..RouterConfig::default() },
        activation: Some(ExpertActivation::Clamped(clamped)),
        bias: true,
        balance: balance(reader)?,
        ..mixture(reader, numbers(reader, NUMBER, [128, 4])?, width)?
    });
    let ours = "model.layers.*.mlp.experts";
    let path = |name: &str| format!("{ours}.{name}");
    let weights = layout()
        .rename("model.layers.*.mlp.gate.*", "model.layers.*.mlp.router.*")
        .interleave_stacked(ours, &["gate_proj.weight", "up_proj.weight"], &path("gate_up_proj"))
        .interleave_stacked(ours, &["gate_proj.bias", "up_proj.bias"], &path("gate_up_proj_bias"))
        .transpose_stacked(&format!("{ours}.down_proj.weight"), &path("down_proj"))
        .rename(&format!("{ours}.down_proj.bias"), &path("down_proj_bias"));
    Ok(Description::decoder(config, weights))
}
