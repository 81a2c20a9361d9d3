//! Models so small that the framework's own time shows, and their data.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{Decoder, DecoderSize};
use fulgurite::prelude::*;

/// A model, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TinyModel {
    /// The decoder of `bench train --workload tiny`: 0.98 M parameters, 4 × 64 tokens a rank
    Tiny,
    /// A decoder of one layer and 5 thousand parameters, 8 tokens a rank
    Small,
    /// One number: a step does almost nothing
    #[default]
    One,
}

impl TinyModel {
    /// The name in configurations, tables and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
            Self::One => "one",
        }
    }

    fn decoder(self) -> Option<DecoderSize> {
        let size = |[vocab, dim, layers, heads, ffn]: [usize; 5]| {
            Some(DecoderSize { vocab, dim, layers, heads, kv_heads: heads, ffn })
        };
        match self {
            Self::Tiny => size([512, 128, 4, 4, 384]),
            Self::Small => size([64, 16, 1, 2, 48]),
            Self::One => None,
        }
    }

    /// The number of sequences in a rank's batch, and of tokens in each.
    fn batch(self) -> [usize; 2] {
        match self {
            Self::Tiny => [4, 64],
            Self::Small => [1, 8],
            Self::One => [1, 1],
        }
    }
}

/// The tables `[model]` and `[data]`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TinyModelConfig {
    pub(super) name: TinyModel,
}

/// A module with one parameter; returns the parameter's square for any input.
pub(super) struct Number(Parameter);

impl Module for Number {
    fn forward(&self, _: &Tensor) -> Result<Tensor> {
        Ok(self.0.tensor()?.sqr()?)
    }
}

/// The module of a [`TinyModel`].
pub(super) enum Net {
    Decoder(Box<Decoder>),
    One(Unit<Number>),
}

impl Net {
    /// Describes the model; allocates nothing.
    pub(super) fn new(b: &ModuleBuilder, model: TinyModel) -> Result<Self> {
        Ok(match model.decoder() {
            Some(size) => Self::Decoder(Box::new(Decoder::new(b, &size)?)),
            None => {
                let number =
                    |b: &ModuleBuilder| Ok(Number(b.parameter("weight", [1], Init::ONES)?));
                Self::One(b.unit("number", number)?)
            }
        })
    }

    /// The loss of a batch.
    pub(super) fn loss(&self, (ids, targets): &(Tensor, Tensor)) -> Result<Loss> {
        match self {
            Self::Decoder(decoder) => decoder.loss(ids, targets),
            Self::One(number) => Ok(Loss::new(number.forward(ids)?.sum_all()?, 1.0)),
        }
    }
}

impl LightningModule for Net {
    type Config = TinyModelConfig;
    type Data = Tokens;

    fn configure_model(config: &TinyModelConfig, b: &ModuleBuilder) -> Result<Self> {
        Self::new(b, config.name)
    }

    fn training_step(&mut self, batch: &(Tensor, Tensor), _: &mut StepContext) -> Result<Loss> {
        self.loss(batch)
    }
}

impl Hooks<Tokens> for Net {}

/// An endless stream of random tokens.
pub(super) struct Tokens {
    vocab: u32,
    length: usize,
}

impl DataModule for Tokens {
    type Config = TinyModelConfig;
    type Batch = (Tensor, Tensor);

    fn setup(config: &TinyModelConfig, _: &DataContext) -> Result<Self> {
        let [_, length] = config.name.batch();
        let vocab = config.name.decoder().map_or(1, |size| size.vocab as u32);
        Ok(Self { vocab, length })
    }

    fn batch_size(config: &TinyModelConfig) -> usize {
        config.name.batch()[0]
    }

    fn shuffle(_: &TinyModelConfig) -> bool {
        false
    }

    fn len(&self, split: Split) -> u64 {
        // Large enough that no epoch ends.
        if matches!(split, Split::Train) { 1 << 40 } else { 0 }
    }

    fn batch(&self, _: Split, indices: &[u64], device: &Device) -> Result<(Tensor, Tensor)> {
        let stream = Stream::new(0, Purpose::Sample, "bench overhead");
        let row = |&index: &u64| {
            let tokens = stream.child(index);
            (0..=self.length as u64).map(move |i| tokens.word(i) % self.vocab)
        };
        let ids: Vec<u32> = indices.iter().flat_map(row).collect();
        let ids = Tensor::from_vec(ids, (indices.len(), self.length + 1), device)?;
        let part = |start| ids.narrow(1, start, self.length)?.contiguous();
        Ok((part(0)?, part(1)?))
    }
}
