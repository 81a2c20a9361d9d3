//! Mixtral.
//!
//! Mistral with a mixture of experts in place of each MLP. The weights of a token's experts sum to
//! 1.

use fulgurite_error::Result;

use super::Description;
use super::common::{Defaults, decoder, set_windows};
use super::experts::{ExpertFiles, NUMBER, balance, mixture, numbers};
use crate::config::Reader;
use crate::decoder::ExpertsConfig;

pub(super) fn mixtral(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        max_positions: 4096 * 32,
        eps: 1e-5,
        theta: 1e6,
        kv_heads: Some(8),
        ..Defaults::LLAMA
    };
    let mut config = decoder(reader, &defaults)?;
    let window = reader.nullable_size("sliding_window", None)?;
    set_windows(&mut config.layers, |_| true, window);
    config.layers.iter_mut().for_each(|layer| layer.has_experts = true);
    reader.fixed("router_jitter_noise", 0.0)?;
    let width = config.feed_forward.intermediate_size;
    let experts = ExpertsConfig {
        balance: balance(reader)?,
        ..mixture(reader, numbers(reader, NUMBER, [8, 2])?, width)?
    };
    let files = ExpertFiles {
        block: "block_sparse_moe",
        projections: [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")],
    };
    let weights = files.layout(&experts);
    config.experts = Some(experts);
    Ok(Description::decoder(config, weights))
}
