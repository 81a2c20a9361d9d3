//! The one decoder of this crate, with the options that families set.

mod config;
#[expect(clippy::module_inception, reason = "the decoder beside its options and its layer")]
mod decoder;
mod edges;
mod layer;
mod passed;

pub use config::{DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig, LoadLog, NormPlacement};
pub use decoder::Decoder;
pub(crate) use passed::as_base;
