//! Pretrains a Llama-style language model on text, by default on this repository's own files.
//!
//! ```text
//! cargo run --release --example pretrain -- fit
//! cargo run --release --example pretrain -- fit --set trainer.strategy=ddp
//! cargo run --release --example pretrain -- fit --help
//! ```

#![allow(unreachable_pub, reason = "a program's modules read best with plain `pub`")]

mod hugging_face;
mod llama;
mod sample;

use std::path::PathBuf;
use std::process::ExitCode;

use fulgurite::cli::Cli;
use fulgurite::prelude::*;
use llama::{Llama, LlamaConfig};

/// The imports of the program's other files.
mod prelude {
    pub use fulgurite::core::checkpoint;
    pub use fulgurite::prelude::*;
}

struct LitLlama(Llama);

impl LightningModule for LitLlama {
    type Config = LlamaConfig;
    type Data = TextData;

    fn configure_from_data(config: &mut LlamaConfig, data: &TextData) -> Result<()> {
        if let Some(directory) = config.from_pretrained.clone() {
            hugging_face::read_config(config, &directory)?;
        }
        if config.vocab_size.is_none() {
            // Padding lets tensor-parallel ranks divide the vocabulary evenly.
            config.vocab_size = data.vocab_size().map(|tokens| tokens.next_multiple_of(8));
        }
        let ids = data.vocab_size().unwrap_or(data.largest_first_id() as usize + 1);
        config.check(data.seq_len(), ids)
    }

    fn configure_model(config: &LlamaConfig, b: &ModuleBuilder) -> Result<Self> {
        Ok(Self(Llama::new(config, b)?))
    }

    fn pretrained(config: &LlamaConfig) -> Option<PathBuf> {
        config.from_pretrained.clone()
    }

    fn training_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Loss> {
        self.0.loss(&batch.inputs, &batch.targets)
    }

    fn validation_step(&mut self, batch: &TokenBatch, ctx: &mut StepContext) -> Result<Loss> {
        let (loss, next_tokens) = self.0.evaluate(&batch.inputs, &batch.targets)?;
        ctx.log("val_accuracy", Accuracy::of_classes(&next_tokens, &batch.targets)?);
        ctx.log("val_perplexity", Perplexity::of(&loss)?);
        Ok(loss)
    }

    /// Returns the most likely next token at each position.
    fn predict_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Tensor> {
        Ok(self.0.evaluate(&batch.inputs, &batch.targets)?.1)
    }
}

impl Hooks<TextData> for LitLlama {
    fn on_fit_end(&mut self, ctx: &mut HookContext<TextData>) -> Result<()> {
        if let Some(text) = sample::continuation(&self.0, ctx)? {
            ctx.print(text);
        }
        Ok(())
    }
}

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    Cli::new("pretrain", "Pretrains a Llama-style language model on text")
        .with_defaults(include_str!("pretrain.toml"))
        .with_default("data.path", env!("CARGO_MANIFEST_DIR"))
        .run::<LitLlama>()
}
