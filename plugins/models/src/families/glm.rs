//! GLM-4.5 and 4.6.
//!
//! Llama with biases of queries, keys and values (`attention_bias`), norms of queries and keys
//! (`use_qk_norm`), half of each head rotated, and DeepSeek-V3's experts behind the first
//! `first_k_dense_replace` layers. Layers that predict several tokens are not trained.

use fulgurite_error::Result;
use fulgurite_nn::{QkNorm, QkNormScope};

use super::Description;
use super::common::{Defaults, decoder};
use super::experts::{RoutedDefaults, routed};
use crate::config::Reader;

pub(super) fn glm4_moe(reader: &Reader<'_>) -> Result<Description> {
    let defaults = Defaults {
        max_positions: 131_072,
        eps: 1e-5,
        kv_heads: Some(8),
        partial: 0.5,
        partial_key: Some("partial_rotary_factor"),
        ..Defaults::LLAMA
    };
    let mut config = decoder(reader, &defaults)?;
    config.qkv_bias = reader.flag_or("attention_bias", false)?;
    if reader.flag_or("use_qk_norm", false)? {
        let (eps, scope) = (config.norm_eps, QkNormScope::Head);
        config.qk_norm = Some(QkNorm { eps, scope, unit_offset: false });
    }
    let defaults = RoutedDefaults {
        experts: [128, 8],
        intermediate_size: 1408,
        groups: [1, 1],
        scale: 1.0,
        dense_layers: 1,
    };
    routed(reader, config, &defaults)
}
