//! Parallelize functions that a configuration can name.

mod llama;

pub use llama::Llama;
