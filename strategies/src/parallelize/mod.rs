//! Built-in parallelize functions: named tensor-parallel plans for the key
//! `trainer.strategy.parallelize`.
//!
//! | `type` | tensor-parallel plan |
//! |---|---|
//! | `llama` | NeMo's plan for Llama, with or without sequence parallelism |
//! | `hf` | a plan in Hugging Face's format, by default the plan of its Llama |
//! | `plan` | a plan written out |
//! | `none` | no tensor parallelism |
//!
//! They cut layers along the mesh dimension `tensor_parallel`. The strategy chooses the units that
//! are gathered on their own, unless `units` lists some.

mod hugging_face;
mod llama;
mod none;
mod plan;

pub use hugging_face::{HuggingFacePlan, StyleNames};
pub use llama::LlamaPlan;
pub use none::NoPlan;
pub use plan::InlinePlan;
