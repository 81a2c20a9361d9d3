//! Modules that train the models of this crate.

mod causal_lm;

pub use causal_lm::CausalLm;
