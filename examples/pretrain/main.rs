//! Pretrains a Llama-style language model on text, by default on this repository's own files.
//!
//! ```text
//! cargo run --release --example pretrain -- fit
//! cargo run --release --example pretrain -- fit --set trainer.strategy=ddp
//! cargo run --release --example pretrain -- fit --help
//! ```

mod sample;

use std::process::ExitCode;

use fulgurite::cli::Cli;
use fulgurite_models::CausalLm;

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    Cli::new("pretrain", "Pretrains a Llama-style language model on text")
        .with_defaults(include_str!("pretrain.toml"))
        .with_default("data.path", env!("CARGO_MANIFEST_DIR"))
        .with_callback(|| sample::Continuation)
        .run::<CausalLm>()
}
