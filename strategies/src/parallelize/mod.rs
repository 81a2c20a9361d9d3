//! Built-in parallelize functions: tensor-parallel plans by name, for the key
//! `trainer.strategy.parallelize`.
//!
//! | `type` | what layers get |
//! |---|---|
//! | `llama` | NeMo's plan for Llama, with or without sequence parallelism |
//! | `hf` | a plan in Hugging Face's words, by default that of its Llama |
//! | `plan` | a plan written out |
//! | `none` | no tensor parallelism |
//!
//! They cut layers along the mesh dimension `tensor_parallel`. Which units are gathered on their own
//! they leave to the strategy, unless `units` names some.

mod hugging_face;
mod llama;
mod none;
mod plan;

pub use hugging_face::{HuggingFacePlan, StyleNames};
pub use llama::LlamaPlan;
pub use none::NoPlan;
pub use plan::InlinePlan;
