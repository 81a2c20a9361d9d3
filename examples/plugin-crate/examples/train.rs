//! A program that links the plugins with one `use`; the configuration names them.

use std::process::ExitCode;

use fulgurite::prelude::*;
use fulgurite_local_sgd as _;
use serde::{Deserialize, Serialize};

struct Net {
    embed: Embedding,
    blocks: Vec<Unit<GeluMlp>>,
    head: Linear,
}

#[derive(Clone, Serialize, Deserialize, Documented)]
#[serde(deny_unknown_fields, default)]
struct NetConfig {
    /// Width of the residual stream.
    #[default(16)]
    dim: usize,
    /// Number of blocks.
    #[default(4)]
    layers: usize,
}

/// All bytes, and the end of a text.
const VOCAB: usize = 257;

impl LightningModule for Net {
    type Config = NetConfig;
    type Data = TextData;

    fn configure_model(cfg: &NetConfig, b: &ModuleBuilder) -> Result<Self> {
        let block = |i| b.unit(&format!("blocks.{i}"), |b| GeluMlp::new(b, cfg.dim, 4 * cfg.dim));
        Ok(Self {
            embed: Embedding::new(&b.pp("embed"), VOCAB, cfg.dim)?,
            blocks: (0..cfg.layers).map(block).collect::<Result<_>>()?,
            head: Linear::new(&b.pp("head"), cfg.dim, VOCAB)?,
        })
    }

    fn training_step(&mut self, batch: &TokenBatch, _: &mut StepContext) -> Result<Loss> {
        let mut x = self.embed.forward(&batch.inputs)?;
        for block in &self.blocks {
            x = (&x + block.forward(&x)?)?;
        }
        cross_entropy(&self.head.forward(&x)?, &batch.targets)
    }
}

impl Hooks<TextData> for Net {} // none

fulgurite::use_mimalloc!();

fn main() -> ExitCode {
    fulgurite::cli::<Net>()
}
