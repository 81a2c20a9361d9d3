//! The one encoder of this crate, its embeddings and its heads.

mod config;
#[expect(clippy::module_inception, reason = "the encoder beside its options and its heads")]
mod encoder;
mod heads;
mod layer;

pub use config::{
    ClassifierConfig, EncoderConfig, EncoderLayerConfig, InputConfig, MaskedLmConfig, PatchConfig,
    Pooling, TextConfig,
};
pub use encoder::{Encoder, EncoderInput};
pub(crate) use heads::pool;
pub use heads::{Classifier, MaskedLmHead};
