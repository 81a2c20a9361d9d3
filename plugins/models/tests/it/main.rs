//! Tests of the models: against transformers, of configurations, and of weights' layouts.

mod configurations;
mod encoder_decoders;
mod expert_adapters;
mod experts;
mod fixtures;
mod generation;
mod gguf;
mod modules;
mod packed;
mod peft_names;
mod reference_page;
mod routers;
mod transformers;
