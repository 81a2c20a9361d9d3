//! Tests of the models: against transformers, of configurations, and of weights' layouts.

mod configurations;
mod fixtures;
mod gguf;
mod modules;
mod transformers;
