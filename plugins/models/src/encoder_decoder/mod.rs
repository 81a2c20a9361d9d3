//! A decoder that attends to an encoder, as in T5.

mod cache;
mod config;
mod generate;
mod layer;
mod model;

pub use cache::DecodedTexts;
pub use config::EncoderDecoderConfig;
pub use model::{EncoderDecoder, SourceTexts};
