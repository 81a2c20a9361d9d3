//! The names and shapes of tensors in Hugging Face files, and in the models of this crate.
//!
//! Models have Llama's names, and separate projections of queries, keys and values, whatever their
//! family: so one tensor-parallel plan, one list of layers for adapters and one decoder serve all.
//! A [`WeightLayout`] says which tensor of a file each tensor of the model is a part of. It works
//! in both directions: [`MappedSource`] reads a file under the model's names, [`ExportedSource`]
//! reads a model under the file's.

mod export;
mod layout;
mod mapped;
mod stack;
mod twice;
mod view;

pub use export::ExportedSource;
pub use layout::WeightLayout;
pub use mapped::MappedSource;
pub(crate) use twice::{REFERENCE, Twice};
pub(crate) use view::View;
