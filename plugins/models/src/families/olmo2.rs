//! OLMo 2.
//!
//! Llama with norms after attention and MLP instead of before, and norms of the whole projections
//! of queries and keys.

use fulgurite_error::Result;
use fulgurite_nn::{QkNorm, QkNormScope};

use super::Description;
use super::common::{Defaults, decoder, described};
use crate::config::Reader;
use crate::decoder::NormPlacement;

pub(super) fn olmo2(reader: &Reader<'_>) -> Result<Description> {
    let mut config = decoder(reader, &Defaults { eps: 1e-5, ..Defaults::LLAMA })?;
    let bias = reader.flag_or("attention_bias", false)?;
    (config.qkv_bias, config.output_bias) = (bias, bias);
    config.norms = NormPlacement::After;
    let (eps, scope) = (config.norm_eps, QkNormScope::Projection);
    config.qk_norm = Some(QkNorm { eps, scope, unit_offset: false });
    Ok(described(config))
}
