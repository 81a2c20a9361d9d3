//! Mixtral.
//!
//! Mistral with a mixture of experts in place of each MLP. The weights of a token's experts sum to
//! 1.

use fulgurite_error::Result;

use super::Description;
use super::common::{Defaults, ExpertFiles, Experts, decoder, experts, set_windows};
use crate::config::Reader;

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
    let intermediate_size = config.feed_forward.intermediate_size;
    let defaults = Experts { number: 8, per_token: 2, intermediate_size, normalize: true };
    let files = ExpertFiles {
        block: "block_sparse_moe",
        projections: [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")],
    };
    experts(reader, config, defaults, files)
}
