//! The one decoder of this crate, with the options that families set.

mod beside_base;
mod config;
#[expect(clippy::module_inception, reason = "the decoder beside its options and its layer")]
mod decoder;
mod edges;
mod layer;

pub(crate) use beside_base::as_base;
pub use config::{DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig, LoadLog, NormPlacement};
pub use decoder::Decoder;
