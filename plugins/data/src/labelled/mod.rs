//! Labelled texts, tagged words and pairs of texts, for models that classify or embed.

mod batch;
mod config;
mod encode;
mod labels;
mod texts;

pub use batch::{Labels, PaddedTexts, TextBatch};
pub use config::{LabelledTextsConfig, RowKind};
pub use labels::LabelKind;
pub use texts::LabelledTexts;
