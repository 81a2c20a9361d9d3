//! Modules that train the models of this crate.

mod causal_lm;
mod classes;
mod common;
mod embedding;
#[cfg(feature = "images")]
mod image_classification;
mod losses;
mod masked_lm;
mod sequence_classification;
mod token_classification;

pub use causal_lm::CausalLm;
pub use embedding::Embedding;
#[cfg(feature = "images")]
pub use image_classification::ImageClassification;
pub use masked_lm::MaskedLm;
pub use sequence_classification::SequenceClassification;
pub use token_classification::TokenClassification;
